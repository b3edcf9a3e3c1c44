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
from zero_peers.figures import Figures

from dsrun.runtime.mesh.alone import AloneCollectives

from .options import Options
from .slow_bus import BlocksOnHost

_BLOCKS, _COMPUTE_S = 12, 0.02
_QUICK_BLOCKS, _QUICK_COMPUTE_S = 4, 0.002
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


class _Run:
    """Blocks of one rank whose gradients are there, passed through.

    Args:
        count: blocks.
        compute_s: seconds of one block's forward.
        step_s: seconds of the optimizer step of one block's range.
        overlaps: whether the update goes on behind the step, as `OffloadedUpdate` takes it; None to take no step.
    """

    def __init__(self, count: int, compute_s: float, step_s: float, *, overlaps: bool | None) -> None:
        self._compute_s = compute_s
        self._steps = overlaps is not None
        bus_s = _BUS_SHARE * compute_s
        self._blocks = BlocksOnHost(2, AloneCollectives(), count, bus_s=bus_s, step_s=step_s, overlaps=bool(overlaps))

    def take(self) -> float:
        """Takes a step and the forward and backward behind it; returns their seconds."""
        blocks = self._blocks
        for unit in blocks.units:
            blocks.gradients.take(unit.index, torch.ones_like(unit.shard), 1.0, first=True)
        started_s = time.perf_counter()
        if self._steps:
            blocks.update.begin(1.0)
        blocks.forward(self._compute_s)
        blocks.update.settle()
        for _ in blocks.units:
            time.sleep(2 * self._compute_s)
        return time.perf_counter() - started_s
