"""The optimizer in host memory beside the next forward, over a bus that is held to a pace.

The bus is a thread and a clock, as in the tests; a block computes, and a range is stepped, by letting time pass: what
is measured is the schedule, and not a machine. The norm is known before any range is stepped, as with clipping. A pass
is a step, the forward over all blocks behind it, and a backward that takes twice as long.
`in turn` waits for the step before the next forward, as others do; `beside` waits for each block when it comes to it.
Exposed is what a pass takes longer than without a step, as a share of the step alone. The floor is B + max(F, O).
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
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.offload.block_step import RangeWork
from dsrun.runtime.offload.cpu_optimizer import CpuOptimizer
from dsrun.runtime.offload.host_gradients import HostGradients
from dsrun.runtime.offload.host_range import HostRange
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
#: Seconds of a range's step by seconds of its block's forward.
_SHARES = (0.5, 0.9, 2.0)
#: Seconds of the bus, each way, by seconds of a block's forward.
_BUS_SHARE = 0.25
_MOST_EXPOSED = 0.3


def measure(options: Options) -> list[Figures]:
    """Times passes whose step is taken in turn and beside the next forward."""
    count, compute_s = (_QUICK_BLOCKS, _QUICK_COMPUTE_S) if options.quick else (_BLOCKS, _COMPUTE_S)
    return [_schedule(options, count, compute_s, share) for share in _SHARES]


def _schedule(options: Options, count: int, compute_s: float, share: float) -> Figures:
    step_s = share * compute_s
    table = Figures(f"{count} blocks: forward {1e3 * compute_s:g} ms each, step {1e3 * step_s:g} ms each", "ms")
    runs = {
        "no step": _Run(count, compute_s, step_s, overlaps=None),
        "in turn": _Run(count, compute_s, step_s, overlaps=False),
        "beside": _Run(count, compute_s, step_s, overlaps=True),
    }
    whole_s = count * step_s
    floor_s = 2 * count * compute_s + max(count * compute_s, whole_s)
    for number in range(options.runs + 1):
        took = {name: run.take() for name, run in runs.items()}
        if not number:
            continue  # memory is touched
        for name, took_s in took.items():
            table.add(name, 1e3 * took_s, f"floor {1e3 * floor_s:.0f} ms" if name == "beside" else "")
        for name in ("in turn", "beside"):
            table.add(f"{name}: exposed share of the step", (took[name] - took["no step"]) / whole_s)
    if share < 1:
        row = "beside: exposed share of the step"
        table.demand(f"{row} <= {_MOST_EXPOSED}", table.median(row), most=_MOST_EXPOSED)
    return table


class _LettingTimePass:
    """Steps a range in so many seconds, and gives it the parameters it had."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def step(self, work: RangeWork) -> None:
        time.sleep(self._step_s)
        if work.params_out_N is not None:
            work.params_out_N.copy_(work.master_N)


class _Run:
    """Blocks whose masters lie in host memory, and the update that steps them.

    Args:
        count: blocks.
        compute_s: of a block's forward.
        step_s: of its range's step.
        overlaps: as `OffloadedUpdate` takes it; None: no step is taken.
    """

    def __init__(self, count: int, compute_s: float, step_s: float, *, overlaps: bool | None) -> None:
        self._compute_s = compute_s
        self._steps = overlaps is not None
        axis, plan, memory, pool = AloneCollectives(), ZeroPlan.of_stage(2), Arenas(), HostPool(None, say=print)
        pace = 2 * _WIDTH * _WIDTH / (_BUS_SHARE * compute_s)
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
        self._gradients = HostGradients(
            [unit.layout.shard_numel for unit in self._units],
            bus=bus,
            device=_CPU,
            travels=torch.bfloat16,
            accumulates=False,
            factor=1.0,
            pool=pool,
            memory=memory,
        )
        reducer = GradReducer(
            self._units, axis, shard_optimizer=True, shard_gradients=True, sums=self._gradients, memory=memory
        )
        self._store = build_store(self._units, plan, axis, memory=memory)
        optimizer = ShardOptimizer([unit.owned_range(groups) for unit in self._units], group_count=1)
        optimizer.drive(optim.SGD(optimizer.shards_by_group()[0], lr=0.1))
        ranges = [
            HostRange(unit.label, [run for run in optimizer.runs if run.layout is unit.layout], unit.master, unit.shard)
            for unit in self._units
        ]
        host = CpuOptimizer(
            ranges,
            optimizer,
            self._gradients,
            _LettingTimePass(step_s),
            order=forward_order(self._units, ()),
            bus=bus,
            pool=pool,
            memory=memory,
        )
        self._update = OffloadedUpdate(self._units, plan, axis, reducer, self._store, host, overlaps=bool(overlaps))

    def take(self) -> float:
        """Takes a step and the forward and backward behind it; returns their seconds."""
        reduced = [torch.ones_like(unit.shard) for unit in self._units]
        for unit, grad_N in zip(self._units, reduced, strict=True):
            self._gradients.take(unit.index, grad_N, 1.0, first=True)
        started_s = time.perf_counter()
        if self._steps:
            self._update.begin(1.0)
        for unit in self._units:
            self._store.acquire(unit)
            time.sleep(self._compute_s)
            self._store.release(unit)
        self._update.settle()
        for _ in self._units:
            time.sleep(2 * self._compute_s)
        return time.perf_counter() - started_s
