"""Cuts layers into chunks of neighbours: by cost, by number, by the classes of layers, or as given.

What a layer costs is its caller's. Bounds are the first layer of each chunk, and the number of layers at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite

from dsrun.errors import ConfigError

#: How messages begin about bounds and patterns of a config.
_KEY = "`pipeline.partition`"


def balance(costs: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Returns bounds whose largest chunk costs the least, and which are otherwise as even as can be.

    Exact, so that every rank and every machine finds the same. Of cuts with the same largest chunk those with the
    least sum of squares count; of these, the ones whose first chunks cost less, as the first stages hold the most micro
    batches. Layers that cost nothing stay with the layer before.

    Args:
        costs: cost of each layer, in any unit, 0 or more.
        chunks: number of chunks; each has one layer or more.

    Raises:
        ConfigError: there are fewer layers than chunks, or a cost is no cost.
    """
    count = len(costs)
    _check_count(count, chunks)
    for index, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise ConfigError(f"cost of layer {index} is {cost}; expected a number of 0 or more")
    sums = [0, *accumulate(_whole_numbers(costs))]
    largest = _least_largest(sums, chunks)
    # best[k][start]: least sum of squares of the layers from `start` on in k chunks; None where that cannot be.
    best: list[list[int | None]] = [[None] * count + [0]]
    for _ in range(chunks):
        best.append([_best(sums, best[-1], start, largest) for start in range(count)] + [None])
    bounds = [0]
    for left in range(chunks, 0, -1):
        bounds.append(_first_cut(sums, best[left - 1], best[left][bounds[-1]], bounds[-1], largest))
    return tuple(bounds)


def uniform(count: int, chunks: int) -> tuple[int, ...]:
    """Returns bounds of equal chunks; where they cannot be equal, the first ones have a layer more.

    Args:
        count: number of layers.
        chunks: number of chunks.

    Raises:
        ConfigError: there are fewer layers than chunks.
    """
    _check_count(count, chunks)
    each, more = divmod(count, chunks)
    return tuple(chunk * each + min(chunk, more) for chunk in range(chunks + 1))


def by_pattern(names: Sequence[str], regex: str, chunks: int, *, label: str = _KEY) -> tuple[int, ...]:
    """Returns bounds that give chunks equal numbers of the layers that match.

    Args:
        names: class name of each layer.
        regex: regular expression that is searched in the names, without regard to case.
        chunks: number of chunks.
        label: name of what was given so, for messages.

    Raises:
        ConfigError: the expression is none or matches no layer, or there are fewer layers than chunks.
    """
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"{label}: `type:{regex}` is no regular expression: {error}",
            hint="write the class of the layers to count, or a part of its name",
        ) from error
    matches = [1.0 if pattern.search(name) else 0.0 for name in names]
    if not any(matches):
        raise ConfigError(
            f"{label}: `type:{regex}` matches none of the layers {', '.join(sorted(set(names)))}",
            hint="name the class of the layers to count, or a part of its name",
        )
    return balance(matches, chunks)


def explicit(bounds: Sequence[int], count: int, chunks: int, *, label: str = _KEY) -> tuple[int, ...]:
    """Returns given bounds, checked.

    Args:
        bounds: first layer of each chunk, and the number of layers at the end.
        count: number of layers.
        chunks: number of chunks.
        label: name of what was given so, for messages.

    Raises:
        ConfigError: the bounds do not fit the layers or the chunks.
    """
    shown = list(bounds)
    if len(shown) != chunks + 1:
        made = "1 chunk" if len(shown) == 2 else f"{len(shown) - 1} chunks"
        raise ConfigError(
            f"{label}: bounds {shown} make {made}; expected {chunks}",
            hint=f"give {chunks + 1} numbers: the first layer of each chunk, and the number of layers",
        )
    if shown[0] != 0 or shown[-1] != count:
        raise ConfigError(
            f"{label}: bounds {shown} go from {shown[0]} to {shown[-1]}; expected 0 to {count}, all layers",
            hint=f"write 0 in front and {count}, the number of layers, at the end",
        )
    for chunk, (start, end) in enumerate(pairwise(shown)):
        if end <= start:
            raise ConfigError(
                f"{label}: bounds {shown} give chunk {chunk} no layer: it goes from {start} to {end}",
                hint="let each number be larger than the one before",
            )
    return tuple(shown)


def _check_count(count: int, chunks: int) -> None:
    if chunks < 1:
        raise ConfigError(f"number of chunks is {chunks}; expected 1 or more")
    if count < chunks:
        raise ConfigError(
            f"{count} layers cannot make {chunks} chunks of one layer or more",
            hint="take fewer `pipeline.stages` or `pipeline.virtual_stages`",
        )


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Returns the costs in a unit in which all are whole: sums of those have no rounding."""
    exact = [Fraction(cost) for cost in costs]
    unit = max((cost.denominator for cost in exact), default=1)  # powers of two
    return [int(cost * unit) for cost in exact]


def _least_largest(sums: Sequence[int], chunks: int) -> int:
    """Returns what the largest chunk costs at least, by halving."""
    low, high = 0, sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, chunks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: Sequence[int], chunks: int, largest: int) -> bool:
    """Whether layers fit into that many chunks or fewer; more can always be made of fewer, as there are layers."""
    used, start = 1, 0
    for end in range(1, len(sums)):
        if sums[end] - sums[end - 1] > largest:
            return False
        if sums[end] - sums[start] > largest:
            used, start = used + 1, end - 1
    return used <= chunks


def _best(sums: Sequence[int], rest: Sequence[int | None], start: int, largest: int) -> int | None:
    """Returns the least sum of squares of a chunk that begins at `start` and the chunks behind it."""
    found: int | None = None
    for end in range(start + 1, len(sums)):
        cost = sums[end] - sums[start]
        if cost > largest:
            break
        behind = rest[end]
        if behind is not None and (found is None or cost * cost + behind < found):
            found = cost * cost + behind
    return found


def _first_cut(sums: Sequence[int], rest: Sequence[int | None], wanted: int | None, start: int, largest: int) -> int:
    """Returns the end of a chunk that has the wanted sum of squares: the one of least cost, and of these the last."""
    assert wanted is not None, "the least largest chunk leaves no cut"
    found: int | None = None
    for end in range(start + 1, len(sums)):
        cost, behind = sums[end] - sums[start], rest[end]
        if cost > largest or (found is not None and cost > sums[found] - sums[start]):
            break
        if behind is not None and cost * cost + behind == wanted:
            found = end
    assert found is not None, "the sum of squares was not found again"
    return found
