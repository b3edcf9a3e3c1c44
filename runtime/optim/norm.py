"""The global gradient norm, the same bits for every stage and world size, and the one host read of a step.

[Note: exact norm]
Partial sums of squares are taken over fixed blocks of 256 elements, which no shard boundary cuts. They are rounded to
multiples of one power of two, chosen from the largest block so that the sum of all blocks is exact in fp64. An exact
sum does not depend on its order, hence not on how blocks are spread over ranks.

[Note: rows of one shape]
A block's own sum must have the same bits wherever it is computed. torch's kernel for CUDA adds up a row in an order
that depends on two things beside the row: whether there are 16 rows or more (fewer rows get more threads each), and
whether the row begins at a multiple of the widest load. So it is never given fewer than 16 rows, and ranges begin where
`Arena` puts them. Huge inputs are split between rows, never inside of one. The kernel for the CPU takes row after row.
Source: `setReduceConfig` and `input_vectorized_thread_reduce_impl` in torch's ATen/native/cuda/Reduce.cuh, 2.13, 2.14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout.unit_layout import SHARD_ALIGN
from ..mesh.collectives import Collectives

_FP64_DIGITS = 53
_FP64_STORED_DIGITS = 52
#: The bits of an fp64 number that hold its exponent.
_FP64_EXPONENT = 2047 << _FP64_STORED_DIGITS
#: See [Note: rows of one shape].
_FEWEST_ROWS = 16
#: Marks below this have squares whose sum over thousands of ranks is exact in fp64; a prime.
_MARKS = 1048573
_ROW_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Totals:
    """What one host read tells of a step.

    Attributes:
        norm: L2 norm over all owned ranges of all ranks; inf or nan where a gradient is.
        differing: pipeline stages whose ranks do not have one mark; without stages 0 stands for all ranks.
        sums: the extra numbers, each summed over the ranks.
    """

    norm: float
    differing: tuple[int, ...]
    sums: list[float]


def block_norms(grads_N: Tensor) -> Tensor:
    """Returns the L2 norm of each block of 256 elements: fp32, [N / 256]; the same bits for every N.

    Writes nothing of the gradients' size on CUDA. See [Note: rows of one shape].

    Args:
        grads_N: fp32, bf16 or fp16, flat, N a multiple of 256; on CUDA beginning at a multiple of 64 bytes.
    """
    aligned = not grads_N.is_cuda or grads_N.data_ptr() % _ROW_ALIGN_BYTES == 0
    assert aligned, f"gradients begin at {grads_N.data_ptr():#x}, no multiple of {_ROW_ALIGN_BYTES} bytes"
    rows = grads_N.view(-1, SHARD_ALIGN)
    count = len(rows)
    if count < _FEWEST_ROWS:
        rows = torch.cat([rows, rows.new_zeros(_FEWEST_ROWS - count, SHARD_ALIGN)])
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)[:count]


def global_totals(
    norms: Sequence[Tensor],
    collectives: Collectives,
    *,
    spread: bool,
    total_numel: int,
    mark: int,
    extra_N: Tensor,
    more: Sequence[Tensor] = (),
    stage: tuple[int, int] = (0, 1),
) -> Totals:
    """The norm, see [Note: exact norm], and what else ranks have to tell each other once a step.

    Two all-reduces: of 1 + 2 numbers a pipeline stage, and of 1 + N and more. Where every rank holds all gradients, the
    first is not needed: marks are the same where their squares add up to the square of their sum, divided by the ranks.
    Reads from the device once, after both, and writes to it without waiting.

    Args:
        norms: `block_norms` of this rank's accumulated gradients, in one tensor or several; their order does not count.
        collectives: all ranks of the job.
        spread: the ranges are spread over the ranks, and each element is in one; False: every rank holds all of them.
        total_numel: elements over all ranks, which fixes the rounding; the same on every rank.
        mark: number that should be the same on every rank of a pipeline stage; less than 2^53.
        extra_N: fp64, [N], on the norms' device; to be summed over the ranks. Left as it is.
        more: further numbers to sum over the ranks, fp64, on the norms' device; they count as the end of `extra_N`.
        stage: this rank's pipeline stage, and the number of stages; with several, `spread` is True.
    """
    # A block's square fits fp64. A stage may have nothing that trains.
    found = norms[0] if len(norms) == 1 else torch.cat(list(norms) or [extra_N.new_zeros(1)])
    blocks = found.double().square_()
    # Filled and not copied from the host: a copy would wait for all that the device has to do.
    own, stages = stage
    extremes = torch.full((1 + 2 * stages,), -math.inf, dtype=torch.float64, device=blocks.device)
    extremes[1 + 2 * own].fill_(float(mark))
    extremes[2 + 2 * own].fill_(-float(mark))
    largest = torch.amax(blocks, dim=0, keepdim=True, out=extremes[:1])
    if spread:
        collectives.all_reduce(extremes, op="max", label="gradient norm").wait()
    count = max(1, total_numel // SHARD_ALIGN)
    # Every block is below 2^(exponent of the largest + 1), the sum below count times that: leave room for it in 53
    # digits. The unit is made of the largest block's bits, hence exact on every device; see `power_of_two`.
    digits = _FP64_DIGITS - 2 - count.bit_length()
    unit = ((largest.view(torch.int64) & _FP64_EXPONENT) - (digits << _FP64_STORED_DIGITS)).view(torch.float64)
    total = blocks.div_(unit).round_().sum(dim=0, keepdim=True)
    if spread:
        sums = torch.cat([total, extra_N, *more])
        collectives.all_reduce(sums, label="gradient norm and mean loss").wait()
    else:
        marks = torch.full((2,), float(mark % _MARKS), dtype=torch.float64, device=blocks.device)
        marks[1:].square_()
        extra_N = torch.cat([extra_N, *more, marks])
        collectives.all_reduce(extra_N, label="mean loss").wait()
        sums = torch.cat([total, extra_N])
    results = torch.cat([extremes, (sums[:1] * unit).sqrt_(), sums[1:]])
    with collectives.reading("gradient norm and mean loss"):
        read = results.tolist()
    # Of 0, inf or nan the unit is of no use; the norm is then what the largest block is.
    at = 1 + 2 * stages
    norm = read[at] if 0 < read[0] < math.inf else read[0]
    if spread:
        differing = tuple(number for number in range(stages) if read[1 + 2 * number] != -read[2 + 2 * number])
        return Totals(norm, differing, read[at + 1 :])
    *rest, marked, squares = read[at + 1 :]
    differ = collectives.size * int(squares) != int(marked) ** 2
    return Totals(norm, (0,) if differ else (), rest)


def clip_factor(norm: float, *, limit: float, loss_scale: float = 1.0) -> float:
    """Returns by what gradients are to be multiplied so that their norm is at most `limit`.

    torch's formula: norm + 1e-6 below. 1 where the norm is nan.

    Args:
        norm: the global norm without the loss scale.
        limit: `gradient_clipping`; 0 turns clipping off.
        loss_scale: loss scale that the gradients are multiplied by; the returned factor also removes it.
    """
    coefficient = limit / (norm + 1e-6) if limit > 0 else 1.0
    return (coefficient if coefficient < 1 else 1.0) / loss_scale
