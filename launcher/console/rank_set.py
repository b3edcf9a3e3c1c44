"""Sets of ranks as people write and read them: `0,8-11`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dsrun.errors import UsageError

_SPAN = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?")


def parse_rank_set(text: str, world_size: int) -> frozenset[int]:
    """Reads `0`, `0,8-11` or `8-11,0`; a rank named twice is there once.

    Args:
        text: value of `--ranks` as the user gave it.
        world_size: ranks of the job.

    Raises:
        UsageError: it is no set of ranks, or names ranks that the job does not have.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise UsageError(
                f"`--ranks {text}`: expected ranks and spans like `0,8-11`, got {part.strip()!r}",
                hint="leave `--ranks` out to see all",
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise UsageError(f"`--ranks {text}`: {part.strip()} ends before it begins", hint=f"write {last}-{first}")
        if last >= world_size:
            there = "rank 0 only" if world_size == 1 else f"ranks 0-{world_size - 1}"
            raise UsageError(f"`--ranks {text}`: there is no rank {last}; the job has {there}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def format_rank_set(ranks: Iterable[int]) -> str:
    """Returns ranks in order, runs of them as spans: `0,8-11`."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
