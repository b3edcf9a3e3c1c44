"""Which blocks are recomputed, and in what segments: a choice from a number of blocks. Pure; knows no modules.

[Note: policies]
- every_block: each block is a segment: L inputs are kept, one block is live in backward.
- interval: segments of k blocks: L/k inputs, k blocks live. DeepSpeed's `activation_checkpoint_interval`.
- ratio: that share of the blocks is recomputed, one by one; those at the front, whose activations would be kept for the
  longest time. The others keep theirs.
- sqrt: ceil(sqrt(L)) segments of even length (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
- hierarchical: the same segments, run again in two passes: the inputs inside of a segment first, then block by block.
  About 2 sqrt(L) inputs and one live block, for nearly one more forward than sqrt.
- selective: each block is a segment, and what its matrix products gave is kept.
A transformer's block keeps 16 or more times the size of its input, so `sqrt` holds more than `every_block` up to some
250 blocks; `hierarchical` holds less than both.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import Enum

from dsrun.config.sections.activation import Policy


class Treatment(Enum):
    """What becomes of the tensors that a block saves.

    `KEEP`: nothing. `RECOMPUTE`: they are made again from the block's input. `SELECT`: the same, with results of some
    operations kept. `MOVE`: they wait in host memory. `PACK`: they wait in 8 bits.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SELECT = "select"
    MOVE = "move"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring blocks that are treated as one.

    Attributes:
        start: first block.
        stop: one past the last.
        treatment: treatment of all blocks in the segment.
        at_once: recomputed in one run; else inputs first.
    """

    start: int
    stop: int
    treatment: Treatment = Treatment.RECOMPUTE
    at_once: bool = True


def every(count: int, treatment: Treatment = Treatment.RECOMPUTE) -> list[Segment]:
    """Each block is a segment."""
    return [Segment(i, i + 1, treatment) for i in range(count)]


def by_interval(count: int, interval: int) -> list[Segment]:
    """Segments of `interval` blocks; the last one may be shorter."""
    return [Segment(start, min(count, start + interval)) for start in range(0, count, interval)]


def into_segments(count: int, segments: int, *, at_once: bool = True) -> list[Segment]:
    """`segments` segments whose lengths differ by one at most, the shorter ones last."""
    segments = min(segments, count)
    starts = [-(-i * count // segments) for i in range(segments + 1)]
    return [Segment(a, b, at_once=at_once) for a, b in itertools.pairwise(starts)]


def by_ratio(count: int, ratio: float) -> list[Segment]:
    """Recomputes round(ratio * count) blocks at the front, and keeps the others as they are."""
    recomputed = math.floor(ratio * count + 0.5)
    return [Segment(i, i + 1, Treatment.RECOMPUTE if i < recomputed else Treatment.KEEP) for i in range(count)]


def by_sqrt(count: int, *, at_once: bool = True) -> list[Segment]:
    """ceil(sqrt(count)) segments."""
    return into_segments(count, math.ceil(math.sqrt(count)), at_once=at_once)


def plan(
    policy: Policy, count: int, *, interval: int | None = None, ratio: float | None = None, kept: int | None = None
) -> list[Segment]:
    """Returns the segments of a stack.

    Args:
        policy: policy for choosing segments, see [Note: policies]; `memory_budget` measures every block first, so it
            begins as `every_block`.
        count: blocks of the stack.
        interval: number of blocks in a segment, used by policy `interval` alone.
        ratio: share of the blocks to recompute, used by policy `ratio` alone.
        kept: number of segments where `every_block` is not to have one a block.

    Returns:
        segments in order, without gaps.
    """
    match policy:
        case "none" | "compiler":
            return every(count, Treatment.KEEP)
        case "interval":
            assert interval is not None, "checked with the config"
            return by_interval(count, interval)
        case "ratio":
            assert ratio is not None, "checked with the config"
            return by_ratio(count, ratio)
        case "sqrt" | "hierarchical":
            return by_sqrt(count, at_once=policy == "sqrt")
        case "selective":
            return every(count, Treatment.SELECT)
        case "every_block" | "memory_budget":
            return every(count) if kept is None else into_segments(count, kept)
