"""Loading: the boxes a rank wants, intersected with the boxes there are. Any number of ranks, any partitioning.

Each rank reads the elements it needs and no others; no rank holds a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dsrun.checkpoint_files.region import regions_of_flat_range
from dsrun.errors import CheckpointError, Problem

from ..protocols import StateEntry
from .index import Index


def check_fit(index: Index, folder: Path, wanted: Iterable[tuple[str, str, tuple[int, ...]]], *, strict: bool) -> None:
    """Compares the tensors a model wants with those a checkpoint has, before anything is overwritten.

    Args:
        index: the checkpoint's.
        folder: its tag folder, for messages.
        wanted: (name, role, shape) of every tensor of the model, on whichever rank.
        strict: tensors in the checkpoint that the model does not have are an error too.

    Raises:
        CheckpointError: listing every tensor that is missing, unexpected, or of another shape.
    """
    problems: list[Problem] = []
    expected: set[tuple[str, str]] = set()
    for name, role, shape in wanted:
        expected.add((name, role))
        stored = index.tensors.get((name, role))
        if stored is None:
            problems.append(Problem(f"{folder}: no {role} of `{name}`, which the model has"))
        elif stored.shape != shape:
            problems.append(Problem(f"{folder}: `{name}` has shape {stored.shape}; the model's has {shape}"))
    if strict:
        problems += [
            Problem(f"{folder}: {role} of `{name}` is not in the model")
            for name, role in index.tensors
            if role in ("param", "buffer") and (name, role) not in expected
        ]
    if problems:
        first = Problem(problems[0].message, "this is a checkpoint of another model; build the model it was saved from")
        raise CheckpointError.of([first, *problems[1:]])


def read(
    index: Index, folder: Path, entries: Sequence[StateEntry], *, progress: Callable[[], None] = lambda: None
) -> None:
    """Fills each entry's tensor from the checkpoint, converting dtype and device.

    Args:
        index: the checkpoint's.
        folder: its tag folder.
        entries: this rank's pieces, whose names, roles and shapes fit (see `check_fit`).
        progress: called after each box, so that a slow disk is no hang.

    Raises:
        CheckpointError: a file is missing or damaged, or boxes do not cover a piece.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry in entries:
            stored = index.tensors[(entry.name, entry.role)]
            position = 0
            for region in regions_of_flat_range(entry.shape, entry.start, entry.stop):
                target = entry.tensor.narrow(0, position, region.numel).view(region.shape)
                position += region.numel
                covered = 0
                for box in stored.boxes:
                    common = region.intersect(box.region)
                    if common is None:
                        continue
                    if box.file not in files:
                        files[box.file] = _open(folder / box.file, stack)
                    source = _slice(files[box.file], box.key, common.relative_to(box.region).slices, folder / box.file)
                    target[common.relative_to(region).slices].copy_(source)
                    covered += common.numel
                    progress()
                if covered != region.numel:
                    raise CheckpointError(
                        f"{folder}: {entry.role} of `{entry.name}` has {covered} of {region.numel} elements of the box "
                        f"at {region.offset}",
                        hint="the index is damaged; load another tag",
                    )


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="load another tag") from error


def _slice(file: Any, key: str, slices: tuple[slice, ...], path: Path) -> Any:
    try:
        return file.get_slice(key)[slices] if slices else file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: entry `{key}` cannot be read: {error}", hint="load another tag") from error
