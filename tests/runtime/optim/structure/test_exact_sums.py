"""Sums have the same bits in every order and over any number of ranks, and are as precise as fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.optim.structure.exact_sums import TermRanks, agree, cell_squares, finish, power_of_two, rounded

COUNT = 1000
pytestmark = pytest.mark.gpu_seconds(0.1)


def terms() -> Tensor:
    """Two sums of terms over 16 decades, whose fp32 or fp64 sums depend on the order."""
    generator = torch.Generator().manual_seed(3)
    return torch.rand(2, COUNT, generator=generator) * 10.0 ** torch.randint(-8, 8, (2, COUNT), generator=generator)


def summed(parts_KN: Tensor, axis: Any = None, *, counts: int = COUNT) -> Tensor:
    ranks = None if axis is None else TermRanks(axis)
    largest = parts_KN.amax(dim=1).double() if parts_KN.shape[1] else torch.zeros(len(parts_KN), dtype=torch.float64)
    scales = agree(largest, torch.full((len(parts_KN),), counts, device=parts_KN.device), ranks, label="terms")
    totals = rounded(parts_KN, scales.unsqueeze(1)).sum(dim=1)
    return finish(totals, largest, scales, ranks, label="terms")


def test_neither_order_nor_ranks_change_a_bit() -> None:
    whole = terms()
    expected = summed(whole)
    for seed in range(5):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(summed(whole[:, order]), expected)
    for size in (2, 3, 5):
        found = LoopbackWorld(size).run(lambda axis, n=size: summed(whole[:, axis.rank :: n], axis))
        assert all(torch.equal(one, expected) for one in found)


def test_it_is_the_sum() -> None:
    whole = terms()
    for found, row in zip(summed(whole), whole, strict=True):
        assert float(found) == pytest.approx(math.fsum(row.double().tolist()), rel=1e-12)


def test_ranks_without_terms_take_part() -> None:
    def body(axis: Any) -> Tensor:
        return summed(torch.ones(1, 4 if axis.rank == 2 else 0), axis, counts=4)

    assert [float(one) for one in LoopbackWorld(3).run(body)] == [4.0] * 3


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-90, 1e38, 1e80])
def test_terms_of_any_size_are_summed(value: float) -> None:
    assert float(summed(torch.full((1, 3), value, dtype=torch.float64), counts=3)) == pytest.approx(
        3 * value, rel=1e-14, abs=0.0
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    found = summed(torch.tensor([[1.0, value], [1.0, 2.0]]), counts=2)
    assert not math.isfinite(float(found[0]))
    assert float(found[1]) == 3.0


def test_rounding_leaves_its_terms_alone() -> None:
    values = torch.tensor([1.25], dtype=torch.float64)
    assert float(rounded(values, torch.tensor(4.0, dtype=torch.float64))) == 5.0
    assert float(values) == 1.25


def test_cells_have_the_same_bits_wherever_they_are_cut(device: torch.device) -> None:
    values = torch.randn(64 * 40, generator=torch.Generator().manual_seed(1)).to(device)
    whole = cell_squares(values)
    assert whole.tolist() == pytest.approx(values.square().view(-1, 64).sum(dim=1).tolist())
    for first in range(0, 40, 3):
        for stop in range(first + 1, 41):
            assert torch.equal(cell_squares(values[64 * first : 64 * stop]), whole[first:stop])
    assert cell_squares(torch.ones(70, device=device)).tolist() == [64.0, 6.0]
    assert cell_squares(torch.ones(8, device=device), 2).tolist() == [2.0] * 4


def test_powers_of_two_are_exact_to_the_ends_of_fp64s_normal_numbers(device: torch.device) -> None:
    for dtype in (torch.int32, torch.int64):
        exponents = torch.arange(-1022, 1024, dtype=dtype, device=device)
        assert power_of_two(exponents).tolist() == [math.ldexp(1.0, n) for n in range(-1022, 1024)]
    beyond = torch.tensor([-(2**31), -1023, 1024, 2**31 - 1], dtype=torch.int32, device=device)
    assert power_of_two(beyond).tolist() == [2.0**-1022, 2.0**-1022, 2.0**1023, 2.0**1023]
    assert float(power_of_two(torch.tensor(3, device=device))) == 8.0, "a single number, too"


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-90, 1e-38, 1.0, 1e80])
def test_sums_have_the_same_bits_on_every_device(device: torch.device, value: float) -> None:
    whole = terms().double() * value
    assert torch.equal(summed(whole.to(device)).cpu(), summed(whole))
