"""Which parameter is which in an optimizer's state that has numbers in place of names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
#: Ways to go on that are looked at side by side; more of them mean that nothing can be told.
_MOST_WAYS = 1000


def match_groups(named: Mapping[str, Shape], groups: Sequence[Sequence[Shape]]) -> list[list[str]] | None:
    """Returns the names of each group's parameters, or None where shapes fit in several ways or in none.

    Each group has its parameters in the model's order; those that are in no group are frozen.

    Args:
        named: shapes of the model's parameters, in its order.
        groups: shapes of the optimizer's, group by group.
    """
    # From how many parameters of each group are placed, to the way that led there and whether it is the only one.
    ways: dict[tuple[int, ...], tuple[_Way | None, bool]] = {(0,) * len(groups): (None, True)}
    for name, shape in named.items():
        further: dict[tuple[int, ...], tuple[_Way | None, bool]] = {}
        for placed, (way, is_only) in ways.items():
            _note(further, placed, way, is_only)
            for number, group in enumerate(groups):
                if placed[number] < len(group) and group[placed[number]] == shape:
                    after = (*placed[:number], placed[number] + 1, *placed[number + 1 :])
                    _note(further, after, _Way(way, number, name), is_only)
        ways = further
        if len(ways) > _MOST_WAYS:
            return None
    way, is_only = ways.get(tuple(map(len, groups)), (None, False))
    if not is_only:
        return None
    names: list[list[str]] = [[] for _ in groups]
    while way is not None:
        names[way.group].insert(0, way.name)
        way = way.before
    return names


@dataclass(frozen=True, slots=True)
class _Way:
    """A parameter that is placed in a group, and those placed before it."""

    before: _Way | None
    group: int
    name: str


def _note(
    ways: dict[tuple[int, ...], tuple[_Way | None, bool]], placed: tuple[int, ...], way: _Way | None, is_only: bool
) -> None:
    known = ways.get(placed)
    ways[placed] = (way, is_only) if known is None else (known[0], False)
