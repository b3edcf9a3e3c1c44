"""Where ranks stand on the axes of a job, behind their numbers in a sentence. Pure.

Ranks say it themselves, as `data 1, tensor 0`: a script may size axes that no config names, and there may be no config
that the launcher knows. Where a rank's number says all, it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def named_rank(rank: int, coordinate: str) -> str:
    """Returns `rank 3 (data 1, tensor 0)`; without brackets where the coordinate is empty."""
    return f"rank {rank} ({coordinate})" if coordinate else f"rank {rank}"


def named_group(ranks: Sequence[int], coordinates: Mapping[int, str]) -> str:
    """Returns `ranks 0, 1 (data 0)`, with what their coordinates have in common; of more than three how many they are.

    Args:
        ranks: numbers of the ranks, one at least.
        coordinates: coordinate of each rank that has said one, by its number.
    """
    where = common_coordinate(ranks, coordinates)
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}"
    return f"ranks {', '.join(map(str, ranks))}{where}" if len(ranks) <= 3 else f"{len(ranks)} ranks{where}"


def common_coordinate(ranks: Sequence[int], coordinates: Mapping[int, str]) -> str:
    """Returns ` (data 1)` for ranks with that in common: one rank's whole coordinate; empty where there is nothing.

    Args:
        ranks: numbers of the ranks, one at least.
        coordinates: coordinate of each rank that has said one, by its number.
    """
    first, *others = [coordinates.get(rank, "").split(", ") for rank in ranks]
    common = ", ".join(part for part in first if all(part in other for other in others))
    return f" ({common})" if common else ""
