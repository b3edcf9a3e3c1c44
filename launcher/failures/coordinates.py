"""Where ranks stand on the axes of a job, behind their numbers in a sentence. Pure.

Ranks say it themselves, as `data 1, tensor 0`: a script may size axes that no config names, and there may be no config
that the launcher knows. Where a rank's number says all, it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def named_rank(rank: int, coordinate: str) -> str:
    """Returns `rank 3 (data 1, tensor 0)`; without brackets where the coordinate is empty."""
    return f"rank {rank} ({coordinate})" if coordinate else f"rank {rank}"


def common_coordinate(ranks: Sequence[int], coordinates: Mapping[int, str]) -> str:
    """Returns ` (data 1)` for ranks with that in common: one rank's whole coordinate; empty where there is nothing.

    Args:
        ranks: numbers of the ranks, one at least.
        coordinates: coordinate of each rank that has said one, by its number.
    """
    first, *others = [coordinates.get(rank, "").split(", ") for rank in ranks]
    common = ", ".join(part for part in first if all(part in other for other in others))
    return f" ({common})" if common else ""
