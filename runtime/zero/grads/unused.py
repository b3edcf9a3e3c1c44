"""Parameters that no rank has a gradient of in a global batch: an optimizer passes over them, as torch's do.

Which a rank has none of, units tell when their gradients are complete; what a step does about it is its own business.

[Note: unused]
A parameter is used if autograd has given it a gradient in any micro step on any rank, be it zero. Ranks tell each other
how many they have not used with numbers that every step exchanges anyway. Only where that is more than none, one
all-reduce says which ones all of them mean: an expert that one rank has used has its mean over all ranks, as under DDP.
Parameters without elements count as used, and frozen ones are in no unit that trains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...mesh.collectives import Collectives
from ..units.unit import ParamUnit


class UnusedParameters:
    """See [Note: unused].

    Args:
        units: units of trained parameters.
        collectives: ranks that have the same units.
    """

    def __init__(self, units: Sequence[ParamUnit], collectives: Collectives) -> None:
        self._units = units
        self._collectives = collectives
        self._all = [[n for n, extent in enumerate(unit.layout.extents) if extent.numel] for unit in units]
        self._before: list[Sequence[int]] = []
        self._told = 0
        self._count_1: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """A global batch begins: nothing has a gradient yet."""
        for unit, numbers in zip(self._units, self._all, strict=True):
            unit.without_grad = numbers
        self._before = list(self._all)

    def begin(self) -> None:
        """A micro step begins."""
        self._before = [unit.without_grad for unit in self._units]

    def abandon(self) -> None:
        """The micro step has failed: what it has used does not count."""
        for unit, before in zip(self._units, self._before, strict=True):
            unit.without_grad = before

    def note(self, unit: ParamUnit, name: str) -> None:
        """A script gives a parameter a gradient."""
        unit.without_grad = [n for n in unit.without_grad if unit.layout.extents[n].name != name]

    def count_1(self) -> Tensor:
        """Returns how many parameters this rank has no gradient of: fp64, [1], to be summed over the ranks."""
        count = sum(len(unit.without_grad) for unit in self._units)
        if self._count_1 is None:
            device = self._units[0].device if self._units else torch.device("cpu")
            self._count_1 = torch.zeros(1, dtype=torch.float64, device=device)
        if count != self._told:
            self._count_1.fill_(count)
            self._told = count
        return self._count_1

    def agree(self, total: float) -> frozenset[str]:
        """Returns the names of the parameters that no rank has used; every rank must call.

        Args:
            total: sum over the ranks of `count_1`; unless it is 0, enters an all-reduce of a number a parameter, and
                another one for those that several pipeline stages use.
        """
        if not total:
            return frozenset()
        unused = {unit.layout.extents[n].name for unit in self._units for n in unit.without_grad}
        # What several pipeline stages use is unused if all of these say so; such units come last, in one order.
        found = set[str]()
        for collectives, names in self._by_collectives():
            used = [int(name not in unused) for name in names]
            if collectives.size > 1:
                told = torch.tensor(used, device=self._units[0].device)
                collectives.all_reduce(told, op="max", label="unused parameters").wait()
                with collectives.reading("unused parameters"):
                    used = told.tolist()
            found.update(name for name, is_used in zip(names, used, strict=True) if not is_used)
        return frozenset(found)

    def _by_collectives(self) -> list[tuple[Collectives, list[str]]]:
        """Returns the names of the parameters, each with those that are agreed on among the same ranks."""
        found: dict[int, tuple[Collectives, list[str]]] = {}
        for unit, numbers in zip(self._units, self._all, strict=True):
            ranks = unit.replicas if unit.placement.stages else self._collectives
            names = found.setdefault(id(ranks), (ranks, []))[1]
            names += [unit.layout.extents[n].name for n in numbers]
        return list(found.values())
