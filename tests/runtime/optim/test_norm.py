"""The norm has the same bits however gradients are spread over ranks, and is the norm."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsrun.runtime.layout.unit_layout import SHARD_ALIGN
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.optim.norm import Totals, block_norms, clip_factor, global_totals
from support.devices import on_devices

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
    assert (found.differing, found.sums) == ((), [])
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

    for totals, calls, sent in LoopbackWorld(3).run(body):
        assert totals.sums == [1.5, -6.0]
        assert totals.differing == (0,), "on every rank"
        assert calls == {"all_reduce": 2 if spread else 1}
        assert sent == {"all_reduce": (3 + 3) * 8 if spread else (2 + 2) * 8}


def test_marks_are_compared_inside_of_each_stage_and_every_rank_hears_which_differ() -> None:
    def body(collectives: LoopbackCollectives) -> tuple[tuple[int, ...], dict[str, int]]:
        mark = [5, 5, 9, 8][collectives.rank]
        totals = global_totals(
            [], collectives, spread=True, total_numel=1024, mark=mark, extra_N=NOTHING, stage=(collectives.rank // 2, 2)
        )
        assert totals.norm == 0, "a stage may have nothing that trains"
        return totals.differing, dict(collectives.traffic.calls)

    assert LoopbackWorld(4).run(body) == [((1,), {"all_reduce": 2})] * 4


def test_a_gradient_that_is_not_finite_leaves_sums_and_marks_alone() -> None:
    norms = [block_norms(torch.full((SHARD_ALIGN,), math.nan))]
    extra = torch.tensor([0.5], dtype=torch.float64)
    totals = global_totals(norms, AloneCollectives(), spread=True, total_numel=SHARD_ALIGN, mark=9, extra_N=extra)
    assert math.isnan(totals.norm)
    assert (totals.differing, totals.sums) == ((), [0.5])


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def many_blocks(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gradients whose squares add up to other bits in other orders."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count * SHARD_ALIGN, generator=generator).to(device, dtype)


@pytest.mark.parametrize(
    ("device", "threads", "dtype"),
    on_devices(product([1, 2, 3], DTYPES), on_gpu=[(1, dtype) for dtype in DTYPES]),
    indirect=["device"],
)
def test_a_blocks_norm_does_not_depend_on_how_many_a_rank_owns(
    device: torch.device, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    whole = many_blocks(3000, dtype, device)
    norms = block_norms(whole)
    for count in [*range(1, 41), 127, 128, 129, 511, 512, 513, 2047]:
        for first in (0, 1, 2, 3, 7, 16, 900):
            piece = whole[SHARD_ALIGN * first : SHARD_ALIGN * (first + count)]
            assert torch.equal(block_norms(piece), norms[first : first + count]), (count, first)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_a_range_that_torch_splits_for_its_size_has_the_norms_of_its_parts() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    count = (1 << 21) + 17  # just above 2^31 bytes, from where torch's kernels take an input in parts
    whole = torch.randn(count * SHARD_ALIGN, device=device)
    norms = block_norms(whole)
    for first, stop in ((0, 5), (count // 2 - 9, count // 2 + 9), (count - 1, count), (count - 70_000, count)):
        assert torch.equal(block_norms(whole[SHARD_ALIGN * first : SHARD_ALIGN * stop]), norms[first:stop])


class Kernels(TorchDispatchMode):
    """Notes what the kernel for norms is given, and what is allocated beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.others: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.linalg_vector_norm.default:
            self.rows.append(args[0].shape[0])
        elif isinstance(result, Tensor) and not func.is_view:
            self.others.append(result.numel())
        return result


@pytest.mark.parametrize("count", [0, 1, 8, 15, 16, 17, 64])
def test_the_kernel_never_sees_fewer_than_16_blocks_and_nothing_large_is_copied(count: int) -> None:
    grads = many_blocks(count, torch.float32, torch.device("cpu"))
    with Kernels() as kernels:
        norms = block_norms(grads)
    assert norms.shape == (count,)
    assert kernels.rows == [max(16, count)]
    assert sum(kernels.others) <= (0 if count >= 16 else 2 * 16 * SHARD_ALIGN)


def exact_norm(norms: list[float], numel: int) -> float:
    """See [Note: exact norm], in Python's numbers."""
    squares = [norm * norm for norm in norms]
    shift = 52 - (numel // SHARD_ALIGN).bit_length() - math.frexp(max(squares))[1]
    return math.sqrt(sum(math.ldexp(round(math.ldexp(square, shift)), -shift) for square in squares))


@pytest.mark.gpu_seconds(0.1)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e-15, 1.0, 1e15, 1e38])
def test_the_sum_has_the_bits_of_the_rule(device: torch.device, size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    norms = torch.rand(1000, generator=generator) * size
    norms[3] = size
    found = global_totals(
        [norms.to(device)],
        AloneCollectives(),
        spread=True,
        total_numel=1000 * SHARD_ALIGN,
        mark=1,
        extra_N=NOTHING.to(device),
    )
    assert found.norm == exact_norm(norms.double().tolist(), 1000 * SHARD_ALIGN)


@pytest.mark.gpu_seconds(0.1)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norms_of_blocks_that_are_not_finite_make_the_norm_so(device: torch.device, value: float) -> None:
    norms = torch.tensor([1.0, value, 0.0], device=device)
    found = global_totals(
        [norms], AloneCollectives(), spread=False, total_numel=768, mark=1, extra_N=NOTHING.to(device)
    )
    assert found.norm == value or (math.isnan(value) and math.isnan(found.norm))
