"""The norm has the same bits however gradients are spread over ranks, and is the norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.runtime.layout.unit_layout import SHARD_ALIGN
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.optim.norm import Totals, block_norms, clip_factor, global_totals

BLOCKS = 24  # divides by 1, 2, 3 and 4 ranks


def units(scale: float, seed: int = 0) -> list[Tensor]:
    """Gradients of three units, with a spread of sizes inside."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [BLOCKS, 2 * BLOCKS, BLOCKS]
    return [
        torch.randn(n * SHARD_ALIGN, generator=generator) * torch.logspace(-6, 0, n * SHARD_ALIGN) * scale
        for n in sizes
    ]


NOTHING = torch.zeros(0, dtype=torch.float64)


def norm_of(ranges: list[Tensor], collectives: Any, *, spread: bool, numel: int) -> float:
    norms = [block_norms(r) for r in ranges]
    found = global_totals(norms, collectives, spread=spread, total_numel=numel, mark=7, extra_N=NOTHING)
    assert (found.largest, found.smallest, found.sums) == (7, 7, [])
    return found.norm


def norm_over(world_size: int, ranges: list[Tensor]) -> list[float]:
    total = sum(r.numel() for r in ranges)

    def body(collectives: LoopbackCollectives) -> float:
        mine = [r.chunk(world_size)[collectives.rank] for r in ranges]
        return norm_of(mine, collectives, spread=True, numel=total)

    return LoopbackWorld(world_size).run(body)


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1.0, 3e4, 1e15])
def test_the_same_bits_for_every_number_of_ranks(scale: float) -> None:
    for seed in range(5):
        ranges = units(scale, seed)
        alone = norm_of(ranges, AloneCollectives(), spread=False, numel=sum(r.numel() for r in ranges))
        for world_size in (1, 2, 3, 4, 12):
            assert set(norm_over(world_size, ranges)) == {alone}
        exact = float(torch.cat(ranges).double().norm())
        assert alone == pytest.approx(exact, rel=1e-6)


def test_it_agrees_with_torch() -> None:
    ranges = units(0.1)
    assert norm_of(ranges, AloneCollectives(), spread=False, numel=4 * BLOCKS * SHARD_ALIGN) == pytest.approx(
        float(torch.nn.utils.get_total_norm(ranges)), rel=1e-6
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("place", [0, -1])
def test_a_gradient_that_is_not_finite_shows_on_every_rank(bad: float, place: int) -> None:
    ranges = units(1.0)
    ranges[place][place] = bad
    for world_size in (1, 2, 3):
        assert not any(math.isfinite(norm) for norm in norm_over(world_size, ranges))


def test_zeros_have_norm_zero() -> None:
    assert norm_over(2, [torch.zeros(4 * SHARD_ALIGN)]) == [0.0, 0.0]


def test_one_rank_may_hold_nothing_but_zeros() -> None:
    ranges = [torch.cat([torch.full((SHARD_ALIGN,), 2.0), torch.zeros(SHARD_ALIGN)])]
    assert norm_over(2, ranges) == [32.0, 32.0]


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_clipping_is_torchs(limit: float) -> None:
    ranges = units(1.0)
    param = torch.nn.Parameter(torch.cat(ranges))
    param.grad = param.detach().clone()
    norm = norm_of(ranges, AloneCollectives(), spread=False, numel=param.numel())
    factor = clip_factor(norm, limit=limit)
    if limit:
        torch.nn.utils.clip_grad_norm_([param], limit)
    torch.testing.assert_close(torch.cat(ranges) * factor, param.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spread", [False, True])
def test_sums_and_marks_of_the_ranks_travel_with_the_norm(spread: bool) -> None:
    ranges = units(1.0)

    def body(collectives: LoopbackCollectives) -> tuple[Totals, dict[str, int], dict[str, int]]:
        extra = torch.tensor([0.5, -2.0 * collectives.rank], dtype=torch.float64)
        mark = 2**32 - 1 - collectives.rank
        norms = [block_norms(r) for r in ranges]
        totals = global_totals(norms, collectives, spread=spread, total_numel=1 << 20, mark=mark, extra_N=extra)
        assert extra.tolist() == [0.5, -2.0 * collectives.rank], "it is left as it is"
        return totals, dict(collectives.traffic.calls), dict(collectives.traffic.bytes)

    for rank, (totals, calls, sent) in enumerate(LoopbackWorld(3).run(body)):
        assert totals.sums == [1.5, -6.0]
        marks = (2**32 - 1, 2**32 - 3) if spread else (2**32 - 1 - rank,) * 2
        assert (totals.largest, totals.smallest) == marks
        assert calls == {"all_reduce": 2 if spread else 1}
        assert sent == {"all_reduce": (3 + 3) * 8 if spread else 2 * 8}


def test_a_gradient_that_is_not_finite_leaves_sums_and_marks_alone() -> None:
    norms = [block_norms(torch.full((SHARD_ALIGN,), math.nan))]
    extra = torch.tensor([0.5], dtype=torch.float64)
    totals = global_totals(norms, AloneCollectives(), spread=True, total_numel=SHARD_ALIGN, mark=9, extra_N=extra)
    assert math.isnan(totals.norm)
    assert (totals.largest, totals.smallest, totals.sums) == (9, 9, [0.5])
