"""A tensor as a line, and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsrun.runtime.activation.keep.flat import as_line


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(5, 6)[1:4],
        torch.tensor(2.0),
        torch.randn(0, 4),
    ],
)
def test_without_gaps_the_line_is_a_view_and_strides_come_back(tensor: Tensor) -> None:
    line_N, form = as_line(tensor)
    assert line_N.shape == (tensor.numel(),)
    assert line_N.data_ptr() == tensor.data_ptr() or not tensor.numel()
    assert torch.equal(form.of(line_N.clone()), tensor)
    assert form.of(line_N.clone()).stride() == tensor.stride()
    assert (form.numel, form.nbytes) == (tensor.numel(), tensor.nbytes)


@pytest.mark.parametrize("tensor", [torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 5)])
def test_gaps_and_overlaps_are_copied_out(tensor: Tensor) -> None:
    line_N, form = as_line(tensor)
    assert line_N.shape == (tensor.numel(),)
    assert torch.equal(form.of(line_N), tensor)
