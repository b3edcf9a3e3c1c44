"""Sums over ranks that have the same bits everywhere: terms in rank order, in fp32 for 16-bit formats, rounded once.

Also how a sum is added to what was summed before, and how flat buffers are cut. Moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements added up at once in fp32 where there are more than two terms: the sum stays in the cache.
_SUM_NUMEL = 1 << 16
#: Elements that are added to a wider sum at once on a CPU: their copy in its dtype takes 1 MiB in fp32.
_ADD_NUMEL = 1 << 18
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def reduce_in_order(terms: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduces terms in their order.

    Args:
        terms: tensors to reduce, at least one; flat, of one length and dtype.
        out: result tensor, as long as a term and of its dtype; overwritten. It may be one of the terms.
        op: `sum` or `max`.
    """
    if len(terms) == 1:
        if out.data_ptr() != terms[0].data_ptr():
            out.copy_(terms[0])
    elif len(terms) == 2:
        # torch adds 16-bit numbers in fp32 and rounds once, as below.
        (torch.maximum if op == "max" else torch.add)(terms[0], terms[1], out=out)
    elif op == "max":
        out.copy_(torch.stack(list(terms)).amax(0))
    else:
        wide = _WIDE.get(out.dtype, out.dtype)
        for start in range(0, out.numel(), _SUM_NUMEL):
            end = min(start + _SUM_NUMEL, out.numel())
            total = terms[0][start:end].to(wide, copy=True)
            for term in terms[1:]:
                total.add_(term[start:end])
            out[start:end].copy_(total)


def add_scaled(total_N: Tensor, addend_N: Tensor, factor: float) -> None:
    """Adds `factor * addend_N` to `total_N`, computed in the wider dtype of both and rounded once.

    On a CPU torch copies an addend of another dtype as a whole first; piece by piece its copy stays in the cache.
    """
    if addend_N.dtype == total_N.dtype or total_N.device.type != "cpu" or total_N.numel() <= _ADD_NUMEL:
        total_N.add_(addend_N, alpha=factor)
        return
    for total, addend in zip(total_N.split(_ADD_NUMEL), addend_N.split(_ADD_NUMEL), strict=True):
        total.add_(addend, alpha=factor)


def set_scaled(total_N: Tensor, addend_N: Tensor, factor: float) -> None:
    """Sets `total_N` to `factor * addend_N`, computed in the wider dtype of both: a sum that begins.

    Zeroing the sum and adding to it would write and read it once more. Piece by piece on a CPU, as in `add_scaled`.
    """
    if addend_N.dtype == total_N.dtype or total_N.device.type != "cpu" or total_N.numel() <= _ADD_NUMEL:
        _set_scaled(total_N, addend_N, factor)
        return
    for total, addend in zip(total_N.split(_ADD_NUMEL), addend_N.split(_ADD_NUMEL), strict=True):
        _set_scaled(total, addend, factor)


def _set_scaled(total_N: Tensor, addend_N: Tensor, factor: float) -> None:
    if factor == 1:
        total_N.copy_(addend_N)
    elif total_N.dtype == addend_N.dtype or total_N.dtype.itemsize < addend_N.dtype.itemsize:
        torch.mul(addend_N, factor, out=total_N)  # rounded once
    else:
        total_N.copy_(addend_N).mul_(factor)


def cut_pieces(start: int, end: int, *, numel: int) -> list[tuple[int, int]]:
    """Cuts the span from `start` to `end` into pieces of at most `numel` elements."""
    return [(at, min(at + numel, end)) for at in range(start, end, numel)]


def cut_spans(numel: int, size: int) -> list[tuple[int, int]]:
    """Cuts a buffer of any length into `size` spans, almost equal, at multiples of 16 elements."""
    step = -(-numel // (16 * size)) * 16
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(size)]
