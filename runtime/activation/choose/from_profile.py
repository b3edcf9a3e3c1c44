"""The fastest plan for blocks that were measured: from a profile to what each treatment costs, and to a choice.

[Note: measured plans]
Policy `memory_budget` begins as `every_block` and is measured: bytes and seconds of each block in the second micro
step, and what it takes to copy and to pack a byte. From these the fastest plan within the budget is solved and used
from the third micro step on.

At ZeRO stage 3 a block that runs again gathers its parameters again, so ranks with different plans would meet in
different collectives: `agree` makes one of the ranks' figures, of which each then solves the same plan. The largest
figures hold the budget on every rank, where their batches differ in length too. Below stage 3 nothing depends on a
rank's plan, and each has its own. So have the stages of a pipeline: late ones hold fewer micro batches at once, and
keep more of each.

Who measures blocks and applies the plan is `activation/activate.py`; the choice itself is `budget.py`'s.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dsrun.errors import ModelError
from dsrun.pipeline_schedules.live import ONE_AT_A_TIME, LiveMoment
from dsrun.units import format_bytes

from ...memory.bus import instant_bus_for
from ...memory.host_pool import host_pool_for
from ..keep.packing import pack, packed_bytes, unpack
from .budget import BlockCosts, Cost, Solution, least_bytes, solve
from .policy import Treatment
from .profile import CallFigures

_PROBE_BYTES = 8 << 20

_HINT = "use a smaller micro batch, or `cpu_checkpointing`, or `packing`"
_HINT_PUT_OFF = (
    f"{_HINT}; where the schedule puts gradients of weights off, what they need is held in any case: "
    '`pipeline.schedule` "1f1b" puts none off'
)

_log = logging.getLogger(__name__)


def solve_measured(
    figures: Sequence[CallFigures],
    budget_bytes: int,
    *,
    device: torch.device,
    may_move: bool,
    may_pack: bool,
    chunks: Sequence[int] | None = None,
    moments: Sequence[LiveMoment] = ONE_AT_A_TIME,
    agree: Callable[[list[float]], list[float]] = list,
) -> Solution:
    """Returns the fastest plan within a budget.

    Args:
        figures: measured figures of each block, with a second run.
        budget_bytes: bytes that the blocks' activations of all micro batches may take.
        device: device that the blocks compute on; copying and packing are measured there.
        may_move: saved tensors may wait in host memory.
        may_pack: saved tensors may wait in 8 bits.
        chunks: chunk of each block, by its position among those of this rank; None: there is one.
        moments: moments of the schedule that the budget must hold at.
        agree: function that turns this rank's figures into those that the plan is solved from; may be a collective.

    Raises:
        ModelError: the budget is less than the least that the blocks can do with.
    """
    own = [number for each in figures for number in (each.kept_bytes, each.dropped_bytes, _median_s(each))]
    move_s, pack_s, *numbers = agree([*_seconds_per_byte(device), *own])
    triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    figures = [CallFigures(int(kept), int(dropped), again_s=[again_s]) for kept, dropped, again_s in triples]
    allowed = {"move_s": move_s if may_move else None, "pack_s": pack_s if may_pack else None}
    blocks = [
        replace(block_costs(each, **allowed), chunk=chunk)
        for each, chunk in zip(figures, chunks or [0] * len(figures), strict=True)
    ]
    solution = solve(blocks, budget_bytes, moments=moments)
    if solution is None:
        raise ModelError(
            f"`activation_checkpointing.memory_budget` is {budget_bytes} ({format_bytes(budget_bytes)}); the blocks "
            f"need {format_bytes(least_bytes(blocks, moments=moments))} at least",
            hint=_HINT_PUT_OFF if any(any(moment.put_off) for moment in moments) else _HINT,
        )
    return solution


def block_costs(figures: CallFigures, *, move_s: float | None, pack_s: float | None) -> BlockCosts:
    """Returns what each treatment of a measured block costs.

    Args:
        figures: measured figures of the block.
        move_s: seconds to copy a byte to the host and back; None where that is not allowed.
        pack_s: seconds to pack and unpack a byte; None where that is not allowed.
    """
    live = figures.dropped_bytes
    costs = {
        Treatment.KEEP: Cost(live, 0.0),
        Treatment.RECOMPUTE: Cost(figures.kept_bytes, _median_s(figures)),
    }
    if move_s is not None:
        costs[Treatment.MOVE] = Cost(0, live * move_s)
    if pack_s is not None:
        costs[Treatment.PACK] = Cost(packed_bytes(live) // 2, live * pack_s)
    return BlockCosts(live, costs)


def _median_s(figures: CallFigures) -> float:
    return statistics.median(figures.again_s)


def _seconds_per_byte(device: torch.device) -> tuple[float, float]:
    """Measures (copying to the host and back, packing and unpacking), in seconds a byte of bf16."""
    probe = torch.zeros(_PROBE_BYTES // 2, dtype=torch.bfloat16, device=device)
    bus = instant_bus_for(device)
    pool = host_pool_for(device, pin=True, say=_log.warning)  # as the ring has it: what is measured is its copies
    slot = pool.zeros(probe.numel(), dtype=probe.dtype)

    def move() -> None:
        bus.wait(bus.start_out(probe, slot, kind="activations"))
        bus.start_back(slot, probe, kind="activations")
        bus.finish()

    def pack_and_unpack() -> None:
        unpack(*pack(probe), probe.dtype)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return _seconds(move) / _PROBE_BYTES, _seconds(pack_and_unpack) / _PROBE_BYTES


def _seconds(run: Callable[[], None]) -> float:
    """The shorter of two runs; the first one also pays for what is made once."""
    taken: list[float] = []
    for _ in range(2):
        started_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started_s)
    return min(taken)
