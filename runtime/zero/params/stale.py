"""Marks with NaN what lies in a slot and has no present values. Knows places and parts; gathers nothing.

[Note: stale values]
After a step the slots hold values from before it, of whichever units came last. `p.norm()` of every parameter then
gives a wrong number that looks right. So the first element of each parameter is made NaN, once a step: what is reduced
over a parameter shows. A gather overwrites the mark with the rest. Frozen parameters that stay valid in a slot over
the step are not touched, nor whatever else begins inside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..units.unit import ParamUnit


class StaleMarks:
    """The marks of one slot.

    Args:
        slot_N: the whole slot, flat.
        parts: units that are ever gathered into the slot, bound to it already.
    """

    def __init__(self, slot_N: Tensor, parts: Sequence[ParamUnit]) -> None:
        self._slot = slot_N
        self._parts = parts
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def put(self, valid: Sequence[ParamUnit]) -> None:
        """Marks each parameter, see [Note: stale values]; one kernel, and nothing on the host after the first time.

        Args:
            valid: parts whose values in the slot are present and stay as they are.
        """
        key = tuple(part.index for part in valid)
        positions = self._positions.get(key)
        if positions is None:
            positions = self._positions[key] = self._first_elements(valid)
        self._slot.index_fill_(0, positions, float("nan"))

    def _first_elements(self, valid: Sequence[ParamUnit]) -> Tensor:
        kept = [(self._start(part), self._start(part) + part.layout.padded_numel) for part in valid]
        firsts = {
            self._start(part) + extent.offset for part in self._parts for extent in part.layout.extents if extent.numel
        }
        marked = [first for first in sorted(firsts) if not any(start <= first < stop for start, stop in kept)]
        return torch.tensor(marked, dtype=torch.int64, device=self._slot.device)

    def _start(self, part: ParamUnit) -> int:
        return int(part.flat_param.storage_offset() - self._slot.storage_offset())
