"""How much of the step in host memory a run waits for: stepped behind the norm, and ahead of it (`super_offload`).

Blocks are driven as hooks drive them, at stages 1 to 3, by one rank and by two (threads of one process). A block
computes, and a range is stepped, by letting time pass, and the bus is held to a pace: what is measured is the schedule,
and not a machine. The step takes twice as long as a forward, as long as the backward. Clipping is on; where it acts, on
one step of five, that one is taken again. A pass is a forward, a backward and a step.
Exposed is what a pass takes longer than one without a step, as a share of the step alone.
"""

from __future__ import annotations

import time

from zero_peers.figures import Figures

from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.loopback import LoopbackWorld

from .options import Options
from .slow_bus import BlocksOnHost

_BLOCKS, _COMPUTE_S = 12, 0.02
_QUICK_BLOCKS, _QUICK_COMPUTE_S = 4, 0.002
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


class _Run:
    """Blocks of one rank, passed through.

    Args:
        stage: ZeRO stage.
        axis: the ranks.
        count: blocks.
        compute_s: seconds of one block's forward.
        ahead: step before the norm is known.
    """

    def __init__(self, stage: int, axis: Collectives, count: int, compute_s: float, *, ahead: bool) -> None:
        self._compute_s = compute_s
        bus_s, step_s = _BUS_SHARE * compute_s, _STEP_SHARE * compute_s
        self._blocks = BlocksOnHost(stage, axis, count, bus_s=bus_s, step_s=step_s, ahead=ahead)

    def take(self, coefficient: float, *, steps: bool) -> None:
        """Takes a pass: forward, backward and a step, which may go on behind it."""
        update = self._blocks.update
        self._blocks.forward(self._compute_s)
        update.settle()
        update.expect(1.0 if steps else None)
        self._blocks.backward(_BACKWARD_SHARE * self._compute_s)
        if steps:
            update.begin(coefficient)
        self._blocks.reducer.zero()

    def close(self) -> None:
        """Ends the update's thread."""
        self._blocks.update.close()
