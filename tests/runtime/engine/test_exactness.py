"""The same numbers, bit for bit: over stages, over ranks, and against plain torch and DDP, where arithmetic allows.

[Note: where arithmetic allows]
- Over stages at one world size: always.
- Over world sizes: where a sum over ranks and a sum over micro steps add the same terms in the same order and are
  divided by the same power of two. So one rank that accumulates twice equals two ranks, in fp32. Three ranks divide
  by 3, and in bf16 the sum over ranks is rounded to bf16 while that over micro steps is kept in fp32: those are close.
- Plain torch and DDP without clipping: always, for the optimizer's kernel gives an element the same bits wherever it
  stands, as long as no vector tail is involved; sizes here have none. With clipping torch rounds norm and coefficient
  to fp32 and sums squares in another order: close.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STEPS = 20
STAGES = (0, 1, 2, 3)
Result = tuple[list[float], dict[str, Tensor]]


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(7)
    return TinyGPT(**options)


def _train_cases(cases: list[dict[str, Any]], samples: int, options: dict[str, Any], steps: int) -> list[Result]:
    """Losses and fp32 weights of a run for each config."""
    found: list[Result] = []
    for case in cases:
        engine = make_engine(case, model=_model(**options))
        losses = train(engine, range(steps), samples=samples)
        found.append((losses, full_parameters(engine)))
    return found


def _train_plain(samples: int, options: dict[str, Any], optimizer: str, clip: float, ddp: bool) -> Result:
    """What plain torch does with the global batch, or DDP with each rank's share of it."""
    model: nn.Module = _model(**options)
    if optimizer == "SGD":
        torch_optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1, momentum=0.9, fused=True)
    else:
        torch_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    size, rank = (dist.get_world_size(), dist.get_rank()) if ddp else (1, 0)
    forward: nn.Module = DistributedDataParallel(model) if ddp else model
    share = slice(rank * samples // size, (rank + 1) * samples // size)
    losses: list[float] = []
    for step in range(STEPS):
        inputs, targets = batches(step, samples=samples)
        loss = loss_of(forward(inputs[share]), targets[share])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        total = loss.detach().double()
        if ddp:
            dist.all_reduce(total)
        losses.append(float(total) / size)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def _against_ddp(cases: list[dict[str, Any]], options: dict[str, Any]) -> tuple[list[Result], Result]:
    ours = _train_cases(cases, 6, options, STEPS)
    return ours, _train_plain(6, options, "AdamW", 0.0, ddp=True)


def assert_equal(found: Result, expected: Result, what: str) -> None:
    assert found[0] == expected[0], what
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), f"{what}: {name}"


def assert_close(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stages_agree_bit_for_bit(world_size: int) -> None:
    micro = 6 // world_size
    fp32 = [config(stage, micro=micro) for stage in STAGES]
    bf16 = [config(stage, micro=micro, bf16=True) for stage in STAGES]
    both = run_ranks(world_size, _train_cases, [*fp32, *bf16], 6, {}, STEPS)
    for rank in range(world_size):
        for results in (both[rank][:4], both[rank][4:]):
            assert results[0][0][-1] < 0.8 * results[0][0][0], "it learns"
            for stage in STAGES:
                assert_equal(results[stage], both[0][0] if results[0] is both[rank][0] else both[0][4], f"{stage}")


def test_accumulating_stages_agree_bit_for_bit_for_sgd_and_tied_weights() -> None:
    cases = [config(stage, micro=1, accumulation=2, optimizer="SGD") for stage in STAGES]
    results = run_ranks(2, _train_cases, cases, 4, {"tied": True}, 8)
    for rank in range(2):
        for stage in STAGES:
            assert_equal(results[rank][stage], results[0][0], f"stage {stage}")


def test_two_ranks_equal_one_that_accumulates_twice() -> None:
    alone = run_ranks(1, _train_cases, [config(s, micro=3, accumulation=2) for s in (0, 3)], 6, {}, STEPS)[0]
    two = run_ranks(2, _train_cases, [config(s, micro=3) for s in (0, 1, 2, 3)], 6, {}, STEPS)[0]
    for result in [*alone, *two]:
        assert_equal(result, alone[0], "one rank or two")


def test_two_ranks_that_exchange_fp32_equal_one_that_accumulates_bf16_gradients_twice() -> None:
    alone = run_ranks(1, _train_cases, [config(0, micro=3, accumulation=2, bf16=True)], 6, {}, 8)[0][0]
    cases = [config(stage, micro=3, bf16=True, communication_data_type="fp32") for stage in STAGES]
    cases += [
        config(stage, micro=3, bf16=True, communication_data_type="fp32", prescale_gradients=True) for stage in (0, 3)
    ]
    for found in run_ranks(2, _train_cases, cases, 6, {}, 8)[0]:
        assert_equal(found, alone, "one rank or two")


def test_other_world_sizes_and_bf16_are_close() -> None:
    whole, accumulated, half_precision = run_ranks(
        1,
        _train_cases,
        [config(0, micro=6), config(0, micro=2, accumulation=3), config(0, micro=3, accumulation=2, bf16=True)],
        6,
        {},
        STEPS,
    )[0]
    assert_close(accumulated, whole)
    assert_close(run_ranks(3, _train_cases, [config(2, micro=2)], 6, {}, STEPS)[0][0], whole)
    assert_close(run_ranks(2, _train_cases, [config(3, micro=3, bf16=True)], 6, {}, STEPS)[0][0], half_precision, 0.02)


#: Every parameter has a multiple of 16 elements: a vector's tail is computed without fused multiply-add.
ROUND = {"width": 64, "vocab": 64, "odd": 0}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_it_is_plain_torch_bit_for_bit(optimizer: str) -> None:
    expected = _train_plain(6, ROUND, optimizer, 0.0, ddp=False)
    cases = [config(stage, micro=6, optimizer=optimizer, gradient_clipping=0) for stage in STAGES]
    for stage, found in zip(STAGES, _train_cases(cases, 6, ROUND, STEPS), strict=True):
        assert_equal(found, expected, f"stage {stage}")


def test_it_is_plain_torch_to_rounding_where_gradients_are_clipped() -> None:
    expected = _train_plain(6, {}, "AdamW", 0.7, ddp=False)
    assert_close(_train_cases([config(2, micro=6)], 6, {}, STEPS)[0], expected)


def test_it_is_ddp_at_two_ranks_bit_for_bit() -> None:
    cases = [config(stage, micro=3, gradient_clipping=0) for stage in STAGES]
    for ours, expected in run_ranks(2, _against_ddp, cases, ROUND):
        for stage in STAGES:
            assert_equal(ours[stage], expected, f"stage {stage}")
