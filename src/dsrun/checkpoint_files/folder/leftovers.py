"""What of a tag in an object store may go: stores know no locks, so what nobody names any more is told by its age.

[Note: abandoned] A save under way has files that no index names yet, and nothing shows that its ranks live. Files that
are a day older than the newest of their tag are of a save that is over: a rank waits for the others for minutes, see
`checkpoint.timeout`. What the replaced index named goes at once, and `rm` takes all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from dsrun.errors import CheckpointError

from ..index.value import INDEX_FILE
from ..parse import read_index
from ..storage.places import Address, Entry, StorageError
from ..storage.registry import storage_of

_ABANDONED_S = 24 * 3600.0


def named_files(target: Address) -> frozenset[str]:
    """Returns the files that a tag's index names; none where there is no index that can be read."""
    try:
        return frozenset(read_index(target).files)
    except StorageError:
        raise
    except CheckpointError:
        return frozenset()


def abandoned(entries: Sequence[Entry], named: Collection[str]) -> list[str]:
    """Returns which files of a tag are of a save that is over, see [Note: abandoned].

    Args:
        entries: entries of the tag's folder, with times by one clock; it does not matter which clock.
        named: names of the files that the tag's index lists.
    """
    newest = max((entry.modified for entry in entries), default=0.0)
    return [
        entry.name
        for entry in entries
        if is_data_file(entry) and entry.name not in named and newest - entry.modified > _ABANDONED_S
    ]


def is_data_file(entry: Entry) -> bool:
    """Whether something in a tag's folder is a file of tensors that a save has written."""
    return not entry.is_folder and entry.name.startswith("rank-") and entry.name.endswith(".safetensors")


def clean(target: Address, *, replaced: Collection[str]) -> None:
    """Removes what a tag that was just published needs no longer.

    Args:
        target: the tag's.
        replaced: names of the files that the tag's previous index listed.
    """
    storage = storage_of(target)
    named = named_files(target)
    if not named:  # another job is removing it
        return
    entries: Sequence[Entry] = ()
    with suppress(FileNotFoundError):  # a listing that is late shows nothing yet
        entries = storage.list(target)
    gone = sorted({*abandoned(entries, named), *replaced} - named)
    storage.remove([target / name for name in gone])


def remove_all(target: Address) -> None:
    """Removes a checkpoint: its index first, so that no part of it is taken for a whole one; strangers' files stay."""
    storage = storage_of(target)
    storage.remove([target / INDEX_FILE])
    with suppress(FileNotFoundError):
        storage.remove([target / entry.name for entry in storage.list(target) if is_data_file(entry)])
