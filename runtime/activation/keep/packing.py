"""Keeps floating-point tensors in 8 bits, with a scale for each block of elements. The only keeper that is not exact.

[Note: the error of packing]
A block of 128 elements with the largest magnitude m is stored as round(x / s), s = m / 127, in int8, and s in fp32:
1 + 4/128 bytes an element. Rounding is to nearest, so |x - x'| <= s / 2 = m / 254, plus what rounding of s, of the two
products and of x' to its dtype adds: at most 4 * 2**-24 * m in fp32, and 2**-8 * m more where x' is bf16. Zero stays
zero, and the largest element of a block keeps its sign. A block with an infinity or NaN comes back as NaN: a step that
went wrong is seen.
Source: block-wise quantisation as in Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flat import Form, as_line
from .keeper import Keeper, Ticket

#: Elements that share a scale.
BLOCK = 128
_LEVELS = 127
#: Tensors of fewer elements, or with shorter rows, are kept as they are: statistics of norms, masks, what costs little.
SMALLEST = 8 * BLOCK
SHORTEST_ROW = 32


def packed_bytes(numel: int) -> int:
    """Returns the bytes that so many elements take when packed."""
    blocks = -(-numel // BLOCK)
    return numel + blocks * 4


def pack(line_N: Tensor) -> tuple[Tensor, Tensor]:
    """Packs a line of elements, see [Note: the error of packing].

    Args:
        line_N: floating point, shape [N].

    Returns:
        int8, shape [N], and fp32 scales, shape [ceil(N / 128)].
    """
    whole = line_N.numel() // BLOCK * BLOCK
    body, tail = line_N[:whole].view(-1, BLOCK).float(), line_N[whole:].float()
    values = torch.empty(line_N.numel(), dtype=torch.int8, device=line_N.device)
    scales = torch.empty(-(-line_N.numel() // BLOCK), dtype=torch.float32, device=line_N.device)
    scales[: body.shape[0]] = body.abs().amax(dim=1) / _LEVELS if body.numel() else 0.0
    values[:whole].view(-1, BLOCK).copy_(_levels(body, scales[: body.shape[0]].unsqueeze(1)))
    if tail.numel():
        scales[-1] = tail.abs().amax() / _LEVELS
        values[whole:].copy_(_levels(tail, scales[-1:]))
    return values, scales


def unpack(values_N: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the line again, in `dtype`; arguments as `pack` returned them."""
    whole = values_N.numel() // BLOCK * BLOCK
    line_N = torch.empty(values_N.numel(), dtype=dtype, device=values_N.device)
    body = values_N[:whole].view(-1, BLOCK)
    line_N[:whole].view(-1, BLOCK).copy_(body * scales[: body.shape[0]].unsqueeze(1))
    if values_N.numel() > whole:
        line_N[whole:].copy_(values_N[whole:] * scales[-1:])
    return line_N


class PackingKeeper:
    """A keeper, see keeper.[Note: keepers].

    Args:
        inner: keeper of the packed values and their scales.
    """

    def __init__(self, inner: Keeper) -> None:
        self._inner = inner

    @property
    def device_bytes(self) -> int:
        """See `Keeper`."""
        return self._inner.device_bytes

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`; what is small or no floating-point number is kept unpacked."""
        if not tensor.is_floating_point() or tensor.numel() < SMALLEST or tensor.shape[-1] < SHORTEST_ROW:
            return self._inner.put(tensor, label=label)
        line_N, form = as_line(tensor)
        values, scales = pack(line_N)
        return _PackedTicket(self._inner.put(values, label=label), self._inner.put(scales, label=label), form)


class _PackedTicket:
    def __init__(self, values: Ticket, scales: Ticket, form: Form) -> None:
        self._values = values
        self._scales = scales
        self._form = form

    def take(self) -> Tensor:
        # Later put, first taken: a ring brings them back in that order.
        scales = self._scales.take()
        return self._form.of(unpack(self._values.take(), scales, self._form.dtype))


def _levels(block: Tensor, scale: Tensor) -> Tensor:
    """Returns the nearest levels; those of a block of zeros are zero, and any of one whose scale is not finite."""
    levels = torch.where(scale > 0, block / scale, 0.0).round_()
    return torch.nan_to_num(levels, nan=0.0).clamp_(-_LEVELS, _LEVELS)
