"""What ranks were doing, and what they waited in, as their last heartbeats say. Pure: words in, words out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dsrun.contract.heartbeats import SCRIPT_PHASE

from .coordinates import named_group

#: More groups than this are counted, not told.
MOST_GROUPS = 8
#: End of the name of a wait for a message.
_SOURCE = re.compile(r" from rank (\d+)$")


def action_of(phase: str, collective: str) -> str:
    """Returns what a rank does: its wait, or else its phase; empty where it says neither, or runs the script's code.

    Args:
        phase: phase that the rank says it is in; empty if it said none.
        collective: collective that the rank waits in; empty while it is in none.
    """
    return collective or ("" if phase == SCRIPT_PHASE else phase)


def without_source(wait: str) -> str:
    """Returns the name of a wait without the rank that a message comes from: neighbours wait for one of their own."""
    return _SOURCE.sub("", wait)


def with_sources(wait: str, waits: Iterable[str], coordinates: Mapping[int, str]) -> str:
    """Returns a wait with all ranks that messages come from: `receive of ... from ranks 2, 3 (pipe 0, data 1)`.

    Args:
        wait: name of the wait without a rank.
        waits: names of the waits as the ranks have said them.
        coordinates: coordinate of each rank that has said one, by its number.
    """
    sources = sorted({int(found[1]) for each in waits if (found := _SOURCE.search(each))})
    return f"{wait} from {named_group(sources, coordinates)}" if sources else wait


def waited_words(waits: Mapping[int, str], coordinates: Mapping[int, str]) -> str:
    """Says which ranks waited in what, those first that were fewest: `rank 2 waited in ..., ranks 0, 1 waited in ...`.

    Args:
        waits: name of the wait of each rank that waited, by its number.
        coordinates: coordinate of each rank that has said one, by its number.

    Returns:
        part of a sentence; empty where no rank waited.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(waits):
        groups.setdefault(without_source(waits[rank]), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1][0]))
    told = [
        f"{named_group(ranks, coordinates)} waited in "
        + with_sources(wait, [waits[rank] for rank in ranks], coordinates)
        for wait, ranks in ordered[:MOST_GROUPS]
    ]
    if len(ordered) > MOST_GROUPS:
        told.append(f"others in {len(ordered) - MOST_GROUPS} more waits")
    return ", ".join(told)
