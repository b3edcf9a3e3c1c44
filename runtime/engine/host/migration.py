"""An update whose units may come to the device after some steps, where there was room for their states all the time.

How much room there is, `residency.py` says; what a step of each kind is, others know.

[Note: coming back] Between two steps, when the last update has settled and no gradient of the next one is there, the
masters and states of a unit are copied to the device, and every tensor that holds them keeps its identity and its bits.
Then the step on the host is made anew for the units that still leave. Parameters are not touched, so a forward that has
been run keeps what it reads. Nothing leaves again: that is for a run with another `ratio`, from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...memory.arena import MOVED
from ...memory.arenas import Arenas
from ...memory.bus import Bus
from ...memory.pages import fresh_zeros
from ...offload.step.ways import BlockStep
from ...optim.sharded import ShardOptimizer
from ...zero.params.publisher import publish
from ...zero.units.unit import ParamUnit, PendingUpdate
from ..model.sharded import ShardedModel
from ..step import DeferredUpdate
from .residency import ResidencyPolicy
from .step_watch import ObservedSteps, StepWatch, TimedSteps

#: Arenas of the step on the host, which is made anew.
_OF_THE_STEP = ("host gradients", "gradient ring", "wide gradients", "gradient sums", "parameter ring")


class Reconsider(Protocol):
    """Decides anew, on all ranks alike."""

    def __call__(self, units: Sequence[ParamUnit], observed: ObservedSteps, *, held_bytes: int) -> Sequence[bool]:
        """Returns for each unit whether its masters shall be on the device; those that are there stay there."""
        ...


class MigratingUpdate:
    """A `DeferredUpdate` by way of another, which it replaces once; see [Note: coming back].

    Args:
        sharded: the model.
        optimizer: sharded optimizer of the master parameters.
        memory: arenas that buffers are reserved in.
        bus: bus that carries masters and optimizer states to the device.
        make: function that makes the update of a sharded model, and the `StepWatch` that observes it.
        after: steps before it looks again.
        reconsider: function that decides which units move to the device; see `Reconsider`.

    Attributes:
        moved: callback that gets the sharded model when units have moved, to predict its bytes anew; None for no
            callback.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: ShardOptimizer,
        memory: Arenas,
        bus: Bus,
        *,
        make: Callable[[ShardedModel], tuple[DeferredUpdate, StepWatch]],
        after: int,
        reconsider: Reconsider,
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._memory = memory
        self._bus = bus
        self._make = make
        self._after: int | None = after
        self._reconsider = reconsider
        self._host: DeferredUpdate
        self._host, self._watch = make(sharded)
        self._watch_arrivals()
        self.moved: Callable[[ShardedModel], None] | None = None

    @property
    def order(self) -> Sequence[int]:
        """See `DeferredUpdate`."""
        return self._host.order

    def expect(self, coefficient: float | None) -> None:
        """See `DeferredUpdate`. After so many steps, one all-reduce of a few numbers, and maybe a move."""
        reducer = self._sharded.reducer
        is_between = not reducer.has_sums and not reducer.has_unreduced
        if self._after is not None and self._watch.steps >= self._after and is_between:
            self.look_again(held_bytes=self._memory.report().bytes_in("device"))
        self._host.expect(coefficient)

    def look_again(self, *, held_bytes: int) -> None:
        """Reconsiders now, and not again; between steps, of which one has been seen whole. Every rank must call.

        Args:
            held_bytes: bytes of the arenas on the device.
        """
        self._after = None
        stays = self._reconsider(self._sharded.units, self._watch.observed(), held_bytes=held_bytes)
        coming = [unit for unit, one in zip(self._sharded.units, stays, strict=True) if one and unit.steps_on_host]
        if coming:
            self._bring(coming)

    def leave_out(self) -> None:
        """See `DeferredUpdate`."""
        self._host.leave_out()

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        """See `DeferredUpdate`."""
        self._watch.begins()
        with self._watch.waiting():
            self._host.begin(coefficient, unused)

    def share_ahead(self) -> float | None:
        """See `DeferredUpdate`."""
        return self._host.share_ahead()

    def settle(self) -> None:
        """See `DeferredUpdate`."""
        with self._watch.waiting():
            self._host.settle()

    def buffers(self) -> list[Tensor]:
        """See `DeferredUpdate`."""
        return self._host.buffers()

    def close(self) -> None:
        """See `DeferredUpdate`."""
        self._host.close()

    @torch.no_grad()
    def _bring(self, units: Sequence[ParamUnit]) -> None:
        """Moves units to the device; every rank does."""
        self._host.close()
        hosted = [arena for arena in self._memory.named("masters") if arena.tier == "host"]
        masters = self._arena("masters" + MOVED) if self._sharded.precision.has_separate_master else None
        sums = self._arena("gradient sums" + MOVED)
        given_back: list[Tensor] = []
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for unit in units:
            given_back.append(unit.master.data)
            numel = unit.master.numel()
            # In one format the parameters are the masters there, and have their values already.
            master_N = unit.shard if masters is None else masters(numel)
            if masters is not None:
                self._copy(unit.master, master_N)
            moved[unit.index] = (master_N, sums(numel))
        for unit in units:
            unit.steps_on_host = False
            unit.pending_update = None
        self._optimizer.take_over(moved, self._memory, self._copy)
        for unit in units:
            unit.grad_sum = moved[unit.index][1]
        for view in given_back:
            next(arena for arena in hosted if arena.holds(view)).give_back(view)
        for arena in hosted:
            arena.release()
        for name in _OF_THE_STEP:
            self._memory.drop(name)
        self._sharded = self._sharded.without({unit.index for unit in units})
        if self._sharded.leaving:
            self._host, self._watch = self._make(self._sharded)
            self._watch_arrivals()
        else:
            self._host = _UpdateHere(self._sharded, self._optimizer)
        if self.moved is not None:
            self.moved(self._sharded)

    def _watch_arrivals(self) -> None:
        for unit in self._sharded.units:
            if unit.pending_update is not None:
                unit.pending_update = _WatchedUpdate(unit.pending_update, self._watch)

    def _arena(self, name: str) -> Callable[[int], Tensor]:
        device = self._sharded.units[0].device
        arena = self._memory.growing(
            name, lambda numel: fresh_zeros(numel, dtype=torch.float32, device=device), leaves=True
        )
        return arena.take

    def _copy(self, host_N: Tensor, here_N: Tensor) -> None:
        event = self._bus.start_back(host_N, here_N, kind="states")
        self._bus.wait(event)
        event.synchronize()


