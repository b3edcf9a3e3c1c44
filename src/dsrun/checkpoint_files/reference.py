"""Frozen parameters that several checkpoints of a run share: which file of an earlier one holds the same bytes.

[Note: one file, several names] A base model that is not trained is the same in every checkpoint. Where the run asks for
it, each rank's frozen parameters are a file of their own, which is written once; a later checkpoint gets a second name
(hard link) of that file, made of nothing but a directory entry. So each tag's folder is whole by itself: every reader
finds its bytes by the index's file and range, and taking a tag away takes a name away, never another tag's bytes. It is
the file system that counts who still refers to them, also for two jobs, for `rm`, and after a crash.

Whether bytes are the same is told by size and checksums of every block, as the indexes have them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

from xxhash import xxh3_64

from dsrun.errors import CheckpointError

from .index.value import BLOCK_BYTES, Index, StoredFile
from .parse import read_index
from .storage.tags import complete_tags

#: Checkpoints that are looked through for the same bytes, newest first: each costs reading its index.
_MOST_LOOKED_THROUGH = 8
#: Tags that a message names.
_NAMED = 5
_NAME = re.compile(r"rank-\d{5,}-frozen-([0-9a-f]{8})\.safetensors")


def frozen_name(rank: int, identity: str) -> str:
    """Returns the name of a rank's file of frozen parameters in the folder of a save."""
    return f"rank-{rank:05d}-frozen-{identity}.safetensors"


def is_frozen_name(name: str) -> bool:
    """Whether a file of a tag is one of frozen parameters, which other tags may share."""
    return _NAME.fullmatch(name) is not None


def summed(pieces: Iterable[memoryview]) -> StoredFile:
    """Returns size and checksums of the file that `pieces`, one after the other, are the bytes of; writes nothing."""
    sums: list[str] = []
    state, nbytes = xxh3_64(), 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            count = min(len(piece) - start, BLOCK_BYTES - nbytes % BLOCK_BYTES)
            state.update(piece[start : start + count])
            start, nbytes = start + count, nbytes + count
            if nbytes % BLOCK_BYTES == 0:
                sums.append(state.hexdigest())
                state.reset()
    if nbytes % BLOCK_BYTES:
        sums.append(state.hexdigest())
    return StoredFile(nbytes, tuple(sums))


def find_same(folder: Path, stored: StoredFile) -> Path | None:
    """Returns a file with these bytes that a complete checkpoint of the folder names, of the newest one that has it.

    Args:
        folder: folder of a run's checkpoints.
        stored: size and checksums of the bytes.
    """
    for tag in reversed(complete_tags(folder)[-_MOST_LOOKED_THROUGH:]):
        for name in _names_of(folder / tag, stored):
            if has_size(folder / tag / name, stored):
                return folder / tag / name
    return None


def has_size(path: Path, stored: StoredFile) -> bool:
    """Whether a file is there and as long as it was when it was written."""
    try:
        return os.stat(path, follow_symlinks=False).st_size == stored.nbytes
    except OSError:
        return False


def sharers(target: Path, index: Index) -> Mapping[str, list[str]]:
    """Returns, for each file of a tag that other tags of its folder share, the names of these tags, oldest first."""
    found: dict[str, list[str]] = {}
    for name in filter(is_frozen_name, index.files):
        tags = [
            path.parent.name for path in _elsewhere(target / name, index.files[name]) if _is_one(path, target / name)
        ]
        if tags:
            found[name] = tags
    return found


def told_of_others(path: Path, stored: StoredFile) -> str:
    """Returns what the message about a missing or damaged file adds where other checkpoints have the same bytes.

    Args:
        path: the file, in its tag's folder.
        stored: size and checksums of the file, from its index.
    """
    if not is_frozen_name(path.name):
        return ""
    elsewhere = list(_elsewhere(path, stored))
    one = [other.parent.name for other in elsewhere if _is_one(other, path)]
    if one:
        return f"; it is one file with that of {_listed(one)}, which cannot be better"
    copies = [other for other in elsewhere if has_size(other, stored)]
    return f"; {copies[-1]} had the same bytes" if copies else ""


def _names_of(target: Path, stored: StoredFile) -> list[str]:
    """Returns the files of a tag whose index says that they are these bytes; none where it cannot be read."""
    try:
        index = read_index(target)
    except CheckpointError:  # damaged, or removed meanwhile: `verify` and `ls` say so
        return []
    return [name for name, known in index.files.items() if known == stored and is_frozen_name(name)]


def _elsewhere(path: Path, stored: StoredFile) -> Generator[Path]:
    """Yields the files of other tags that are to hold the same bytes as a tag's file."""
    folder = path.parent.parent
    for tag in complete_tags(folder):
        if tag != path.parent.name:
            yield from (folder / tag / name for name in _names_of(folder / tag, stored))


def _is_one(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _listed(tags: list[str]) -> str:
    more = f" and {len(tags) - _NAMED} more" if len(tags) > _NAMED else ""
    return ", ".join(tags[-_NAMED:]) + more
