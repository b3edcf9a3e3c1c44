"""How much of the step in host memory a run waits for: stepped behind the norm, and ahead of it (`super_offload`).

Blocks are driven as hooks drive them, at stages 1 to 3, by one rank and by two (threads of one process). A block
computes, and a range is stepped, by letting time pass, and the bus is held to a pace: what is measured is the schedule,
and not a machine. The step takes twice as long as a forward, as long as the backward. Clipping is on; where it acts, on
one step of five, that one is taken again. A pass is a forward, a backward and a step.
Exposed is what a pass takes longer than one without a step, as a share of the step alone.
"""

from __future__ import annotations

import time

import torch
from torch import nn, optim
from zero_peers.figures import Figures

from dsrun.runtime.engine.offloaded import OffloadedUpdate, forward_order
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import SteadyPace, ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.offload.block_step import RangeWork
from dsrun.runtime.offload.cpu_optimizer import CpuOptimizer
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.offload.host_range import HostRange
from dsrun.runtime.offload.second_set import SecondSet
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.precision.policy import BF16
from dsrun.runtime.zero.build import build_store, build_units
from dsrun.runtime.zero.plan import ZeroPlan
from dsrun.runtime.zero.reducer import GradReducer
from dsrun.runtime.zero.units import find_units

from .options import Options

_CPU = torch.device("cpu")
_BLOCKS, _COMPUTE_S = 12, 0.02
_QUICK_BLOCKS, _QUICK_COMPUTE_S = 4, 0.002
_WIDTH = 256
_STAGES, _RANKS = (1, 2, 3), (1, 2)
#: Seconds of a range's step, of a block's backward, and of the bus each way, by seconds of its forward.
_STEP_SHARE, _BACKWARD_SHARE, _BUS_SHARE = 2.0, 2.0, 0.25
#: One step of so many is clipped.
_CLIPPED_OF = 5
_CLIPPED = "ahead, one of five clipped"
_AHEAD = ("ahead", _CLIPPED)
_MOST_EXPOSED = 0.3


def measure(options: Options) -> list[Figures]:
    """Times passes at every stage and number of ranks."""
    stages = (2,) if options.quick else _STAGES
    return [_passes(options, stage, ranks) for stage in stages for ranks in _RANKS]


def _passes(options: Options, stage: int, ranks: int) -> Figures:
    count, compute_s = (_QUICK_BLOCKS, _QUICK_COMPUTE_S) if options.quick else (_BLOCKS, _COMPUTE_S)
    whole_s = count * compute_s * _STEP_SHARE
    table = Figures(
        f"stage {stage}, {ranks} rank{'s' * (ranks > 1)}: {count} blocks, forward {1e3 * count * compute_s:g} ms, "
        f"step {1e3 * whole_s:g} ms",
        "ms",
    )
    for _ in range(options.runs):
        took = {
            name: _seconds_of_a_pass(
                stage, ranks, count, compute_s, steps=name != "no step", ahead=name in _AHEAD, clips=name == _CLIPPED
            )
            for name in ("no step", "beside", *_AHEAD)
        }
        for name, took_s in took.items():
            table.add(name, 1e3 * took_s)
        for name in ("beside", *_AHEAD):
            table.add(f"{name}: exposed share of the step", (took[name] - took["no step"]) / whole_s)
    row = "ahead: exposed share of the step"
    table.demand(f"{row} <= {_MOST_EXPOSED}", table.median(row), most=_MOST_EXPOSED)
    return table


