"""The global gradient norm, the same bits for every stage and world size.

[Note: exact norm]
Partial sums of squares are taken over fixed blocks of 256 elements, which no shard boundary cuts. They are rounded to
multiples of one power of two, chosen from the largest block so that the sum of all blocks is exact in fp64. An exact
sum does not depend on its order, hence not on how blocks are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.unit_layout import SHARD_ALIGN
from ..mesh.collectives import Collectives

_FP64_DIGITS = 53


def global_norm(ranges: Sequence[Tensor], collectives: Collectives | None, *, total_numel: int) -> Tensor:
    """L2 norm over all owned ranges of all ranks, see [Note: exact norm].

    Args:
        ranges: fp32, flat, this rank's accumulated gradients; lengths are multiples of 256 elements.
        collectives: the axis the ranges are spread over; None where this rank holds all of them. Two all-reduces of
            one number each.
        total_numel: elements over all ranks, which fixes the rounding; the same on every rank.

    Returns:
        fp64 scalar on the ranges' device; inf or nan where a gradient is.
    """
    blocks = torch.cat([r.view(-1, SHARD_ALIGN).square().sum(dim=1) for r in ranges]).double()
    largest = blocks.max().reshape(1)
    if collectives is not None:
        collectives.all_reduce(largest, op="max", of="gradient norm").wait()
    count = max(1, total_numel // SHARD_ALIGN)
    _, exponent = torch.frexp(largest)
    # Every block is below 2^exponent, the sum below count * 2^exponent: leave room for it in 53 digits.
    shift = _FP64_DIGITS - 1 - count.bit_length() - exponent
    total = torch.ldexp(torch.round(torch.ldexp(blocks, shift)), -shift).sum().reshape(1)
    if collectives is not None:
        collectives.all_reduce(total, of="gradient norm").wait()
    # frexp of inf or nan gives no useful exponent; the norm is then what the largest block is.
    return torch.where(torch.isfinite(largest), total, largest).sqrt().squeeze(0)


def clip(ranges: Sequence[Tensor], norm: float, *, limit: float) -> None:
    """Scales gradients in place so that their norm is at most `limit`; torch's formula, norm + 1e-6 below.

    Args:
        ranges: fp32, this rank's accumulated gradients.
        norm: the global norm.
        limit: `gradient_clipping`; 0 turns clipping off.
    """
    if limit <= 0:
        return
    coefficient = limit / (norm + 1e-6)
    if coefficient < 1:
        for owned in ranges:
            owned.mul_(coefficient)
