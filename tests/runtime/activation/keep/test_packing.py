"""What 8 bits lose, at most, and what they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsrun.runtime.activation.keep.keeper import AsItIs
from dsrun.runtime.activation.keep.packing import BLOCK, PackingKeeper, pack, packed_bytes, unpack


def bound_of(line_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound of [Note: the error of packing], an element."""
    padded = torch.cat([line_N.double(), torch.zeros(-line_N.numel() % BLOCK)])
    largest = padded.view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK)[: line_N.numel()]
    return largest / 254 + 4 * 2**-24 * largest + (2**-8 * largest if dtype is torch.bfloat16 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 4096, 5000])
@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e20])
def test_the_error_is_within_its_bound(dtype: torch.dtype, numel: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(numel)
    line_N = (torch.randn(numel, generator=generator) * spread).to(dtype)
    values, scales = pack(line_N)
    assert values.nbytes + scales.nbytes == packed_bytes(numel)
    found = unpack(values, scales, dtype)
    assert found.dtype is dtype
    assert bool(((found.double() - line_N.double()).abs() <= bound_of(line_N, dtype)).all())


def test_the_largest_element_keeps_its_size_and_sign() -> None:
    line_N = torch.linspace(-3, 1, BLOCK)
    assert unpack(*pack(line_N), torch.float32)[0] == pytest.approx(-3.0)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(unpack(*pack(torch.zeros(200)), torch.float32), torch.zeros(200))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_comes_back_as_nan_in_its_block_alone(bad: float) -> None:
    line_N = torch.ones(3 * BLOCK)
    line_N[BLOCK + 5] = bad
    found = unpack(*pack(line_N), torch.float32).view(3, BLOCK)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], torch.ones(2, BLOCK))


def test_what_is_small_or_no_float_is_kept_as_it_is() -> None:
    keeper = PackingKeeper(AsItIs())
    for tensor in (torch.randn(31, 32), torch.arange(5000), torch.randn(5000, 1)):
        assert keeper.put(tensor).take().data_ptr() == tensor.data_ptr()


def test_a_transposed_tensor_keeps_shape_and_strides() -> None:
    tensor = torch.linspace(-4, 4, 64 * 96).view(64, 96).t()
    ticket = PackingKeeper(AsItIs()).put(tensor)
    assert ticket.take().stride() == tensor.stride()
    assert torch.allclose(ticket.take(), tensor, atol=4.001 / 254, rtol=0)