def _seconds_of_a_pass(
    stage: int, ranks: int, count: int, compute_s: float, *, steps: bool, ahead: bool, clips: bool
) -> float:
    """Returns the mean of as many passes as have one clipped step, behind one that is not timed."""

    def body(axis: Collectives) -> float:
        run = _Run(stage, axis, count, compute_s, ahead=ahead)
        run.take(1.0, steps=steps)
        axis.barrier()
        started_s = time.perf_counter()
        for number in range(_CLIPPED_OF):
            run.take(0.5 if clips and number == _CLIPPED_OF // 2 else 1.0, steps=steps)
        took_s = time.perf_counter() - started_s
        run.close()
        return took_s / _CLIPPED_OF

    return max(LoopbackWorld(ranks).run(body))


class _LettingTimePass:
    """Steps a range in so many seconds, and gives it the parameters it had."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def step(self, work: RangeWork) -> None:
        time.sleep(self._step_s)
        if work.params_out_N is not None:
            work.params_out_N.zero_()


class _Run:
    """Blocks of one rank, and the update that steps them.

    Args:
        stage: of ZeRO.
        axis: of the ranks.
        count: blocks.
        compute_s: of a block's forward.
        ahead: step before the norm is known.
    """

    def __init__(self, stage: int, axis: Collectives, count: int, compute_s: float, *, ahead: bool) -> None:
        self._compute_s = compute_s
        plan, memory, pool = ZeroPlan.of_stage(stage), Arenas(), HostPool(None, say=print)
        pace = 2 * _WIDTH * _WIDTH / axis.size / (_BUS_SHARE * compute_s)
        bus = ThreadBus(out_pace=SteadyPace(pace), back_pace=SteadyPace(pace))
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))
        groups = assign_groups(model, None).group_of
        self._units = build_units(
            find_units(model),
            plan,
            axis,
            precision=BF16,
            device=_CPU,
            group_of=groups,
            memory=memory,
            masters_host=pool,
        )
        numels = [unit.layout.shard_numel for unit in self._units]
        gradients = HostGradients(
            numels,
            bus=bus,
            device=_CPU,
            travels=torch.bfloat16,
            accumulates=False,
            factor=1 / axis.size,
            pool=pool,
            memory=memory,
            ahead=ahead,
        )
        self._reducer = GradReducer(
            self._units,
            axis,
            shard_optimizer=True,
            shard_gradients=plan.shard_gradients,
            sums=gradients,
            sums_early=True,
            memory=memory,
        )
        self._store = build_store(self._units, plan, axis, memory=memory)
        optimizer = ShardOptimizer([unit.owned_range(groups) for unit in self._units], group_count=1, axis=axis)
        optimizer.drive(optim.SGD(optimizer.shards_by_group()[0], lr=0.1))
        ranges = [
            HostRange(unit.label, [run for run in optimizer.runs if run.layout is unit.layout], unit.master, unit.shard)
            for unit in self._units
        ]
        second = None
        if ahead:
            second = SecondSet(ranges, [0] * count, state_dtype=torch.float32, copied=pool, own=pool, memory=memory)
        host = CpuOptimizer(
            ranges,
            optimizer,
            gradients,
            _LettingTimePass(_STEP_SHARE * compute_s),
            order=forward_order(self._units, ()),
            bus=bus,
            pool=pool,
            memory=memory,
            second=second,
        )
        self._update = OffloadedUpdate(self._units, plan, axis, self._reducer, self._store, host, overlaps=True)

    def take(self, coefficient: float, *, steps: bool) -> None:
        """Takes a pass: forward, backward and a step, which may go on behind it."""
        for unit in self._units:
            self._store.acquire(unit)
            time.sleep(self._compute_s)
            self._store.release(unit)
        self._update.settle()
        self._update.expect(1.0 if steps else None)
        self._reducer.begin(order=lambda: self._units, used=self._units)
        for unit in reversed(self._units):
            self._store.acquire(unit)
            self._reducer.open(unit)
            time.sleep(_BACKWARD_SHARE * self._compute_s)
            self._store.release(unit)
            self._reducer.complete(unit)
        self._reducer.finish()
        if steps:
            self._update.begin(coefficient)
        self._reducer.zero()

    def close(self) -> None:
        """Ends the update's thread."""
        self._update.close()
