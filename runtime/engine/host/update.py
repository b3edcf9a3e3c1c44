"""The update of an engine whose optimizer steps in host memory: who waits for what of it, and what ranks exchange.

How ranges are stepped is `offload/step/cpu_optimizer.py`'s business.

[Note: what goes on behind a step] Where parameters are gathered for each use (stage 3), or one rank has them all,
`begin` returns when the rest unit is there, and each other unit is waited for when it is used. Where several ranks
hold parameters whole (stages 1 and 2), a rank may read them alone (`if rank == 0: torch.save(...)`), so no gather may
be left for later: `begin` returns with all of them there, and gathers each unit while the next is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ...mesh.collectives import Pending
from ...offload.ahead.speculation import AheadCounts
from ...offload.step.cpu_optimizer import CpuOptimizer
from ...zero.grads.reducer import GradReducer
from ...zero.params.publisher import write_parameters
from ...zero.params.store import ParamStore
from ...zero.units.plan import ZeroPlan
from ...zero.units.unit import ParamUnit


class OffloadedUpdate:
    """A `DeferredUpdate`, which brings its units their parameters; see [Note: what goes on behind a step].

    Args:
        units: all trained units.
        plan: plan of what is sharded: at least the optimizer.
        reducer: gradient reducer, which knows the order in which forward uses the units, the same on every rank.
        store: parameter store, which is told that gathered copies are stale.
        host: steps their ranges.
        overlaps: whether the update may go on after the step returns; this also needs stage 3 or a single rank.
        leaving: the units that `host` steps, by the position at which it knows them; the others are stepped on the
            device, and there when `begin` returns: the next forward begins with these. None: all.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plan: ZeroPlan,
        reducer: GradReducer,
        store: ParamStore,
        host: CpuOptimizer,
        *,
        overlaps: bool,
        leaving: Sequence[ParamUnit] | None = None,
    ) -> None:
        self._units = list(units)
        self._leaving = list(units if leaving is None else leaving)
        self._positions = {unit.index: position for position, unit in enumerate(self._leaving)}
        self._staying = [unit for unit in units if unit.index not in self._positions]
        self._plan = plan
        self._reducer = reducer
        self._store = store
        self._host = host
        self._gathers = plan.shard_parameters
        self._overlaps = overlaps and (plan.shard_parameters or all(unit.replicas.size == 1 for unit in units))
        self._marks: dict[int, Tensor] = {}
        self._is_closed = False
        for unit in units:
            unit.pending_update = _PendingUpdate(host, self.wait)

    def expect(self, coefficient: float | None) -> None:
        """See `DeferredUpdate`."""
        self._host.expect(coefficient)

    def leave_out(self) -> None:
        """See `DeferredUpdate`."""
        self._host.leave_out()

    def share_ahead(self) -> float | None:
        """See `DeferredUpdate`."""
        return None if self._host.ahead is None else self._host.ahead.last_share

    @property
    def ahead(self) -> AheadCounts | None:
        """What came of updates that were begun during backward; None where none are."""
        return self._host.ahead

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        """See `DeferredUpdate`: one all-gather a unit at stages 1 and 2; at stage 3 of what is never dropped."""
        order = forward_order(self._units, self._reducer.canonical_order())
        if not self._overlaps and self._host.ahead is not None:
            # All are waited for here: what backward has let be stepped crosses the bus while the rest is stepped.
            order.reverse()
        self._host.follow([self._positions[index] for index in order if index in self._positions])
        if self._overlaps and not self._gathers:
            self._mark_stale()
        self._host.begin(coefficient, unused)
        write_parameters(self._staying, self._plan)
        if not self._overlaps and not self._gathers:
            self._publish()
        if not self._overlaps:
            self._host.settle()
        self._store.invalidate()
        for unit in self._units:
            if unit.writes.has_handed_out and not self._gathers:
                unit.wait_update()  # whoever has an alias of its memory waits for nothing
            if unit.module is None:
                # Fresh from here on, also for calls that pass the engine by; see `publish`.
                self._store.acquire(unit)
                self._store.release(unit)

    @property
    def order(self) -> Sequence[int]:
        """See `DeferredUpdate`."""
        return [*(unit.index for unit in self._staying), *(self._leaving[n].index for n in self._host.order)]

    def wait(self, index: int) -> None:
        """Returns when what the device is given next finds a unit's new parameters, see `PendingUpdate`."""
        if index in self._positions:
            self._host.wait(self._positions[index])

    def settle(self) -> None:
        """See `DeferredUpdate`; what was begun ahead does not count, for checkpoints write past what torch counts."""
        self._host.keep_still()

    def buffers(self) -> list[Tensor]:
        """See `DeferredUpdate`."""
        return self._host.buffers()

    def close(self) -> None:
        """See `DeferredUpdate`."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._host.settle()
            finally:
                self._host.close()

    def _publish(self) -> None:
        """Gathers each unit when its range is there, on all ranks in one order: first those that are there."""
        pending: list[Pending] = []
        for unit in [*self._staying, *(self._leaving[position] for position in self._host.order)]:
            self.wait(unit.index)
            pending.append(unit.replicas.all_gather(unit.flat_param, unit.shard, label=unit.label))
        for work in pending:
            work.wait()

    def _mark_stale(self) -> None:
        """Makes the first element of each parameter NaN until its new values are there.

        Reads through the module wait for these. Who keeps a parameter and reads it between a step and the next forward
        would see values of before the step, or of both: it shows.
        """
        for unit in self._leaving:
            if unit.module is None:
                continue
            if unit.index not in self._marks:
                firsts = [extent.offset for extent in unit.layout.extents if extent.numel]
                self._marks[unit.index] = torch.tensor(firsts, dtype=torch.int64, device=unit.flat_param.device)
            unit.flat_param.index_fill_(0, self._marks[unit.index], float("nan"))
            unit.expect_values()


class _PendingUpdate:
    """A `PendingUpdate`: scripts that read or set masters and states wait for it; see `ahead/step_inputs.py`."""

    def __init__(self, host: CpuOptimizer, wait: Callable[[int], None]) -> None:
        self._host = host
        self._wait = wait

    def wait(self, index: int) -> None:
        """See `PendingUpdate`."""
        self._wait(index)

    def settle(self) -> None:
        """See `PendingUpdate`."""
        self._host.settle()


def forward_order(units: Sequence[ParamUnit], canonical: Sequence[ParamUnit]) -> list[int]:
    """Returns the units' numbers as the next forward wants them: the rest unit, then by their first use.

    Args:
        units: all units.
        canonical: units in the order of reductions, the reverse of the first forward; empty before the first backward.
    """
    ordered = list(reversed(canonical)) if canonical else list(units)
    return [unit.index for unit in sorted(ordered, key=lambda unit: unit.module is not None)]
