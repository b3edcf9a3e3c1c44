"""Does `latest` name the checkpoint that it was last set to? It is a name alone, which other tools and people read and
write, so what tells is in the indexes.

[Note: numbers of the latest] A checkpoint that becomes the latest has in its index, as `values.latest`, one more than
the one before it had. So where `latest` names a checkpoint after which another one became the latest, a bit of the name
has flipped, a copy has brought an old file back, or somebody goes back on purpose: who loads it is told, not refused.
"""

from __future__ import annotations

from typing import Any

from dsrun.errors import CheckpointError

from ..parse import read_index
from ..storage.places import Place
from ..storage.tags import LATEST_FILE, complete_tags, read_latest

#: Its name among the values of an index.
VALUE = "latest"
#: Later checkpoints that are looked at, newest first; mostly there is none.
_MOST_LOOKED_AT = 8


def next_number(folder: Place) -> int:
    """Returns the number of a checkpoint that becomes the latest of a folder now."""
    try:
        return 1 + (_number(folder / read_latest(folder)) or 0)
    except OSError:
        return 1


def doubt_of_latest(folder: Place, tag: str) -> str | None:
    """Returns what is to be said of a folder whose `latest` names `tag`; None where nothing speaks against it.

    Args:
        folder: folder of a run's checkpoints.
        tag: a complete one, which `latest` names.
    """
    tags = complete_tags(folder)
    if tag not in tags or tags[-1] == tag:
        return None
    number = _number(folder / tag) or 0
    for later in reversed(tags[tags.index(tag) + 1 :][-_MOST_LOOKED_AT:]):
        if (_number(folder / later) or 0) > number:
            return (
                f"{folder / LATEST_FILE}: it names {tag}, and {later} was the latest after it: a bit may have flipped, "
                "or somebody has changed it"
            )
    return None


def _number(target: Place) -> int | None:
    """Returns a checkpoint's number; None where it was never the latest, is of an earlier version, or damaged."""
    try:
        number: Any = read_index(target).values.get(VALUE)
    except CheckpointError:
        return None
    return number if type(number) is int else None
