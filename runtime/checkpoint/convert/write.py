"""What was found of another tool's checkpoint, written as one of dsrun's, as a run of one rank would have saved it."""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsrun import __version__
from dsrun.checkpoint_files.blocks.write_file import Repeatable, write_pieces
from dsrun.checkpoint_files.folder.listing import is_checkpoint
from dsrun.checkpoint_files.folder.publish import BOXES_KEY, Publication, file_name, publish
from dsrun.checkpoint_files.index.value import StoredFile
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.tags import tag_to_save
from dsrun.checkpoint_files.tensors.header import header_bytes
from dsrun.errors import CheckpointError

from ...optim.states.histories import of_counts
from ...optim.states.of_run import SCALAR
from ..format.tensor_file import bytes_of, dtype_name
from .foreign import ForeignCheckpoint, FoundTensor

_ALIGNED = 4096
_STEPS = SCALAR + "step"


def write(found: ForeignCheckpoint, folder: Place, tag: str, *, progress: Callable[[], None] = lambda: None) -> int:
    """Writes a checkpoint that `engine.load_checkpoint` loads, and lets `latest` name it; returns its bytes.

    Args:
        found: checkpoint contents to write.
        folder: folder of dsrun's checkpoints; created if it does not exist.
        tag: name in it.
        progress: callback after each block of the file that is written.

    Raises:
        CheckpointError: the tag is there already, or is no tag.
        OSError: the file system refuses.
    """
    target = tag_to_save(folder, tag)
    if target.exists() if isinstance(target, Path) else is_checkpoint(target):
        raise CheckpointError(f"{target}: it is there already", hint="pass another `--tag`, or remove it")
    calls = FileCalls()
    if isinstance(target, Path):
        calls.make_folder(target)
    identity = secrets.token_hex(4)
    ordered = sorted(found.tensors, key=lambda one: -one.dtype.itemsize)  # each at a multiple of its element's size
    published = False
    try:
        written = write_pieces(
            target / file_name(0, identity),
            Repeatable(partial(_pieces, _header(ordered), ordered)),
            calls=calls,
            progress=progress,
        )
        try:
            nbytes = publish(_publication(found, folder, tag, identity, written.stored), calls=calls)
            published = True
        finally:
            written.release(remove=not published)
    finally:
        if not published and isinstance(target, Path):
            calls.remove_folder(target)
    return nbytes


def _header(tensors: Sequence[FoundTensor]) -> bytes:
    named: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: list[dict[str, object]] = []
    for one in tensors:
        key = f"{one.name}:{one.role}" + "@0" * len(one.shape)
        assert key not in named, f"`{key}` is written once"
        box: dict[str, object] = {"name": one.name, "role": one.role, "shape": one.shape}
        dtype = dtype_name(torch.empty(0, dtype=one.dtype), key)
        if 0 in one.shape:
            boxes.append({**box, "key": None, "dtype": dtype})
        else:
            named[key] = (dtype, one.shape)
            boxes.append({**box, "key": key, "offset": [0] * len(one.shape)})
    return header_bytes(named, {"format": "pt", BOXES_KEY: json.dumps(boxes)}, aligned=_ALIGNED)[0]


def _pieces(header: bytes, tensors: Sequence[FoundTensor]) -> Generator[memoryview]:
    yield memoryview(header)
    for one in tensors:
        if 0 not in one.shape:
            values = one.make()
            assert (tuple(values.shape), values.dtype) == (one.shape, one.dtype), f"`{one.name}` is what was found"
            yield bytes_of(values)


def _publication(found: ForeignCheckpoint, folder: Place, tag: str, identity: str, file: StoredFile) -> Publication:
    counters = {"micro_steps": 0, "global_steps": 0, "global_samples": 0, "skipped_steps": 0, **found.counters}
    # Other tools count the steps of each parameter, and pass over it in those that do not use it.
    left_out = of_counts({one.name: float(one.make()) for one in found.tensors if one.role == _STEPS})
    values: dict[str, Any] = {
        "counters": counters,
        "optimizer": {"type": found.optimizer, "groups": found.groups, **({"left_out": left_out} if left_out else {})},
        "scheduler": found.scheduler,
        "loss_scale": found.loss_scale,
        "data": None,
        "client_state": found.client_state,
        "frozen": found.frozen,
        "config": found.config,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "dsrun": __version__},
        "git": None,
        "imported": found.origin,
    }
    return Publication(
        folder=folder,
        tag=tag,
        identity=identity,
        files=[file],
        values=values,
        ranks=[{}],
        aliases=found.aliases,
        save_latest=True,
        keep_last=None,
        keep_every=None,
    )
