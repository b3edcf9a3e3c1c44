"""Parameters streamed from host memory while blocks compute, over a bus that is held to a pace.

The bus is a thread and a clock, as in the tests, and a block computes by letting time pass, as for a host whose device
computes: what is measured is the schedule, and not a machine. A pass takes every block forward and backward, as a step
does; the bus needs for a block's slice a share of what the block computes for. The floor is the longer of both: all
computation behind the first transfer, or all transfers and the last block's computation behind them.
`one by one` has a single slot, so that every block is waited for; `ahead` has two, and `two ahead` three.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from zero_peers.figures import Figures

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.offload.params.on_host import HostShards
from dsrun.runtime.optim.groups import assign_groups
from dsrun.runtime.precision.policy import BF16
from dsrun.runtime.zero.creation.placement import Placement
from dsrun.runtime.zero.creation.units import build_store, build_units
from dsrun.runtime.zero.params.slots import turns_of
from dsrun.runtime.zero.params.store import ParamStore
from dsrun.runtime.zero.units.find import find_units
from dsrun.runtime.zero.units.plan import ZeroPlan
from dsrun.runtime.zero.units.unit import ParamUnit
from support.paced_bus import SteadyPace

from .options import Options

_CPU = torch.device("cpu")
_BLOCKS, _COMPUTE_S = 12, 0.02
_QUICK_BLOCKS, _QUICK_COMPUTE_S = 4, 0.002
_WIDTH = 512
#: Seconds of the bus by seconds of computation, of each block.
_SHARES = (0.5, 1.0, 2.0)
#: Elements that may be gathered ahead, in blocks.
_AHEAD = {"one by one": 0, "ahead": 1, "two ahead": 2}
_LEAST = 0.85


def measure(options: Options) -> list[Figures]:
    """Times passes over blocks whose parameters lie in host memory."""
    count, compute_s = (_QUICK_BLOCKS, _QUICK_COMPUTE_S) if options.quick else (_BLOCKS, _COMPUTE_S)
    return [_stream(options, count, compute_s, share) for share in _SHARES]


def _stream(options: Options, count: int, compute_s: float, share: float) -> Figures:
    block_numel = _WIDTH * _WIDTH
    bus_s = share * compute_s
    table = Figures(f"{count} blocks that compute for {1e3 * compute_s:g} ms, and {1e3 * bus_s:g} ms on the bus", "ms")
    runs = {
        name: _Stream(count, ahead=ahead * block_numel, bytes_per_s=2 * block_numel / bus_s)
        for name, ahead in _AHEAD.items()
    }
    for number in range(options.runs + 1):
        for name, stream in runs.items():
            took_s, copies = stream.take(compute_s)
            if not number:
                continue  # the order is recorded, and memory touched
            floor_s = max(2 * count * compute_s + bus_s, copies * bus_s + compute_s)
            table.add(name, 1e3 * took_s, f"floor {1e3 * floor_s:.0f} ms, {copies} copies")
            table.add(f"{name}: floor by measured", floor_s / took_s)
    row = "ahead: floor by measured"
    table.demand(f"{row} >= {_LEAST}", table.median(row), least=_LEAST)
    return table


class _Stream:
    """Blocks in host memory, and the store that fetches them."""

    def __init__(self, count: int, *, ahead: int, bytes_per_s: float) -> None:
        self.bus = ThreadBus(back_pace=SteadyPace(bytes_per_s))
        axis, plan = AloneCollectives(), ZeroPlan.of_stage(3)
        tier = HostShards(self.bus, Arenas(), pool=HostPool(None, say=print), device=_CPU)
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))
        groups = assign_groups(model, None).group_of
        self.units: list[ParamUnit] = build_units(
            find_units(model),
            plan,
            lambda _: axis,
            precision=BF16,
            device=_CPU,
            group_of=groups,
            placement=Placement(tier=tier),
        )
        gathering = turns_of(self.units, GatherBudgets(ahead=ahead))
        self.store: ParamStore = build_store(self.units, plan, axis, gathering=gathering)

    def take(self, compute_s: float) -> tuple[float, int]:
        """Takes one pass; returns its seconds and how many slices crossed the bus."""
        before = self.bus.counts.back["parameters"].calls

        def walk() -> None:
            for unit in (*self.units, *reversed(self.units)):
                self.store.acquire(unit)
                time.sleep(compute_s)
                self.store.release(unit)

        took_s = _seconds(walk)
        copies = self.bus.counts.back["parameters"].calls - before
        self.store.invalidate()
        return took_s, copies


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
