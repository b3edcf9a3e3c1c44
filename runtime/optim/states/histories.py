"""Which tensors were in which steps, where steps have left some out: those that were in the same ones share a history.

[Note: one history]
torch passes over parameters without a gradient, and counts the steps of each parameter by itself. A leaf holds many
parameters and has one count, so the parameters of a leaf must have been in the same steps. At first all have; a step
that leaves out a part of those with one history divides it for good. A step knows what no rank has used, so histories
are the same on every rank, whatever piece of a tensor it has; a checkpoint has them, for a run may go on with other
leaves. Tensors that were in every step are named nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of what was in every step.
_EVERY_STEP = 0


@dataclass(frozen=True, slots=True)
class _History:
    """Tensors that the same steps have left out, and how many these were."""

    names: frozenset[str]
    missed: int


class Histories:
    """See [Note: one history]."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._members: dict[int, _History] = {}
        self._next = _EVERY_STEP + 1

    def of(self, name: str) -> int:
        """Returns the number of a tensor's history; only good for comparing it with another's."""
        return self._of.get(name, _EVERY_STEP)

    def missed(self) -> dict[str, int]:
        """Returns how many steps have left each tensor out, where any has."""
        return {name: history.missed for history in self._members.values() for name in history.names}

    def leave_out(self, names: Collection[str]) -> bool:
        """A step leaves out these tensors; returns whether that has divided a history."""
        is_new = False
        by_history: dict[int, set[str]] = {}
        for name in names:
            by_history.setdefault(self.of(name), set()).add(name)
        for number, found in by_history.items():
            before = self._members.get(number)
            if before is not None and len(before.names) == len(found):
                self._members[number] = _History(before.names, before.missed + 1)
                continue
            if before is not None:
                self._members[number] = _History(before.names - found, before.missed)
            self._add(_History(frozenset(found), 1 if before is None else before.missed + 1))
            is_new = True
        return is_new

    def to_json(self) -> list[dict[str, Any]]:
        """Returns what a checkpoint has of them."""
        found = [{"missed": history.missed, "names": sorted(history.names)} for history in self._members.values()]
        return sorted(found, key=lambda entry: entry["names"][0])

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what `to_json` returned, in place of all that was known."""
        self._of, self._members = {}, {}
        for entry in saved:
            self._add(_History(frozenset(entry["names"]), int(entry["missed"])))

    def _add(self, history: _History) -> None:
        self._members[self._next] = history
        self._of |= dict.fromkeys(history.names, self._next)
        self._next += 1


def of_counts(steps: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns what `Histories.to_json` has of tensors of which only the count of steps is known.

    Those of one count are taken to have been in the same steps: what is kept for them is the same either way.

    Args:
        steps: number of steps of each tensor, by name.
    """
    most = max(steps.values(), default=0)
    by_missed: dict[int, list[str]] = {}
    for name, count in steps.items():
        if count != most:
            by_missed.setdefault(round(most - count), []).append(name)
    return [{"missed": missed, "names": sorted(names)} for missed, names in sorted(by_missed.items())]


def names_in(saved: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the tensors that steps have left out, of what `Histories.to_json` returned."""
    return {name for entry in saved for name in entry["names"]}
