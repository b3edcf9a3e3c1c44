"""An update whose units may come to the device after some steps, where there was room for their states all the time.

How much room there is, `residency.py` says; what a step of each kind is, others know.

[Note: coming back] Between two steps, when the last update has settled and no gradient of the next one is there, the
masters and states of a unit are copied to the device, and every tensor that holds them keeps its identity and its bits.
Then the step on the host is made anew for the units that still leave. Parameters are not touched, so a forward that has
been run keeps what it reads. Nothing leaves again: that is for a run with another `ratio`, from a checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, optim

from ...memory.arena import MOVED
from ...memory.arenas import Arenas
from ...memory.bus import Bus
from ...memory.pages import fresh_zeros
from ...mesh.collectives import Collectives
from ...offload.step.ways import BlockStep
from ...optim.sharded import ShardOptimizer
from ...zero.params.publisher import publish
from ...zero.units.unit import Arrival, ParamUnit
from ..memory_queries import HeldMemory
from ..sharded_model import ShardedModel
from ..step import UpdateAway
from .residency import Staying
from .step_watch import ObservedSteps, StepWatch, TimedSteps

#: Arenas of the step on the host, which is made anew.
_OF_THE_STEP = ("host gradients", "gradient ring", "wide gradients", "gradient sums", "parameter ring")


class Reconsider(Protocol):
    """Decides anew, on all ranks alike."""

    def __call__(self, units: Sequence[ParamUnit], observed: ObservedSteps, *, held_bytes: int) -> Sequence[bool]:
        """Returns for each unit whether its masters shall be on the device; those that are there stay there."""
        ...


class MovingUpdate:
    """An `UpdateAway` by way of another, which it replaces once; see [Note: coming back].

    Args:
        sharded: the model.
        optimizer: of the masters.
        memory: where buffers are reserved.
        bus: carries masters and states.
        collectives: the axis that the optimizer is sharded over.
        make: makes the update of a sharded model, and what watches it.
        after: steps before it looks again.
        reconsider: decides what moves.

    Attributes:
        moved: told the sharded model when units have moved; for who predicts bytes. None: nobody is.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: ShardOptimizer,
        memory: Arenas,
        bus: Bus,
        collectives: Collectives,
        *,
        make: Callable[[ShardedModel], tuple[UpdateAway, StepWatch]],
        after: int,
        reconsider: Reconsider,
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._memory = memory
        self._bus = bus
        self._collectives = collectives
        self._make = make
        self._after: int | None = after
        self._reconsider = reconsider
        self._host: UpdateAway
        self._host, self._watch = make(sharded)
        self._watch_arrivals()
        self.moved: Callable[[ShardedModel], None] | None = None

    @property
    def order(self) -> Sequence[int]:
        """See `UpdateAway`."""
        return self._host.order

    def expect(self, coefficient: float | None) -> None:
        """See `UpdateAway`. After so many steps, one all-reduce of a few numbers, and maybe a move."""
        reducer = self._sharded.reducer
        is_between = not reducer.has_sums and not reducer.has_unreduced
        if self._after is not None and self._watch.steps >= self._after and is_between:
            self.look_again(held_bytes=self._memory.report().bytes_in("device"))
        self._host.expect(coefficient)

    def look_again(self, *, held_bytes: int) -> None:
        """Reconsiders now, and not again; between steps, of which one has been seen whole. Every rank must call.

        Args:
            held_bytes: of arenas on the device.
        """
        self._after = None
        stays = self._reconsider(self._sharded.units, self._watch.observed(), held_bytes=held_bytes)
        coming = [unit for unit, one in zip(self._sharded.units, stays, strict=True) if one and unit.is_away]
        if coming:
            self._bring(coming)

    def leave_out(self) -> None:
        """See `UpdateAway`."""
        self._host.leave_out()

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        """See `UpdateAway`."""
        self._watch.begins()
        with self._watch.waiting():
            self._host.begin(coefficient, unused)

    def share_ahead(self) -> float | None:
        """See `UpdateAway`."""
        return self._host.share_ahead()

    def settle(self) -> None:
        """See `UpdateAway`."""
        with self._watch.waiting():
            self._host.settle()

    def buffers(self) -> list[Tensor]:
        """See `UpdateAway`."""
        return self._host.buffers()

    def close(self) -> None:
        """See `UpdateAway`."""
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
            unit.is_away = False
            unit.arrival = None
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
            self._host = _UpdateHere(self._sharded, self._optimizer, self._collectives)
        if self.moved is not None:
            self.moved(self._sharded)

    def _watch_arrivals(self) -> None:
        for unit in self._sharded.units:
            if unit.arrival is not None:
                unit.arrival = _WatchedArrival(unit.arrival, self._watch)

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
    staying: Staying,
    optimizer: ShardOptimizer,
    memory: Arenas,
    bus: Bus,
    on_host: Callable[..., UpdateAway],
) -> MovingUpdate:
    """Returns the update of an engine that looks again after `offload_placement.remeasure_after` updates.

    Args:
        sharded: the model.
        staying: decides what stays, and what comes.
        optimizer: of the masters.
        memory: where buffers are reserved.
        bus: carries masters and states.
        on_host: makes the update of a sharded model, given also what counts its time as `timed`.
    """

    def make(sharded: ShardedModel) -> tuple[UpdateAway, StepWatch]:
        found: list[TimedSteps] = []

        def timed(steps: BlockStep) -> BlockStep:
            found.append(TimedSteps(steps))
            return found[0]

        update = on_host(sharded, timed=timed)
        return update, StepWatch(found[0])

    after = sharded.settings.zero_optimization.offload_placement.remeasure_after
    assert after is not None, "somebody asked for it"
    return MovingUpdate(
        sharded,
        optimizer,
        memory,
        bus,
        staying.collectives,
        make=make,
        after=after,
        reconsider=staying.reconsider,
    )


def tell_prediction(engine: HeldMemory, optimizer: optim.Optimizer | None) -> Callable[[ShardedModel], None]:
    """Returns what tells an engine the bytes to expect once units have moved; it keeps no engine alive.

    Args:
        engine: that reports them.
        optimizer: whose states come with the units.
    """
    weakly = weakref.ref(engine)

    def tell(sharded: ShardedModel) -> None:
        told = weakly()
        if told is not None:
            predicted = sharded.prediction(optimizer)
            told.expect_state_bytes(predicted.total_bytes(), predicted.host_bytes())

    return tell


class _WatchedArrival:
    """An `Arrival` whose waits are counted."""

    def __init__(self, arrival: Arrival, watch: StepWatch) -> None:
        self._arrival = arrival
        self._watch = watch

    def wait(self, index: int) -> None:
        with self._watch.waiting():
            self._arrival.wait(index)

    def settle(self) -> None:
        with self._watch.waiting():
            self._arrival.settle()


class _UpdateHere:
    """An `UpdateAway` of which nothing is away any more: it is done when it has begun."""

    def __init__(self, sharded: ShardedModel, optimizer: ShardOptimizer, collectives: Collectives) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._collectives = collectives

    @property
    def order(self) -> Sequence[int]:
        return [unit.index for unit in self._sharded.units]

    def expect(self, coefficient: float | None) -> None:
        return

    def leave_out(self) -> None:
        return

    def begin(self, coefficient: float, unused: Collection[str] = ()) -> None:
        self._optimizer.step(coefficient, unused)
        publish(self._sharded.units, self._sharded.plan, self._collectives, self._sharded.store)

    def share_ahead(self) -> float | None:
        return None

    def settle(self) -> None:
        return

    def buffers(self) -> list[Tensor]:
        return []

    def close(self) -> None:
        return
