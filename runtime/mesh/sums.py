"""Sums over ranks that have the same bits everywhere: terms in rank order, in fp32 for 16-bit formats, rounded once.

Also how flat buffers are cut for it. Moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements added up at once in fp32 where there are more than two terms: the sum stays in the cache.
_SUM_NUMEL = 1 << 16
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def reduce_in_order(terms: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduces terms in their order.

    Args:
        terms: at least one; flat, of one length and dtype.
        out: as long as a term, and of its dtype; overwritten. It may be one of the terms.
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


def cut_pieces(start: int, end: int, *, numel: int) -> list[tuple[int, int]]:
    """Cuts the span from `start` to `end` into pieces of at most `numel` elements."""
    return [(at, min(at + numel, end)) for at in range(start, end, numel)]


def cut_spans(numel: int, size: int) -> list[tuple[int, int]]:
    """Cuts a buffer of any length into `size` spans, almost equal, at multiples of 16 elements."""
    step = -(-numel // (16 * size)) * 16
    return [(min(rank * step, numel), min((rank + 1) * step, numel)) for rank in range(size)]
