"""Optimizer states in 8 bits: blocks of 256 elements, each with its largest absolute value and a code an element.

The codes are bitsandbytes' dynamic ones: the nearer to zero, the finer, over seven decades. A signed value that is not
zero never changes its sign, and never becomes zero if it is negative.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), section 2; the table as in
bitsandbytes.functional.create_dynamic_map.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements of a block; shards are cut at multiples of it.
BLOCK = 256
_DECADES = 7


@dataclass(frozen=True, slots=True)
class CodeTable:
    """What a code means, and how to find it.

    Attributes:
        values: fp32 [256], ascending, from -1 or 0 to 1.
        upper: fp32 [256], the bound between a code and the next one; inf for the last.
        lowest: uint8 [65536], the code of the least value with the upper 16 bits of an fp32 number, in the order of
            those bits as a signed number. No such range of values has more than one bound in it.
        zero: code of 0.
    """

    values: Tensor
    upper: Tensor
    lowest: Tensor
    zero: int

    def decode(self, codes_BN: Tensor, scales_B: Tensor) -> Tensor:
        """Returns fp32 values, [B, 256], of uint8 codes of the same shape.

        Args:
            codes_BN: whole blocks.
            scales_B: fp32, the largest absolute value of each block.
        """
        values = self.values.index_select(0, codes_BN.view(-1).int()).view(codes_BN.shape)
        return values.mul_(scales_B.unsqueeze(1))

    def encode(self, values_BN: Tensor, codes_BN: Tensor, scales_B: Tensor) -> None:
        """Writes codes and scales of whole blocks.

        Args:
            values_BN: fp32, [B, 256]; overwritten.
            codes_BN: uint8, [B, 256].
            scales_B: fp32, [B].
        """
        largest = torch.amax(values_BN.abs(), dim=1, out=scales_B)
        # A block of zeros keeps zeros.
        relative = values_BN.div_(torch.where(largest > 0, largest, 1.0).unsqueeze(1)).view(-1)
        upper_bits = (relative.view(torch.int32) >> 16).add_(1 << 15)
        codes = self.lowest.index_select(0, upper_bits)
        codes.add_(relative >= self.upper.index_select(0, codes.int()))
        codes_BN.copy_(codes.view(codes_BN.shape))


def dynamic_table(*, signed: bool, device: torch.device) -> CodeTable:
    """Returns bitsandbytes' dynamic codes.

    Args:
        signed: whether the codes are for values of both signs; if not, for values that are never negative, twice as
            fine.
        device: device on which the table is used.
    """
    values = dynamic_values(signed=signed)
    upper = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])
    zero = int((values == 0).nonzero().item())
    if signed:
        upper[zero - 1] = 0.0  # whatever is negative stays so
    bits = (torch.arange(1 << 16, dtype=torch.int32) - (1 << 15)) << 16
    # Among numbers with the same upper bits the least has the lower bits 0 if positive, and 1 if negative.
    least = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32)
    lowest = torch.bucketize(least.nan_to_num(0.0), upper[:-1], right=True).to(torch.uint8)
    return CodeTable(values.to(device), upper.to(device), lowest.to(device), zero)


def dynamic_values(*, signed: bool) -> Tensor:
    """Returns the 256 values, ascending: in each decade twice as many as in the one below it, evenly spread."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade if signed else decade + 1)
        bounds = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        means = 10.0 ** (decade - _DECADES + 1) * (bounds[:-1] + bounds[1:]) / 2
        values += means.tolist()
        if signed:
            values += (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)
