"""A state of one value an element, kept as 8-bit codes with a scale for each block of 256 elements of the flat buffer.

The codes are those of the 8-bit optimizers (`optim/structure/codes.py`). Blocks are the flat buffer's, which no rank's
slice cuts, so bits are the same for every number of ranks; where a run of elements begins inside of a block, it has a
scale of its own for its part. Who steps such states, and where they lie, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...protocols import StateEntry
from ..algorithms.eight_bit import scales_entry
from ..structure.base import TensorInfo, elementwise_entries, first_names
from ..structure.codes import BLOCK, CodeTable, dynamic_table
from ..structure.runs import Run
from .format import CODES, SCALES, StateFormat

#: States that are never negative: their codes are twice as fine.
_NEVER_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq"})


@dataclass(frozen=True, slots=True)
class CodedState:
    """Codes and scales of one state of a run.

    Attributes:
        codes_N: uint8, [N].
        scales_B: fp32, one a block that the run has elements in.
        head: elements of the first block that lie before the run.
        table: table that gives the meaning of each code.
    """

    codes_N: Tensor
    scales_B: Tensor
    head: int
    table: CodeTable

    def clear(self) -> CodedState:
        """Sets all values to zero."""
        self.codes_N.fill_(self.table.zero)
        self.scales_B.zero_()
        return self

    def decode(self, start: int, stop: int) -> Tensor:
        """Returns values [start, stop) in fp32, a copy.

        Args:
            start: first element to decode: the start of a block or of the run.
            stop: one past the last element to decode: the end of a block or of the run.
        """
        before, blocks = self._blocks(start, stop)
        codes_BN = self._whole(self.codes_N[start:stop], before, fill=self.table.zero)
        values = self.table.decode(codes_BN, self.scales_B[blocks]).view(-1)
        return values[before : before + stop - start]

    def encode(self, start: int, values: Tensor) -> None:
        """Writes values from `start` on.

        Args:
            start: first element to write: the start of a block or of the run, as for `decode`.
            values: fp32; overwritten.
        """
        stop = start + values.numel()
        before, blocks = self._blocks(start, stop)
        values_BN = self._whole(values, before, fill=0.0)
        codes = self.codes_N[start:stop]
        whole = values_BN.numel() == codes.numel()
        codes_BN = codes.view(-1, BLOCK) if whole else torch.empty(values_BN.shape, dtype=torch.uint8)
        self.table.encode(values_BN, codes_BN, self.scales_B[blocks])
        if not whole:
            codes.copy_(codes_BN.view(-1)[before : before + codes.numel()])

    def _blocks(self, start: int, stop: int) -> tuple[int, slice]:
        """Returns the elements before `start` in its block, and which blocks [start, stop) lies in."""
        before = (self.head + start) % BLOCK
        assert not before or start == 0, "a block is coded whole"
        return before, slice((self.head + start) // BLOCK, -(-(self.head + stop) // BLOCK))

    @staticmethod
    def _whole(values: Tensor, before: int, *, fill: float) -> Tensor:
        """Returns values as whole blocks, [B, 256]: a view where they are, else a copy with `fill` around them."""
        numel = -(-(before + values.numel()) // BLOCK) * BLOCK
        if numel == values.numel():
            return values.view(-1, BLOCK)
        whole = torch.full((numel,), fill, dtype=values.dtype)
        whole[before : before + values.numel()] = values
        return whole.view(-1, BLOCK)


def coded(name: str, codes_N: Tensor, scales_B: Tensor, *, head: int) -> CodedState:
    """Returns a state of that name, see `CodedState`."""
    return CodedState(codes_N, scales_B, head, _table(name not in _NEVER_NEGATIVE))


def scale_count(head: int, numel: int) -> int:
    """Returns how many blocks a run of `numel` elements has elements in."""
    return -(-(head + numel) // BLOCK)


def head_of(run: Run) -> int:
    """Returns the elements of a run's first block that lie before it."""
    return run.start % BLOCK


def coded_entries(run: Run, name: str, state: CodedState) -> Iterator[StateEntry]:
    """Yields a state's pieces as a checkpoint takes them: codes by element, and the scales of a tensor's blocks."""
    yield from elementwise_entries(run, name + CODES, state.codes_N)
    for piece in run.pieces():
        yield scales_entry(run, piece, name + SCALES, state.scales_B)


def cut_tensors(tensors: Iterable[TensorInfo]) -> list[str]:
    """Returns the names of tensors that are cut over ranks: the blocks of a part are not those of the whole tensor."""
    return [info.name for info in tensors if info.whole.is_cut]


def check_coded_parts(form: StateFormat, tensors: Iterable[TensorInfo]) -> None:
    """Refuses states in codes of tensors that are cut over ranks.

    Raises:
        ModelError: naming the first of them.
    """
    names = cut_tensors(tensors) if form.is_coded else []
    if names:
        raise ModelError(
            f"optimizer: states in {form.name} (`zero_optimization.offload_optimizer.state_format`) are coded by "
            f"blocks of whole tensors, and ranks have parts of {first_names(names)}",
            hint="set `state_format` to bf16 or leave it out",
        )


@cache
def _table(signed: bool) -> CodeTable:
    return dynamic_table(signed=signed, device=torch.device("cpu"))
