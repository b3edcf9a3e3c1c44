"""Blocks whose masters lie in host memory, behind a bus that is held to a pace, and the update that steps them.

The bus is a thread and a clock, as in the tests, and a range is stepped by letting time pass: what is measured with it
is the schedule, and not a machine. What a pass is, is the business of who measures.
"""

from __future__ import annotations

import time

import torch
from torch import nn, optim

from dsrun.runtime.engine.host.update import OffloadedUpdate, forward_order
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.offload.ahead.double_buffer import DoubleBuffer
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.offload.states.host_range import HostRange
from dsrun.runtime.offload.step.cpu_optimizer import CpuOptimizer
from dsrun.runtime.offload.step.ways import RangeWork
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.precision.policy import BF16
from dsrun.runtime.zero.creation.placement import Placement
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.grads.reducer import GradReducer
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from support.paced_bus import SteadyPace

_CPU = torch.device("cpu")
_WIDTH = 256


class _LettingTimePass:
    """Steps a range in so many seconds, and gives it the parameters it had."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def step(self, work: RangeWork) -> None:
        time.sleep(self._step_s)
        if work.params_out_N is not None:
            work.params_out_N.copy_(work.master_N)


class BlocksOnHost:
    """A model of linear blocks of one rank.

    Args:
        stage: ZeRO stage.
        axis: the ranks.
        count: blocks.
        bus_s: seconds that the bus takes for one block's slice, in each direction.
        step_s: seconds of the optimizer step of one block's range.
        ahead: step before the norm is known.
        overlaps: whether the update goes on behind the step, as `OffloadedUpdate` takes it.

    Attributes:
        units: the blocks.
        gradients: gradients on their way to the host.
        reducer: reducer that sends the gradients to the host.
        store: store of the parameters.
        update: steps the blocks.
    """

    def __init__(
        self,
        stage: int,
        axis: Collectives,
        count: int,
        *,
        bus_s: float,
        step_s: float,
        ahead: bool = False,
        overlaps: bool = True,
    ) -> None:
        plan, memory, pool = ZeroPlan.of_stage(stage), Arenas(), HostPool(None, say=print)
        pace = 2 * _WIDTH * _WIDTH / axis.size / bus_s
        bus = ThreadBus(out_pace=SteadyPace(pace), back_pace=SteadyPace(pace))
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))
        groups = assign_groups(model, None).group_of
        self.units = build_units(
            find_units(model),
            plan,
            lambda _: axis,
            precision=BF16,
            device=_CPU,
            group_of=groups,
            memory=memory,
            placement=Placement(masters_host=pool),
        )
        self.gradients = HostGradients(
            [unit.layout.shard_numel for unit in self.units],
            bus=bus,
            device=_CPU,
            travels=torch.bfloat16,
            accumulates=False,
            factors=[1 / axis.size],
            pool=pool,
            memory=memory,
            ahead=ahead,
        )
        self.reducer = GradReducer(
            self.units,
            axis,
            shard_optimizer=True,
            shard_gradients=plan.shard_gradients,
            sums=self.gradients,
            sums_early=True,
            memory=memory,
        )
        self.store = build_store(self.units, plan, axis, memory=memory)
        optimizer = ShardOptimizer([unit.owned_range(groups) for unit in self.units], group_count=1, axis=axis)
        optimizer.drive(optim.SGD(optimizer.shards_by_group()[0], lr=0.1))
        ranges = [
            HostRange(unit.label, [run for run in optimizer.runs if run.layout is unit.layout], unit.master, unit.shard)
            for unit in self.units
        ]
        second = None
        if ahead:
            second = DoubleBuffer(ranges, [0] * count, state_dtype=torch.float32, copied=pool, own=pool, memory=memory)
        host = CpuOptimizer(
            ranges,
            optimizer,
            self.gradients,
            _LettingTimePass(step_s),
            order=forward_order(self.units, ()),
            bus=bus,
            pool=pool,
            memory=memory,
            second=second,
        )
        self.update = OffloadedUpdate(self.units, plan, self.reducer, self.store, host, overlaps=overlaps)

    def forward(self, compute_s: float) -> None:
        """Uses every block for so long, in order."""
        for unit in self.units:
            self.store.acquire(unit)
            time.sleep(compute_s)
            self.store.release(unit)

    def backward(self, compute_s: float) -> None:
        """Uses every block for so long from the last to the first, and reduces its gradient."""
        self.reducer.begin(order=lambda: self.units, used=self.units)
        for unit in reversed(self.units):
            self.store.acquire(unit)
            self.reducer.open(unit)
            time.sleep(compute_s)
            self.store.release(unit)
            self.reducer.complete(unit)
        self.reducer.finish()
