"""What of the step in host memory a run waits for, counted in ticks: the device computes in them, and the host steps.

No clock is asked: a block takes so many ticks to compute, a range so many to be stepped, and the host's thread goes on
by a tick when the device has computed for one, or has waited for one.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.runtime.engine.host.update import OffloadedUpdate, forward_order
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import InstantBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.offload.ahead.double_buffer import DoubleBuffer
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.offload.states.host_range import HostRange
from dsrun.runtime.offload.states.range_work import RangeWork
from dsrun.runtime.offload.step.cpu_optimizer import CpuOptimizer
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.precision.policy import BF16
from dsrun.runtime.zero.creation.placement import Placement
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.grads.reducer import GradReducer
from dsrun.runtime.zero.units.find import UnitSpec
from dsrun.runtime.zero.units.plan import ZeroPlan

CPU = torch.device("cpu")
BLOCKS, NUMEL = 8, 512
#: Ticks of a block's forward, of its backward, and of its range's step: twice what the next forward can hide.
FORWARD, BACKWARD, STEP = 2, 4, 4
DEADLINE_S = 60.0


class Ticking:
    """Steps a range in `STEP` ticks, each let through by `let`."""

    def __init__(self) -> None:
        self.met = threading.Condition()
        self.waits = False
        self.steps = 0
        self._allowed = 0

    def step(self, work: RangeWork) -> None:
        for _ in range(STEP):
            with self.met:
                self.waits = True
                self.met.notify_all()
                assert self.met.wait_for(lambda: self._allowed, DEADLINE_S), "nobody lets time pass"
                self._allowed -= 1
                self.waits = False
        for target, source in work.origins:
            target.copy_(source)
        assert isinstance(work.master_N, torch.Tensor)
        work.master_N.sub_(work.grads_N, alpha=work.grad_scale)
        if work.params_out_N is not None:
            work.params_out_N.copy_(work.master_N)
        self.steps += 1

    def let(self, futures: list[Future[Any]]) -> bool:
        """Lets a tick through; False where the thread has nothing to do."""
        for future in futures:
            future.add_done_callback(self._wake)
        with self.met:
            rest = [future for future in futures if not future.done()]
            assert self.met.wait_for(lambda: self.waits or all(f.done() for f in futures), DEADLINE_S)
            if not self.waits:
                return False
            self._allowed += 1
            self.waits = False
            self.met.notify_all()
            # It waits again within a range, or behind it for the next one's first tick, or has nothing to do.
            done = lambda: self.waits or all(future.done() for future in rest)  # noqa: E731
            assert self.met.wait_for(done, DEADLINE_S)
        return True

    def _wake(self, future: Future[Any]) -> None:
        with self.met:
            self.met.notify_all()


class Bed:
    """Blocks of one size, driven as hooks drive them."""

    def __init__(self, stage: int, *, ahead: bool) -> None:
        plan, alone, memory, pool = ZeroPlan.of_stage(stage), AloneCollectives(), Arenas(), HostPool(None, say=print)
        bus = InstantBus()
        specs = [
            UnitSpec(f"blocks.{i}", nn.Identity(), ((f"blocks.{i}.w", nn.Parameter(torch.ones(NUMEL))),))
            for i in range(BLOCKS)
        ]
        group_of = {id(param): 0 for spec in specs for _, param in spec.params}
        self.units = build_units(
            specs,
            plan,
            lambda _: alone,
            precision=BF16,
            device=CPU,
            group_of=group_of,
            memory=memory,
            placement=Placement(masters_host=pool),
        )
        self.gradients = HostGradients(
            [NUMEL] * BLOCKS,
            bus=bus,
            device=CPU,
            travels=torch.bfloat16,
            accumulates=False,
            factors=[1.0],
            pool=pool,
            memory=memory,
            ahead=ahead,
        )
        self.reducer = GradReducer(
            self.units,
            alone,
            shard_optimizer=True,
            shard_gradients=plan.shard_gradients,
            sums=self.gradients,
            sums_early=True,
            memory=memory,
        )
        self.store = build_store(self.units, plan, alone, memory=memory)
        optimizer = ShardOptimizer([unit.owned_range(group_of) for unit in self.units], group_count=1)
        optimizer.drive(optim.SGD(optimizer.shards_by_group()[0], lr=1.0))
        ranges = [
            HostRange(unit.label, [r for r in optimizer.runs if r.layout is unit.layout], unit.master, unit.shard)
            for unit in self.units
        ]
        second = None
        if ahead:
            second = DoubleBuffer(ranges, [0] * BLOCKS, state_dtype=torch.float32, copied=pool, own=pool, memory=memory)
        self.ticking = Ticking()
        self.host = CpuOptimizer(
            ranges,
            optimizer,
            self.gradients,
            self.ticking,
            order=forward_order(self.units, ()),
            bus=bus,
            pool=pool,
            memory=memory,
            second=second,
        )
        self.update = OffloadedUpdate(self.units, plan, self.reducer, self.store, self.host, overlaps=True)
        self.exposed = 0

    def under_way(self) -> list[Future[Any]]:
        speculation = self.host._speculation  # pyright: ignore[reportPrivateUsage]
        ahead = [] if speculation is None else list(speculation._futures.values())  # pyright: ignore[reportPrivateUsage]
        return [*ahead, *self.host._pending.values()]  # pyright: ignore[reportPrivateUsage]

    def compute(self, ticks: int) -> None:
        for _ in range(ticks):
            self.ticking.let(self.under_way())

    def wait_for(self, futures: list[Future[Any]]) -> None:
        """Waits as the run would, a tick at a time."""
        while not all(future.done() for future in futures):
            if self.ticking.let(self.under_way()):
                self.exposed += 1
            else:
                wait(futures, timeout=DEADLINE_S, return_when=FIRST_COMPLETED)

    def forward(self) -> None:
        for unit in self.units:
            pending = self.host._pending  # pyright: ignore[reportPrivateUsage]
            ahead = self.units[: unit.index + (2 if self.store.always_there is False else 1)]
            self.wait_for([pending[earlier.index] for earlier in ahead if earlier.index in pending])
            self.store.acquire(unit)
            self.compute(FORWARD)
            self.store.release(unit)

    def backward(self) -> None:
        self.wait_for(self.under_way())
        self.update.settle()
        self.update.expect(1.0)
        self.reducer.begin(order=lambda: self.units, used=self.units)
        for unit in reversed(self.units):
            self.reducer.open(unit)
            self.compute(BACKWARD)
            unit.flat_grad.fill_(0.125)
            self.reducer.complete(unit)
        self.reducer.finish()

    def step(self, coefficient: float = 1.0) -> None:
        self.update.begin(coefficient)
        self.reducer.zero()

    def close(self) -> None:
        self.wait_for(self.under_way())
        self.update.close()


def exposed_share(stage: int, *, ahead: bool, coefficients: tuple[float, ...]) -> float:
    """Ticks that passes waited for the step, of all ticks of all steps."""
    bed = Bed(stage, ahead=ahead)
    bed.forward()
    for coefficient in coefficients:
        bed.backward()
        bed.step(coefficient)
        bed.forward()
    bed.close()
    expected = 1.0 - 0.125 * sum(coefficients)
    assert all(bool((unit.master == expected).all()) for unit in bed.units)
    return bed.exposed / (len(coefficients) * BLOCKS * STEP)


#: Clipping acts on one step of five.
CLIPPED_AT_TIMES = (1.0, 1.0, 0.5, 1.0, 1.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stepping_ahead_hides_seven_tenths_of_a_step_that_takes_two_forwards(stage: int) -> None:
    beside = exposed_share(stage, ahead=False, coefficients=CLIPPED_AT_TIMES)
    ahead = exposed_share(stage, ahead=True, coefficients=CLIPPED_AT_TIMES)
    assert beside > 0.5, "the next forward alone hides less than half of it"
    assert ahead <= 0.3


def test_a_step_that_is_never_clipped_is_hidden_but_for_its_end() -> None:
    assert exposed_share(2, ahead=True, coefficients=(1.0,) * 4) <= 1 / BLOCKS


def test_a_step_that_is_always_clipped_waits_no_longer_than_one_that_is_not_stepped_ahead_and_a_range() -> None:
    coefficients = (0.5,) * 3
    beside = exposed_share(2, ahead=False, coefficients=coefficients)
    assert exposed_share(2, ahead=True, coefficients=coefficients) <= beside + 1 / BLOCKS
