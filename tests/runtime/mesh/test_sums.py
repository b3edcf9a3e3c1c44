"""What is added to a wider sum piece by piece has the bits of one addition."""

from __future__ import annotations

import pytest
import torch

from dsrun.runtime.mesh.sums import add_scaled, set_scaled

PIECE = 1 << 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 256, PIECE, PIECE + 256, 2 * PIECE + 1])
def test_scaled_sums_are_made_in_the_wider_dtype_to_the_bits_of_one_addition(dtype: torch.dtype, numel: int) -> None:
    generator = torch.Generator().manual_seed(3)
    total = torch.randn(numel, generator=generator)
    addend = torch.randn(numel, generator=generator).to(dtype)
    expected = total + addend.float() * torch.tensor(1 / 3, dtype=torch.float64).float()
    at_once = total.clone().add_(addend, alpha=1 / 3)
    add_scaled(total, addend, 1 / 3)
    assert torch.equal(total, at_once)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 256, PIECE, PIECE + 256, 2 * PIECE + 1])
@pytest.mark.parametrize("factor", [1 / 3, 1.0])
def test_a_sum_that_begins_has_the_bits_of_zeros_to_which_is_added(
    dtype: torch.dtype, numel: int, factor: float
) -> None:
    addend = torch.randn(numel, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = torch.zeros(numel).add_(addend, alpha=factor)
    total = torch.full((numel,), float("nan"))
    set_scaled(total, addend, factor)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("factor", [1 / 3, 1.0])
def test_a_sum_that_begins_in_a_narrower_dtype_is_rounded_once(factor: float) -> None:
    addend = torch.randn(PIECE + 256, generator=torch.Generator().manual_seed(5))
    total = torch.full((PIECE + 256,), float("nan"), dtype=torch.bfloat16)
    set_scaled(total, addend, factor)
    assert torch.equal(total, (addend * factor).bfloat16())
