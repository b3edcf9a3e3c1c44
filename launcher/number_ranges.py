"""Many numbers as short text, and back: ranks, cores. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def number_ranges(numbers: Sequence[int]) -> str:
    """Returns `0-2,5` for `[0, 1, 2, 5]`, as the kernel writes it; numbers are in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def numbers_of(ranges: str) -> list[int]:
    """Returns what `number_ranges` was given."""
    found: list[int] = []
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 1`, `ranks 0, 2, 3` or `ranks 0-5,7`, as the subject of a sentence; ranks are in order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks)) if len(ranks) <= 3 else number_ranges(ranks)}"
