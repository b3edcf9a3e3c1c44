"""The same numbers, bit for bit: over stages, over ranks, and against plain torch and DDP, where arithmetic allows.

[Note: where arithmetic allows]
- Over stages at one world size: always.
- Over world sizes: where a sum over ranks and a sum over micro steps add the same terms in the same order and are
  divided by the same power of two. So one rank that accumulates twice equals two ranks, in fp32. Three ranks divide
  by 3, and in bf16 the sum over ranks is rounded to bf16 while that over micro steps is kept in fp32: those are close.
- Plain torch and DDP without clipping: always, for the optimizer's kernel gives an element the same bits wherever it
  stands, as long as no vector tail is involved; sizes here have none. With clipping torch rounds norm and coefficient
  to fp32 and sums squares in another order: see the bound below.
- DDP in bf16, where the script keeps fp32 masters and steps on them: always at two ranks, for a sum of two numbers that
  is rounded to bf16 once has the same bits whether it is halved before or after.

[Note: bounds]
u = 2^-24 is fp32's unit of rounding. However n numbers are added up, the error is at most n u times the sum of their
magnitudes, to first order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). So two orders of
summation differ by at most 2 n u sum |g|. Gradients that are halved or quartered on the way are so exactly.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dsrun
from support.inside_engine import store_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import accumulated_gradients, batches, config, full_parameters, make_engine, train

#: Bits that differ do so in the weights of the first step already.
STEPS = 6
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
        if case["zero_optimization"]["stage"] == 3:
            store_of(engine).poison = True
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


#: Sizes that no vector width divides, and units of their own for embedding and head.
SMALL = {"width": 68, "layers": 2}
#: Bits that differ do so in the weights of the first step already; a few more have moments, and an odd and an even one.
MATRIX_STEPS = 3
#: Accumulation, clipping and bf16.
Setting = tuple[int, bool, bool]
#: Every pair of two settings' values.
PAIRS: list[Setting] = [(1, False, False), (1, True, True), (3, False, True), (3, True, False)]
ALL: list[Setting] = list(product((1, 3), (False, True), (False, True)))


def _train_matrix(settings: list[Setting]) -> dict[Setting, list[Result]]:
    """For each accumulation, clipping and dtype, the results of stages 0 to 3; one sample a rank and micro step."""
    size = dsrun.init_distributed().world_size
    return {
        (steps, clips, bf16): _train_cases(
            [
                config(stage, micro=1, accumulation=steps, bf16=bf16, gradient_clipping=0.7 if clips else 0)
                for stage in STAGES
            ],
            steps * size,
            SMALL,
            MATRIX_STEPS,
        )
        for steps, clips, bf16 in settings
    }


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        pytest.param(1, [(1, False, False), (3, True, True)], id="1"),
        pytest.param(2, PAIRS, id="2"),
        pytest.param(4, [(1, True, False), (3, False, True)], id="4"),
        *(
            pytest.param(
                size,
                ALL,
                id=f"{size}-all",
                marks=[
                    pytest.mark.soak("each value at each number of ranks, each pair at two"),
                    pytest.mark.timeout(600),
                ],
            )
            for size in (1, 2, 4)
        ),
    ],
)
def test_stages_agree_bit_for_bit_with_accumulation_clipping_and_bf16(world_size: int, settings: list[Setting]) -> None:
    ranks = run_ranks(world_size, _train_matrix, settings, timeout_s=300.0)
    for case, (first, *_) in ranks[0].items():
        for rank, stage in product(range(world_size), STAGES):
            assert_equal(ranks[rank][case][stage], first, f"{case}: rank {rank}, stage {stage}")
    losses = {case: results[0][0] for case, results in ranks[0].items()}
    assert len({tuple(found) for found in losses.values()}) == len(losses), "every setting makes a difference"


def test_stages_agree_bit_for_bit_on_three_ranks_and_learn() -> None:
    fp32 = [config(stage, micro=2) for stage in STAGES]
    bf16 = [config(stage, micro=2, bf16=True) for stage in STAGES]
    both = run_ranks(3, _train_cases, [*fp32, *bf16], 6, {}, MATRIX_STEPS)
    for results in both:
        for number, found in enumerate(results):
            assert_equal(found, both[0][number // 4 * 4], f"stage {number % 4}")
    for longer, start in zip(run_ranks(3, _train_cases, [fp32[3], bf16[1]], 6, {}, 20)[0], (0, 4), strict=True):
        assert longer[0][:MATRIX_STEPS] == both[0][start][0], "the run that all stages agree on"
        assert longer[0][-1] < 0.8 * longer[0][0], "it learns"


def test_accumulating_stages_agree_bit_for_bit_for_sgd_and_tied_weights() -> None:
    cases = [config(stage, micro=1, accumulation=2, optimizer="SGD") for stage in STAGES]
    results = run_ranks(2, _train_cases, cases, 4, {"tied": True}, MATRIX_STEPS)
    for rank in range(2):
        for stage in STAGES:
            assert_equal(results[rank][stage], results[0][0], f"stage {stage}")


def test_two_ranks_equal_one_that_accumulates_twice() -> None:
    alone = run_ranks(1, _train_cases, [config(s, micro=3, accumulation=2) for s in (0, 3)], 6, {}, STEPS)[0]
    two = run_ranks(2, _train_cases, [config(s, micro=3) for s in (0, 1, 2, 3)], 6, {}, STEPS)[0]
    for result in [*alone, *two]:
        assert_equal(result, alone[0], "one rank or two")


def test_four_ranks_equal_one_that_accumulates_four_times() -> None:
    """Sums over ranks are added up in the order of ranks, at every stage."""
    alone = run_ranks(1, _train_cases, [config(0, micro=1, accumulation=4)], 4, SMALL, STEPS)[0][0]
    for found in run_ranks(4, _train_cases, [config(stage, micro=1) for stage in STAGES], 4, SMALL, STEPS)[0]:
        assert_equal(found, alone, "one rank or four")


def test_two_ranks_that_exchange_fp32_equal_one_that_accumulates_bf16_gradients_twice() -> None:
    alone = run_ranks(1, _train_cases, [config(0, micro=3, accumulation=2, bf16=True)], 6, {}, MATRIX_STEPS)[0][0]
    cases = [config(stage, micro=3, bf16=True, communication_data_type="fp32") for stage in STAGES]
    cases += [
        config(stage, micro=3, bf16=True, communication_data_type="fp32", prescale_gradients=True) for stage in (0, 3)
    ]
    for found in run_ranks(2, _train_cases, cases, 6, {}, MATRIX_STEPS)[0]:
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


def _ddp_with_masters(samples: int) -> Result:
    """DDP over a bf16 model whose script steps on fp32 masters, as mixed precision by hand does."""
    model = _model(**ROUND)
    masters = [param.detach().clone() for param in model.parameters()]
    forward = DistributedDataParallel(model.bfloat16())
    torch_optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    micro = samples // dist.get_world_size()
    share = slice(dist.get_rank() * micro, (dist.get_rank() + 1) * micro)
    losses: list[float] = []
    for step in range(STEPS):
        inputs, targets = batches(step, samples=samples)
        loss = loss_of(forward(inputs[share]), targets[share])
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch_optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses, dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))


def _against_ddp_in_bf16(cases: list[dict[str, Any]]) -> tuple[list[Result], Result]:
    return _train_cases(cases, 6, ROUND, STEPS), _ddp_with_masters(6)


def test_it_is_ddp_with_fp32_masters_in_bf16_at_two_ranks_bit_for_bit() -> None:
    cases = [config(stage, micro=3, gradient_clipping=0, bf16=True) for stage in STAGES]
    for ours, expected in run_ranks(2, _against_ddp_in_bf16, cases):
        for stage in STAGES:
            assert_equal(ours[stage], expected, f"stage {stage}")


# Where an order of sums forbids equal bits: see [Note: bounds] -------------------------------------------------------

UNIT = 2.0**-24


def _gradients_beside_ddp(accumulation: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Mean gradients of one global batch: ours at each stage, DDP's, and the mean of their terms' magnitudes."""
    size, rank = dsrun.init_distributed("gloo").world_size, dist.get_rank()
    inputs, targets = batches(0, samples=accumulation * size)
    mine = [slice(step * size + rank, step * size + rank + 1) for step in range(accumulation)]
    ours: list[dict[str, Tensor]] = []
    for stage in STAGES:
        engine = make_engine(config(stage, micro=1, accumulation=accumulation), model=_model(**SMALL))
        for share in mine[:-1]:
            engine.backward(loss_of(engine(inputs[share]), targets[share]))
            engine.step()
        engine.backward(loss_of(engine(inputs[mine[-1]]), targets[mine[-1]]))
        ours.append(accumulated_gradients(engine))
    magnitudes: dict[str, Tensor] = {}
    forward = DistributedDataParallel(_model(**SMALL))
    for number, share in enumerate(mine):
        alone = _model(**SMALL)
        (loss_of(alone(inputs[share]), targets[share]) / accumulation).backward()
        for name, param in alone.named_parameters():
            assert param.grad is not None
            magnitudes[name] = magnitudes.get(name, torch.zeros(())) + param.grad.double().abs() / size
        with nullcontext() if number == accumulation - 1 else forward.no_sync():
            (loss_of(forward(inputs[share]), targets[share]) / accumulation).backward()
    for total in magnitudes.values():
        dist.all_reduce(total)
    theirs = {name: param.grad.clone() for name, param in forward.module.named_parameters() if param.grad is not None}
    return ours, theirs, magnitudes


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 3), (4, 1)])
def test_gradients_differ_from_ddps_by_no_more_than_another_order_of_summation(
    world_size: int, accumulation: int
) -> None:
    terms = world_size * accumulation
    for ours, theirs, magnitudes in run_ranks(world_size, _gradients_beside_ddp, accumulation):
        for stage, found in zip(STAGES, ours, strict=True):
            assert_equal(([], found), ([], ours[0]), f"stage {stage}")
            for name, value in theirs.items():
                off = (found[name].double() - value.double()).abs()
                assert bool((off <= 2 * terms * UNIT * magnitudes[name]).all()), name


