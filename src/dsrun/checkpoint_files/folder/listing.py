"""Which checkpoints a folder has, and how each of them is: whole, torn or damaged. Reads indexes, no data."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dsrun.errors import CheckpointError

from ..index.value import INDEX_FILE, Index
from ..parse import read_index
from ..storage.places import ASKED_AT_ONCE, Address, Entry, Place, StorageError
from ..storage.registry import storage_of
from ..storage.tags import LATEST_FILE, is_complete, read_latest
from .leftovers import is_data_file
from .own_saves import wait_for_own_saves


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
        name: name of the tag's folder.
        state: state of the checkpoint: complete, torn or damaged.
        reason: description of the fault; None for a complete checkpoint.
        step: optimizer steps that it is of; None where that is not known.
        nbytes: bytes of all files in the tag's folder.
        saved: time of the save in seconds since the epoch: that of the index, or of the newest file where there is no
            index.
        is_latest: the file `latest` names it.
        shared_bytes: bytes of `nbytes` in files that another folder has too, stored once on the disk; see
            `checkpoint_files/reference.py`.
    """

    name: str
    state: TagState
    reason: str | None
    step: int | None
    nbytes: int
    saved: float
    is_latest: bool
    shared_bytes: int = 0


def list_tags(folder: Place) -> list[Tag]:
    """Returns the checkpoints of a folder, oldest first; other folders in it are passed over.

    Waits first for those that this job itself is still writing there, see `own_saves.py`.

    Args:
        folder: folder of a run's checkpoints.

    Raises:
        CheckpointError: it cannot be read.
    """
    wait_for_own_saves(folder)
    try:
        entries = [folder / entry.name for entry in storage_of(folder).list(folder) if entry.is_folder]
    except OSError as error:
        if isinstance(folder, Address):  # there are no folders, only names that begin alike
            return []
        raise CheckpointError(
            f"{folder}: cannot be read: {(error.strerror or str(error)).lower()}",
            hint="name the folder that checkpoints were saved in",
        ) from error
    latest = named_by_latest(folder)

    def look(path: Place) -> Tag | None:
        return _tag(path, is_latest=path.name == latest) if is_checkpoint(path) else None

    # Of a store each tag is some requests, which it answers side by side.
    with ThreadPoolExecutor(ASKED_AT_ONCE if isinstance(folder, Address) else 1) as pool:
        tags = [tag for tag in pool.map(look, entries) if tag is not None]
    return sorted(tags, key=lambda tag: (tag.saved, tag.name))


def named_by_latest(folder: Place) -> str | None:
    """Returns what `latest` says, whether there is such a tag or not; None where it says nothing."""
    try:
        return read_latest(folder)
    except OSError:
        return None


def refusal_of_latest(folder: Place) -> str | None:
    """Returns why `latest` cannot be read; None where it can, or there is none."""
    try:
        read_latest(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder / LATEST_FILE}: cannot be read: {error}"
    return None


def saved_at(target: Place) -> float:
    """Returns when a tag's index was written, in seconds since the epoch; FileNotFoundError where it has none."""
    if isinstance(target, Path):
        return (target / INDEX_FILE).stat().st_mtime
    return next((entry.modified for entry in storage_of(target).list(target) if entry.name == INDEX_FILE), 0.0)


def is_checkpoint(path: Place) -> bool:
    """Whether a folder holds what a save of this format leaves, whole or not; a link to one does not count."""
    if isinstance(path, Address):
        return is_complete(path) or any(is_data_file(entry) for entry in _entries(path))
    if path.is_symlink() or not path.is_dir():
        return False
    return is_complete(path) or any(path.glob("rank-*.safetensors"))


def step_of(index: Index) -> int | None:
    """Returns the optimizer steps that a checkpoint is of; None where its values do not say."""
    counters: Any = index.values.get("counters")
    step = counters.get("global_steps") if isinstance(counters, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _tag(path: Place, *, is_latest: bool) -> Tag:
    files = {entry.name: entry for entry in _entries(path)}
    nbytes = sum(entry.nbytes for entry in files.values())
    shared = sum(entry.nbytes for entry in files.values() if entry.names > 1)
    times = {name: entry.modified for name, entry in files.items()}
    saved = times.get(INDEX_FILE, max(times.values(), default=0.0))
    if INDEX_FILE not in files and not (isinstance(path, Address) and is_complete(path)):
        reason = f"{INDEX_FILE} is missing: the save was interrupted, or is under way"
        return Tag(path.name, TagState.TORN, reason, None, nbytes, saved, is_latest, shared)
    try:
        index = read_index(path)
    except StorageError:
        raise
    except CheckpointError as error:
        return Tag(path.name, TagState.DAMAGED, str(error), None, nbytes, saved, is_latest, shared)
    for name, known in index.files.items():
        if name not in files or files[name].nbytes != known.nbytes:
            told = _told_of_size(path / name, known.nbytes)
            if told is None:
                continue
            reason = f"{path / name}: {told}; it had {known.nbytes} bytes when it was saved"
            return Tag(path.name, TagState.DAMAGED, reason, step_of(index), nbytes, saved, is_latest, shared)
    return Tag(path.name, TagState.COMPLETE, None, step_of(index), nbytes, saved, is_latest, shared)


def _entries(path: Place) -> Sequence[Entry]:
    """Returns what is in a tag's folder; nothing where a listing of a store does not show it yet, or it is gone."""
    try:
        return storage_of(path).list(path)
    except FileNotFoundError:
        return ()


def _told_of_size(path: Place, nbytes: int) -> str | None:
    """Returns what is wrong with a file that is not listed with its size; None where it has it after all.

    A listing of a store may be late, and one of a folder does not say what is a pipe.
    """
    try:
        with storage_of(path).read(path) as file:
            return None if file.nbytes == nbytes else f"it has {file.nbytes} bytes"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
