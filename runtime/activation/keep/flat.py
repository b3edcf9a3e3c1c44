"""A tensor as one line of elements, and back with the strides it had. No memory is allocated here, but for gaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """What a line of elements lacks.

    Attributes:
        shape: shape of the tensor.
        strides: strides of the tensor, in elements; together they cover the line without gaps.
        dtype: dtype of the tensor.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the line."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the line."""
        return self.numel * self.dtype.itemsize

    def of(self, line_N: Tensor) -> Tensor:
        """Returns the tensor: a view of the line, which has this form's dtype."""
        return line_N.as_strided(self.shape, self.strides)


def as_line(tensor: Tensor) -> tuple[Tensor, Form]:
    """Returns the elements of `tensor` in the order of memory, shape [numel], and its form.

    The line is a view where the tensor has no gaps (a transposed one has none), so kernels see the same strides again;
    a tensor with gaps or overlaps is copied into a contiguous one first.
    """
    whole = tensor.detach()
    if torch.empty_like(whole, device="meta").stride() != whole.stride():
        whole = whole.contiguous()
    form = Form(tuple(whole.shape), whole.stride(), whole.dtype)
    return whole.as_strided((whole.numel(),), (1,)), form
