"""How many blocks a policy recomputes, and how they are cut into segments: numbers only, of a stack of equal blocks.

What that takes in bytes stands in `estimate/model/activations.py`. The runtime's own choice, of real modules, is
`runtime/activation/choose/policy.py`; a test holds the two to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsrun.config.sections.activation import Policy


@dataclass(frozen=True, slots=True)
class RecomputationPlan:
    """What becomes of a stack.

    Attributes:
        blocks: number of blocks that are recomputed; the others keep everything.
        segments: number of segments of the recomputed blocks; each segment keeps the input of its first block.
        longest: blocks of the longest segment.
        at_once: all blocks of a segment live together in backward; else only inputs, and one block.
        products: results of matrix products are kept, and not made again.
    """

    blocks: int = 0
    segments: int = 0
    longest: int = 0
    at_once: bool = True
    products: bool = False

    @property
    def forwards(self) -> float:
        """Forwards of recomputed blocks beyond the first one, counted in blocks; a kept product costs nothing."""
        if self.products:
            return 0.0
        return self.blocks + (0 if self.at_once else self.blocks - self.segments)


def recomputed(
    policy: Policy, layers: int, *, interval: int | None = None, ratio: float | None = None, kept: int | None = None
) -> RecomputationPlan:
    """Returns what a policy makes of `layers` blocks.

    Args:
        policy: `memory_budget` is what its first two micro steps are, every block; `compiler` as `none`.
        layers: blocks.
        interval: number of blocks in a segment, for the policy `interval`.
        ratio: share of the blocks that is recomputed, for the policy `ratio`.
        kept: segments where `every_block` is not to have one a block.
    """
    if not layers:  # a pipeline stage may have the embedding or the head alone
        return RecomputationPlan()
    match policy:
        case "none" | "compiler":
            return RecomputationPlan()
        case "interval":
            assert interval is not None, "checked with the config"
            return RecomputationPlan(layers, -(-layers // interval), min(layers, interval))
        case "ratio":
            assert ratio is not None, "checked with the config"
            blocks = math.floor(ratio * layers + 0.5)
            return RecomputationPlan(blocks, blocks, min(1, blocks))
        case "sqrt" | "hierarchical":
            return _into(layers, math.ceil(math.sqrt(layers)), at_once=policy == "sqrt")
        case "selective":
            return RecomputationPlan(layers, layers, 1, products=True)
        case "every_block" | "memory_budget":
            return _into(layers, kept or layers, at_once=True)


def _into(layers: int, segments: int, *, at_once: bool) -> RecomputationPlan:
    segments = min(segments, layers)
    return RecomputationPlan(layers, segments, -(-layers // segments), at_once)