def moving_update(
    sharded: ShardedModel,
    staying: ResidencyPolicy,
    optimizer: ShardOptimizer,
    memory: Arenas,
    bus: Bus,
    on_host: Callable[..., DeferredUpdate],
) -> MigratingUpdate:
    """Returns the update of an engine that looks again after `offload_placement.remeasure_after` updates.

    Args:
        sharded: the model.
        staying: rule that decides which units stay on the device, and which come there later.
        optimizer: sharded optimizer of the master parameters.
        memory: arenas that buffers are reserved in.
        bus: bus that carries masters and optimizer states to the device.
        on_host: function that makes the update of a sharded model; its argument `timed` wraps the `BlockStep` to count
            its time.
    """

    def make(sharded: ShardedModel) -> tuple[DeferredUpdate, StepWatch]:
        found: list[TimedSteps] = []

        def timed(steps: BlockStep) -> BlockStep:
            found.append(TimedSteps(steps))
            return found[0]

        update = on_host(sharded, timed=timed)
        return update, StepWatch(found[0])

    after = sharded.settings.zero_optimization.offload_placement.remeasure_after
    assert after is not None, "somebody asked for it"
    return MigratingUpdate(
        sharded,
        optimizer,
        memory,
        bus,
        make=make,
        after=after,
        reconsider=staying.reconsider,
    )


class _WatchedUpdate:
    """A `PendingUpdate` whose waits are counted."""

    def __init__(self, pending: PendingUpdate, watch: StepWatch) -> None:
        self._pending = pending
        self._watch = watch

    def wait(self, index: int) -> None:
        with self._watch.waiting():
            self._pending.wait(index)

    def settle(self) -> None:
        with self._watch.waiting():
            self._pending.settle()


class _UpdateHere:
    """A `DeferredUpdate` of which nothing is away any more: it is done when it has begun."""

    def __init__(self, sharded: ShardedModel, optimizer: ShardOptimizer) -> None:
        self._sharded = sharded
        self._optimizer = optimizer

    @property
    def order(self) -> Sequence[int]:
        return [unit.index for unit in self._sharded.units]

    def expect(self, coefficient: float | None) -> None:
        return

    def leave_out(self) -> None:
        return

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        self._optimizer.step(coefficient, unused)
        publish(self._sharded.units, self._sharded.plan, self._sharded.store)

    def share_ahead(self) -> float | None:
        return None

    def settle(self) -> None:
        return

    def buffers(self) -> list[Tensor]:
        return []

    def close(self) -> None:
        return
