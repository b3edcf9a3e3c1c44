"""Sums of terms that are spread over ranks, the same bits for every order and every way to spread them.

[Note: exact sums]
As in the gradient norm (decision 5): every term is rounded to a multiple of one power of two, chosen from the largest
term of its sum and the number of terms so that the sum is exact in fp64. An exact sum has no order. Each sum of a
vector has a power of two of its own, so small sums are as precise as large ones: 2^-52 times the number of terms,
relative to the largest term.

    largest = zeros(K); for what this rank holds: keep_largest(...)   local
    scales  = agree(largest, counts, ranks)                           `TermRanks.all_reduce`
    totals  = zeros(K); for what this rank holds: add rounded(terms)  local
    totals  = finish(totals, largest, scales, ranks)                  `TermRanks.all_reduce`

Terms that are sums themselves (of 64 squares, say) must come out the same wherever they are computed: they are taken
over cells of the layout that no cut divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout.unit_layout import TENSOR_ALIGN
from ...mesh.collectives import Collectives

_FP64_DIGITS = 53
_FP64_STORED_DIGITS = 52
_FP64_BIAS = 1023
_EXPONENT_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class TermRanks:
    """Ranks that the terms of K sums are spread over.

    Attributes:
        axis: ranks that all of the sums have terms on.
        further: ranks of other pipeline stages that some sums have terms on besides, with the positions of these sums;
            in one order on all ranks.
    """

    axis: Collectives
    further: Sequence[tuple[Collectives, Tensor]] = ()

    def all_reduce(self, values_K: Tensor, *, op: str = "sum", label: str) -> None:
        """Reduces in place over all of these ranks: one all-reduce of K numbers, and one more for each of `further`."""
        self.axis.all_reduce(values_K, op=op, label=label).wait()
        for stages, places in self.further:
            part = values_K[places]
            stages.all_reduce(part, op=op, label=label).wait()
            values_K[places] = part


def power_of_two(exponents: Tensor) -> Tensor:
    """Returns 2 to the power of each exponent: fp64, exact on every device, for it is made of its bits.

    `torch.ldexp` is a product with `pow(2, n)` on some devices and in some versions, and nobody promises that CUDA's
    `pow` is exact there. An exact sum must not rest on it.

    Args:
        exponents: whole numbers. What lies outside of [-1022, 1023], fp64's normal numbers, counts as the nearest end.
    """
    bounded = exponents.long().clamp(1 - _FP64_BIAS, _FP64_BIAS)
    return ((bounded + _FP64_BIAS) << _FP64_STORED_DIGITS).view(torch.float64)


def agree(largest_K: Tensor, counts_K: Tensor, ranks: TermRanks | None, *, label: str) -> Tensor:
    """Returns, for each of K sums, the power of two that terms are multiplied by before they are rounded.

    Args:
        largest_K: fp64, the largest term of each sum on this rank, 0 where it has none; afterwards that of all ranks.
        counts_K: number of terms of each sum over all ranks.
        ranks: ranks that the terms are spread over; None where this rank has all terms.
        label: name of the sums, for monitoring of the collective.
    """
    if ranks is not None:
        ranks.all_reduce(largest_K, op="max", label=label)
    finite = torch.where(torch.isfinite(largest_K), largest_K, torch.zeros_like(largest_K))
    exponents = torch.frexp(finite)[1]
    # Every term is below 2^exponent, their sum below count * 2^exponent: leave room for it in 53 digits.
    digits = torch.frexp(counts_K.double())[1]
    shifts = (_FP64_DIGITS - 1 - digits - exponents).clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    return power_of_two(shifts)


def rounded(terms: Tensor, scales: Tensor) -> Tensor:
    """Returns `terms` in fp64 as whole multiples of 1 / `scales`, still multiplied; their sums are exact."""
    return (terms.double() * scales).round_()


def finish(totals_K: Tensor, largest_K: Tensor, scales_K: Tensor, ranks: TermRanks | None, *, label: str) -> Tensor:
    """Returns the K sums over all ranks, fp64; inf or nan where a term is.

    Args:
        totals_K: fp64, this rank's sums of what `rounded` returned; overwritten.
        largest_K: largest term of each sum over all ranks, as `agree` left it.
        scales_K: power of two for each sum, as `agree` returned it.
        ranks: ranks as for `agree`.
        label: name of the sums, for monitoring of the collective.
    """
    if ranks is not None:
        ranks.all_reduce(totals_K, label=label)
    return torch.where(torch.isfinite(largest_K), totals_K / scales_K, largest_K)


def cell_squares(values_N: Tensor, width: int = TENSOR_ALIGN) -> Tensor:
    """Returns the sum of squares of each `width` elements, fp32 [ceil(N / width)].

    Halves are added, then halves of these: the same bits for every number of cells, which kernels that reduce do not
    promise. torch's on the CPU has them for rows of 64, at a fifth of the time (a test would see otherwise).

    Args:
        values_N: fp32, flat, from a multiple of 64 of a flat buffer on. Tensors stand at multiples of 64 and gaps hold
            zeros, so no cell has elements of two tensors, and no cut of a shard divides one.
        width: a power of two up to 64.
    """
    rest = -values_N.numel() % width
    if rest:
        values_N = torch.cat([values_N, values_N.new_zeros(rest)])
    cells = values_N.square().view(-1, width)
    if width == TENSOR_ALIGN and cells.device.type == "cpu":
        return cells.sum(dim=1)
    while cells.shape[1] > 1:
        half = cells.shape[1] // 2
        cells = cells[:, :half] + cells[:, half:]
    return cells.view(-1)
