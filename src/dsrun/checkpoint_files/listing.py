"""Which checkpoints a folder has, and how each of them is: whole, torn or damaged. Reads indexes, no data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dsrun.errors import CheckpointError

from .folder import LATEST_FILE
from .index import INDEX_FILE, Index
from .parse import read_index

_MOST_LATEST = 300


class TagState(Enum):
    """How a tag is, as far as names, sizes and the index tell."""

    COMPLETE = "complete"
    #: Files of a save that was interrupted, or is under way: no index.
    TORN = "torn"
    #: An index that cannot be read, or files that are missing or of another size.
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Tag:
    """A folder that a save has made.

    Attributes:
        name: of the folder.
        state: how it is.
        reason: what is wrong with it; None where it is complete.
        step: optimizer steps that it is of; None where that is not known.
        nbytes: of all its files.
        saved: when, in seconds since the epoch: of the index, or the newest file where there is none.
        is_latest: the file `latest` names it.
        shared_bytes: of them, those of files that are another folder's too, and on the disk once; see `reference.py`.
    """

    name: str
    state: TagState
    reason: str | None
    step: int | None
    nbytes: int
    saved: float
    is_latest: bool
    shared_bytes: int = 0


def list_tags(folder: Path) -> list[Tag]:
    """Returns the checkpoints of a folder, oldest first; other folders in it are passed over.

    Args:
        folder: of a run's checkpoints.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be read: {(error.strerror or str(error)).lower()}",
            hint="name the folder that checkpoints were saved in",
        ) from error
    latest = named_by_latest(folder)
    tags = [_tag(path, is_latest=path.name == latest) for path in entries if is_checkpoint(path)]
    return sorted(tags, key=lambda tag: (tag.saved, tag.name))


def named_by_latest(folder: Path) -> str | None:
    """Returns what `latest` says, whether there is such a tag or not; None where there is no `latest`."""
    try:
        with (folder / LATEST_FILE).open("rb") as file:
            return file.read(_MOST_LATEST).decode("utf-8", "replace").strip()
    except OSError:
        return None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder holds what a save of this format leaves, whole or not; a link to one does not count."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / INDEX_FILE).is_file() or any(path.glob("rank-*.safetensors"))


def step_of(index: Index) -> int | None:
    """Returns the optimizer steps that a checkpoint is of; None where its values do not say."""
    counters: Any = index.values.get("counters")
    step = counters.get("global_steps") if isinstance(counters, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _tag(path: Path, *, is_latest: bool) -> Tag:
    files = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(path)}
    nbytes = sum(stat.st_size for stat in files.values())
    shared = sum(stat.st_size for stat in files.values() if stat.st_nlink > 1)
    times = {name: stat.st_mtime for name, stat in files.items()}
    saved = times.get(INDEX_FILE, max(times.values(), default=0.0))
    if INDEX_FILE not in files:
        reason = f"{INDEX_FILE} is missing: the save was interrupted, or is under way"
        return Tag(path.name, TagState.TORN, reason, None, nbytes, saved, is_latest, shared)
    try:
        index = read_index(path)
    except CheckpointError as error:
        return Tag(path.name, TagState.DAMAGED, str(error), None, nbytes, saved, is_latest, shared)
    for name, known in index.files.items():
        if name not in files or files[name].st_size != known.nbytes:
            size = f"has {files[name].st_size} bytes" if name in files else "is missing"
            reason = f"{path / name}: {size}; it had {known.nbytes} when it was saved"
            return Tag(path.name, TagState.DAMAGED, reason, step_of(index), nbytes, saved, is_latest, shared)
    return Tag(path.name, TagState.COMPLETE, None, step_of(index), nbytes, saved, is_latest, shared)
