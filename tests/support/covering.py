"""Cases of a test that has several parameters: a few that have each pair of values, and the others for `--soak`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

#: Places of some parameters, and the names of their values.
Combination = tuple[tuple[int, ...], tuple[str, ...]]


def covering(*axes: Mapping[str, Any], together: int = 2) -> list[Any]:
    """Returns all cases for `parametrize`; those are marked `soak` whose values others of them have together.

    Args:
        axes: values of each parameter by their names.
        together: number of parameters of which each combination of values has a case by default. With 1 each value has
            one, and values of different parameters meet as evenly as they can.
    """
    assert 1 <= together <= len(axes), f"{together} of {len(axes)} parameters"
    cases = list(product(*axes))
    kept = _few(cases, together)
    what = "value" if together == 1 else f"{together} values together"
    mark = pytest.mark.soak(f"{len(kept)} of {len(cases)} cases have each {what}")
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, case, strict=True)),
            id="-".join(case),
            marks=() if case in kept else mark,
        )
        for case in cases
    ]


def with_all(some: Mapping[str, tuple[int, ...]], every: tuple[int, ...]) -> list[Any]:
    """Returns cases for `parametrize` that go through some values by default, and for `--soak` through all of them.

    Args:
        some: values, such as stages, that each case has by default, by its name.
        every: all values.
    """
    mark = pytest.mark.soak("the same case with some of the values, and each value in other cases")
    return [
        *(pytest.param(case, values, id=case) for case, values in some.items()),
        *(pytest.param(case, every, id=f"{case}-all", marks=mark) for case, values in some.items() if values != every),
    ]


def _few(cases: list[tuple[str, ...]], together: int) -> set[tuple[str, ...]]:
    """Takes the case with the most new combinations, again and again; of several, the one whose values met least."""
    kept: set[tuple[str, ...]] = set()
    uses: Counter[Combination] = Counter()
    wanted = {one for case in cases for one in _combinations(case, together)}
    while wanted - uses.keys():
        best = max(cases, key=lambda case: _gain(case, together, uses))
        kept.add(best)
        for size in range(1, len(best) + 1):
            uses.update(_combinations(best, size))
    return kept


def _gain(case: tuple[str, ...], together: int, uses: Mapping[Combination, int]) -> tuple[int, int]:
    """Counts combinations that no case has yet, and how rarely cases have any of its values together."""
    new = len(_combinations(case, together) - uses.keys())
    return new, -sum(uses.get(one, 0) for size in range(1, len(case) + 1) for one in _combinations(case, size))


def _combinations(case: tuple[str, ...], size: int) -> set[Combination]:
    return {(places, tuple(case[place] for place in places)) for places in combinations(range(len(case)), size)}
