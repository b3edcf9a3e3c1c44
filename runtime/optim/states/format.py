"""Formats that an optimizer's elementwise states lie in where it steps in host memory: which tensors, how many bytes.

An update is computed in fp32 whatever the format; how codes are made of values is `coded.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..structure.codes import BLOCK

FormatName = Literal["fp32", "bf16", "int8"]

#: Runs of a range may share a block of elements, and each has a scale of its own for its part: so many of them do.
_SHARED_SCALES = 64
#: Elements that places are multiples of, as memory is handed out.
_PLACE_NUMEL = 256
CODES, SCALES = "_codes", "_scales"


@dataclass(frozen=True, slots=True)
class FormatPart:
    """One tensor of a state.

    Attributes:
        suffix: suffix of the tensor's name, after the name of the state.
        dtype: dtype of the tensor's elements.
    """

    suffix: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How states lie.

    Attributes:
        name: name of the format in the config.
        parts: tensors of one state: the values, or codes and scales.
    """

    name: FormatName
    parts: tuple[FormatPart, ...]

    @property
    def is_coded(self) -> bool:
        """Whether a state is codes and scales."""
        return len(self.parts) > 1

    def part_of(self, name: str) -> tuple[str, int]:
        """Returns a state's name and the number of its part, for the name of a tensor."""
        for number, part in enumerate(self.parts):
            if part.suffix and name.endswith(part.suffix):
                return name.removesuffix(part.suffix), number
        return name, 0

    def place_numel(self, part: int, numel: int) -> int:
        """Returns the elements of memory for a part of one state of a range of `numel` elements."""
        if self.parts[part].suffix != SCALES:
            return numel
        return -(-(numel // BLOCK + _SHARED_SCALES) // _PLACE_NUMEL) * _PLACE_NUMEL

    def place_bytes(self, numel: int) -> int:
        """Returns the bytes of memory for one state of a range of `numel` elements."""
        return sum(self.place_numel(i, numel) * part.dtype.itemsize for i, part in enumerate(self.parts))


FP32_STATES = StateFormat("fp32", (FormatPart("", torch.float32),))
BF16_STATES = StateFormat("bf16", (FormatPart("", torch.bfloat16),))
INT8_STATES = StateFormat("int8", (FormatPart(CODES, torch.uint8), FormatPart(SCALES, torch.float32)))

STATE_FORMATS = {form.name: form for form in (FP32_STATES, BF16_STATES, INT8_STATES)}
