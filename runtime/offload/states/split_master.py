"""An fp32 master in two halves, one of which is the bf16 parameter: 4 bytes for both in place of 6.

[Note: split master]
The parameter is the master rounded to the nearest bf16 value, ties to even, as everywhere else. The low half is how
far, in units of the master's last place, the master lies from it: -32768 to 32768, one value more than 16 bits hold. So
the largest is kept as the least, and where that has happened (one element in 131072) is kept beside: joined, the master
has every bit it had. NaN stays NaN, of whatever payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .scratch import Scratch

#: How far a tie that is rounded down to even lies above the parameter.
_TIE = 1 << 15


def _no_ties() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class SplitMaster:
    """A master in two halves; see [Note: split master].

    Attributes:
        high_N: bf16, [N]: the parameter.
        low_N: int16, [N].
        ties: int64, ascending: elements whose distance is 32768, and is kept as -32768.
    """

    high_N: Tensor
    low_N: Tensor
    ties: Tensor = field(default_factory=_no_ties)
    _found: list[Tensor] = field(default_factory=list[Tensor])

    def numel(self) -> int:
        """Elements of the master."""
        return self.high_N.numel()

    def join(self, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Returns the masters of [start, stop) in fp32, in scratch memory.

        Args:
            start: first element.
            stop: one past the last.
            scratch: scratch memory in which the masters are put together.
        """
        master = scratch.take("master", stop - start)
        bits, low = master.view(torch.int32), scratch.take("low half", stop - start, torch.int32)
        bits.copy_(self.high_N[start:stop].view(torch.int16)).bitwise_left_shift_(16)
        bits.add_(low.copy_(self.low_N[start:stop]))
        if self.ties.numel():
            here = self.ties[(self.ties >= start) & (self.ties < stop)]
            bits[here - start] += 2 * _TIE
        return master

    def split(self, start: int, master: Tensor, scratch: Scratch) -> None:
        """Writes both halves of the masters from `start` on; joined again only behind `settle`.

        Args:
            start: first element.
            master: fp32; left as it is.
            scratch: scratch memory for the distance of the halves.
        """
        stop = start + master.numel()
        high = self.high_N[start:stop].copy_(master)
        low = scratch.take("low half", master.numel(), torch.int32)
        low.copy_(high.view(torch.int16)).bitwise_left_shift_(16)
        torch.sub(master.view(torch.int32), low, out=low)
        self.low_N[start:stop].copy_(low)
        if master.numel() and int(low.max()) >= _TIE:
            self._found.append((low == _TIE).nonzero().view(-1) + start)

    def settle(self) -> None:
        """Ends a round of `split` over all elements: ties are those that it has found."""
        self.ties = torch.cat(self._found).sort().values if self._found else _no_ties()
        self._found.clear()


def split_master(master_N: Tensor, empty: Callable[[torch.dtype], Tensor] | None = None) -> SplitMaster:
    """Returns a master in two halves.

    Args:
        master_N: fp32, [N]; left as it is.
        empty: function that makes a buffer, [N], of a given dtype; None for torch's own memory.
    """
    high, low = (
        torch.empty_like(master_N, dtype=dtype) if empty is None else empty(dtype)
        for dtype in (torch.bfloat16, torch.int16)
    )
    halves = SplitMaster(high, low)
    halves.split(0, master_N, Scratch())
    halves.settle()
    return halves


def join_master(halves: SplitMaster) -> Tensor:
    """Returns the master in fp32, [N]."""
    return halves.join(0, halves.numel(), Scratch())
