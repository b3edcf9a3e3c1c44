"""Checkpoints and files of theirs that go: never a part of what somebody still reads, writes or has just published.

[Note: how a checkpoint goes] Its index is taken away first, by a rename, so that no part of what is left is taken for a
whole one. Jobs that share a folder may be at it meanwhile. Who reads a checkpoint holds a shared lock on its index
(`held`); who saves it holds locks on its files until all ranks know that it is published. Where one of these is held,
it stays. A save may also publish between the look and the rename: then what was taken is another index than the one
that was looked at, and is put back. On a file system without locks nobody is seen.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular

from ..index.value import INDEX_FILE
from ..parse import read_index
from ..reference import is_frozen_name
from ..storage.calls import FileCalls, is_locked_elsewhere, is_open_at, try_lock
from ..storage.places import Address, Place
from ..storage.tags import LATEST_FILE
from .leftovers import remove_all

_READ = "a process is reading it"
_PUBLISHED = "a save has just published it"


@contextmanager
def held(target: Place) -> Generator[None]:
    """Has a checkpoint stay meanwhile; nothing holds one in an object store, nor one that is not there.

    Args:
        target: the tag's folder.
    """
    with ExitStack() as closing:
        if isinstance(target, Path):
            with suppress(OSError):  # whoever reads it says what is wrong
                descriptor = open_regular(target / INDEX_FILE, os.O_RDONLY | os.O_NOFOLLOW)
                closing.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def remove_tag(target: Place, *, calls: FileCalls) -> str | None:
    """Removes a checkpoint, and leaves strangers' files; see [Note: how a checkpoint goes].

    Args:
        target: the tag's folder.
        calls: the file system, where it lies in one.

    Returns:
        why it stays; None where it went.
    """
    if isinstance(target, Address):
        remove_all(target)
        return None
    with ExitStack() as closing:
        closing.enter_context(suppress(FileNotFoundError))  # another job removes it as well
        reason = _take_index(target, calls, closing)
        if reason is not None:
            return reason
        remove_unnamed(target, calls=calls)
        calls.remove(_taken(target))
        calls.remove_folder(target)
    calls.sync_folder(target.parent)
    return None


def _take_index(target: Path, calls: FileCalls, closing: ExitStack) -> str | None:
    """Takes the index of a checkpoint away, and holds its lock; returns why it must stay."""
    index, taken = target / INDEX_FILE, _taken(target)
    try:
        descriptor = open_regular(index, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # there is none, or something else
        with suppress(IsADirectoryError):
            calls.remove(index)
        calls.sync_folder(target)
        return None
    closing.callback(os.close, descriptor)
    if is_locked_elsewhere(descriptor):
        return _READ
    try:
        names = sorted(read_index(target).files)
    except CheckpointError:
        names = []
    with ExitStack() as looking:
        for name in names:
            with suppress(OSError):
                file = open_regular(target / name, os.O_RDWR | os.O_NOFOLLOW)
                looking.callback(os.close, file)
                if is_locked_elsewhere(file):
                    return _PUBLISHED
        calls.rename(index, taken)
    if not is_open_at(taken, descriptor):
        with suppress(FileExistsError, FileNotFoundError):  # published once more since
            calls.link(taken, index)
        calls.remove(taken)
        calls.sync_folder(target)
        return _PUBLISHED
    calls.sync_folder(target)
    return None


def _taken(target: Path) -> Path:
    return target / f".{INDEX_FILE}.gone-{os.getpid()}"


def remove_unnamed(target: Path, *, calls: FileCalls) -> None:
    """Removes files of a tag that its index does not name and no save is writing.

    Another job may publish the same tag meanwhile. So files are locked first, and the index is read after that: what
    could be locked is of a save that is over, and if that one was published, the index is read as it left it. A second
    name of an earlier file has no lock of its own: it stays as long as another file of its save is locked.
    """
    present = [*target.glob("rank-*.safetensors"), *target.glob(f".{INDEX_FILE}.*")]
    with _locked(present, calls) as files:
        try:
            named = set(read_index(target).files) if (target / INDEX_FILE).exists() else set[str]()
        except CheckpointError:
            return
        under_way = {_save_of(path) for path in set(present) - set(files) if path.exists()}
        for path in files:
            if path.name not in named and not (is_frozen_name(path.name) and _save_of(path) in under_way):
                calls.remove(path)


def _save_of(path: Path) -> str:
    """Returns the identity of the save that a data file is of."""
    return path.stem.rpartition("-")[2]


def remove_unfinished_latest(folder: Path, *, calls: FileCalls) -> None:
    """Removes what saves that were killed have left beside `latest`."""
    with _locked(folder.glob(f".{LATEST_FILE}.*"), calls) as files:
        for path in files:
            calls.remove(path)


@contextmanager
def _locked(paths: Iterable[Path], calls: FileCalls) -> Generator[list[Path]]:
    """Yields the files whose locks could be taken, and holds these meanwhile; two names of a file have one lock."""
    locked: dict[Path, int] = {}
    held: set[tuple[int, int]] = set()
    try:
        for path in paths:
            try:
                descriptor = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:  # gone already, no file, or not ours to remove
                continue
            locked[path] = descriptor
            stat = os.fstat(descriptor)
            if (stat.st_dev, stat.st_ino) not in held and not try_lock(descriptor):
                os.close(locked.pop(path))
            else:
                held.add((stat.st_dev, stat.st_ino))
        # Another job may have removed one before its lock was taken here, and a save made it anew.
        yield [path for path, descriptor in locked.items() if is_open_at(path, descriptor)]
    finally:
        for descriptor in locked.values():
            calls.close(descriptor)