def test_a_clipped_step_differs_from_plain_torchs_by_no_more_than_the_rounding_of_its_norm() -> None:
    """One step of SGD: w - lr c g. Torch's norm adds up n squares in fp32, so it is off by at most n u / 2, relatively,
    and its coefficient c by as much and a few roundings; our norm is exact to far less. Both round the product c g, the
    product with lr, and the difference.
    """
    rate, inputs_targets = 1e-2, batches(0, samples=6)
    before = {name: param.detach().clone() for name, param in _model().named_parameters()}
    plain = _model()
    loss_of(plain(inputs_targets[0]), inputs_targets[1]).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert norm > 0.1, "it clips"
    torch.optim.SGD(plain.parameters(), lr=rate, fused=True).step()
    count = max(param.numel() for param in plain.parameters()) + len(before)
    for stage in STAGES:
        settings = config(stage, micro=6, gradient_clipping=0.1)
        settings["optimizer"] = {"type": "SGD", "params": {"lr": rate}}
        engine = make_engine(settings, model=_model())
        engine.backward(loss_of(engine(inputs_targets[0]), inputs_targets[1]))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=count * UNIT)
        weights = full_parameters(engine)
        for name, param in plain.named_parameters():
            assert param.grad is not None
            moved = rate * param.grad.double().abs()
            bound = (count / 2 + 8) * UNIT * moved + 2 * UNIT * before[name].double().abs()
            assert bool(((weights[name].double() - param.detach().double()).abs() <= bound).all()), name
