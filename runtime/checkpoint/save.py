"""Saving: every rank writes its pieces to one file, rank 0 publishes the index. Knows no feature, only StateEntries.

[Note: publishing]
A tag exists once its index does. Data files carry a fresh id, so saving a tag again leaves the old files and the old
index valid until the new index replaces it by rename; only then are the old files removed. A crash at any point leaves
the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dsrun.atomic import sync_folder, write_atomic
from dsrun.checkpoint_files.region import Region, regions_of_flat_range
from dsrun.errors import CheckpointError

from ..mesh.agreement import Failure, attempt
from ..mesh.collectives import Collectives
from ..protocols import StateEntry
from .index import INDEX_FILE, LATEST_FILE, Index, StoredBox, StoredTensor, check_tag
from .tensor_file import write_tensor_file

_BOXES = "dsrun.boxes"


def save(
    folder: Path,
    tag: str,
    entries: Sequence[StateEntry],
    values: dict[str, Any],
    *,
    collectives: Collectives,
    device: torch.device,
    save_latest: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Writes one checkpoint; every rank must call. Enters one broadcast and two all-reduces of one number.

    Args:
        folder: the checkpoint folder, the same shared one on every rank.
        tag: name of this checkpoint inside it.
        entries: this rank's pieces.
        values: what is no tensor, as JSON values; rank 0's are stored.
        collectives: all ranks that hold pieces.
        device: where collectives' tensors live.
        save_latest: let `latest` name this tag afterwards.
        progress: called whenever a piece is on its way to the disk, so that a slow disk is no hang.

    Returns:
        the tag's folder.

    Raises:
        CheckpointError: on every rank, if one could not write; nothing was published.
    """
    target = folder / check_tag(tag)
    identity = torch.tensor([secrets.randbits(32)], dtype=torch.int64, device=device)
    collectives.broadcast(identity, source=0, of="checkpoint id").wait()
    suffix = f"{int(identity.item()):08x}"

    def write_part() -> None:
        check_json(values)
        _write_pieces(target, entries, rank=collectives.rank, suffix=suffix, progress=progress)

    def publish() -> None:
        if collectives.rank == 0:
            _publish(folder, target, suffix, values, collectives.size, save_latest=save_latest)

    failure = attempt(write_part, collectives, device=device, of="save")
    if failure is not None:
        with suppress(OSError):
            _file_of(target, collectives.rank, suffix).unlink(missing_ok=True)
    else:
        failure = attempt(publish, collectives, device=device, of="publish")
    if failure is not None:
        raise _refusal(target, failure) from failure.error
    return target


def check_json(values: Mapping[str, Any]) -> None:
    """Raises where a value would not come back from JSON as it is.

    Raises:
        CheckpointError: naming the value.
    """
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{name} cannot be saved: {error}",
                hint="it takes JSON values: numbers, text, lists and dicts with text keys; never a pickle",
            ) from error


def _refusal(target: Path, failure: Failure) -> CheckpointError:
    if failure.error is None:
        return CheckpointError(f"{target}: rank {failure.rank} could not save its part; nothing was published")
    hint = failure.error.hint if isinstance(failure.error, CheckpointError) else None
    return CheckpointError(f"{target}: could not be saved, nothing was published: {failure.error}", hint=hint)


def _write_pieces(
    target: Path, entries: Sequence[StateEntry], *, rank: int, suffix: str, progress: Callable[[], None]
) -> None:
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    boxes: list[dict[str, Any]] = []
    for entry in entries:
        if entry.replicated and rank != 0:
            continue
        position = 0
        for region in regions_of_flat_range(entry.shape, entry.start, entry.stop):
            key = f"{entry.name}:{entry.role}" + "".join(f"@{o}" for o in region.offset)
            tensors[key] = entry.tensor.narrow(0, position, region.numel).view(region.shape)
            position += region.numel
            box = {"key": key, "name": entry.name, "role": entry.role, "shape": entry.shape}
            boxes.append({**box, "box_offset": region.offset, "box_shape": region.shape})
        if position == 0:  # a tensor without elements has no box, but it has a shape
            boxes.append({"key": None, "name": entry.name, "role": entry.role, "shape": entry.shape})
            boxes[-1]["dtype"] = str(entry.tensor.dtype).removeprefix("torch.")
    path = _file_of(target, rank, suffix)
    write_tensor_file(path, tensors, metadata={_BOXES: json.dumps(boxes)}, progress=progress)
    sync_folder(target)


def _publish(
    folder: Path, target: Path, suffix: str, values: dict[str, Any], world_size: int, *, save_latest: bool
) -> None:
    """Collects every rank's boxes, writes the index, then `latest`, then removes what an older save left."""
    index = Index(world_size, {}, values)
    for rank in range(world_size):
        _collect(index, _file_of(target, rank, suffix))
    write_atomic(target / INDEX_FILE, index.to_bytes())
    sync_folder(folder)
    if save_latest:
        write_atomic(folder / LATEST_FILE, target.name.encode())
    for path in target.glob("rank-*.safetensors"):
        if not path.stem.endswith(suffix):
            path.unlink()


def _collect(index: Index, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        boxes: list[dict[str, Any]] = json.loads(file.metadata()[_BOXES])
        for box in boxes:
            name = (str(box["name"]), str(box["role"]))
            dtype = box.get("dtype") or str(file.get_slice(box["key"]).get_dtype())
            stored = index.tensors.setdefault(name, StoredTensor(tuple(box["shape"]), dtype))
            if box["key"] is not None:
                region = Region(tuple(box["box_offset"]), tuple(box["box_shape"]))
                stored.boxes.append(StoredBox(region, path.name, box["key"]))


def _file_of(target: Path, rank: int, suffix: str) -> Path:
    return target / f"rank-{rank:05d}-{suffix}.safetensors"
