"""What a script sees of the engine: micro steps, counters, skipped steps, and what a step sends and holds."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsrun
from dsrun.errors import InputError, ModelError
from dsrun.runtime.engine.step_sums import NUMBERS
from dsrun.runtime.observe.memory import StatePrediction
from dsrun.runtime.optim.registry import states_per_element
from support.inside_engine import step_of, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (0, 1, 2, 3)
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}


def micro_step(engine: Any, seed: int = 0) -> torch.Tensor:
    inputs, targets = batches(seed, samples=engine.train_micro_batch_size_per_gpu())
    scaled = engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    return scaled


# Micro steps ----------------------------------------------------------------------------------------------------------


def test_backward_returns_the_loss_divided_by_the_accumulation_steps() -> None:
    engine = make_engine(config(1, micro=2, accumulation=4))
    inputs, targets = batches(0, samples=2)
    loss = loss_of(engine(inputs), targets)
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    engine.step()
    loss = loss_of(engine(inputs), targets)
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()


def test_a_loss_that_one_micro_step_has_to_itself_is_divided_by_nothing() -> None:
    engine = make_engine(config(1, micro=2))
    inputs, targets = batches(0, samples=2)
    loss = loss_of(engine(inputs), targets)
    assert engine.backward(loss) is loss


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no such gradient")


@pytest.mark.parametrize("label", ["reduced", "unreduced"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_in_a_global_batch_leaves_no_part_of_its_gradients(stage: int, label: str) -> None:
    def train_one(engine: Any, *, fails: bool) -> dict[str, torch.Tensor]:
        def first() -> None:
            with engine.no_sync() if label == "unreduced" else nullcontext():
                engine.backward(loss_of(engine(batches(0, samples=2)[0]), batches(0, samples=2)[1]))
            engine.step()

        first()
        inputs, targets = batches(1, samples=2)
        if fails:
            found = loss_of(engine(inputs), targets)
            handle = engine.module.blocks[0].down.weight.register_hook(_fail)
            with pytest.raises(ArithmeticError):
                engine.backward(found)
            handle.remove()
            # Where gradients are added as they come, or wait for others, nothing tells the two apart any more.
            if stage >= 2 or label == "unreduced":
                with pytest.raises(ModelError, match="failed in the middle of a global batch"):
                    engine.backward(loss_of(engine(inputs), targets))
                engine.zero_grad()
                first()
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        assert engine.global_steps == 1
        return full_parameters(engine)

    undisturbed = train_one(make_engine(config(stage, micro=2, accumulation=2)), fails=False)
    found = train_one(make_engine(config(stage, micro=2, accumulation=2)), fails=True)
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


def test_steps_off_the_boundary_only_count() -> None:
    engine = make_engine(config(2, micro=2, accumulation=3, scheduler=WARMUP))
    start = full_parameters(engine)
    for number in range(1, 10):
        assert engine.is_gradient_accumulation_boundary() == (number % 3 == 0)
        micro_step(engine, number)
        assert engine.micro_steps == number
        assert engine.global_steps == number // 3
        assert engine.was_step_applied() == (number % 3 == 0)
        assert engine.lr_scheduler.last_batch_iteration == number // 3 - 1
        changed = any(not torch.equal(v, start[k]) for k, v in full_parameters(engine).items())
        assert changed == (number == 9), "the first two updates run at rate 0"
    assert engine.global_samples == 18
    assert engine.get_lr() == [pytest.approx(0.01 / 2)]


def test_the_boundary_can_be_set_and_stays_set() -> None:
    engine = make_engine(config(0, micro=2, accumulation=2))
    engine.set_gradient_accumulation_boundary(is_boundary=False)
    for seed in range(4):
        micro_step(engine, seed)
    assert (engine.global_steps, engine.micro_steps) == (0, 4)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    for seed in range(2):
        micro_step(engine, seed)
    assert engine.global_steps == 2


def test_changing_the_batch_changes_the_accumulation_of_whole_batches() -> None:
    engine = make_engine(config(0, micro=2, accumulation=2))
    micro_step(engine), micro_step(engine)
    engine.set_train_batch_size(6)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6, 3)
    applied: list[bool] = []
    for seed in range(6):
        micro_step(engine, seed)
        applied.append(engine.was_step_applied())
    assert applied == [False, False, True] * 2
    for wrong in (0, 1, 7):
        with pytest.raises(InputError, match=f"train_batch_size {wrong} is no multiple"):
            engine.set_train_batch_size(wrong)


def test_zero_grad_forgets_what_was_accumulated() -> None:
    engine = make_engine(config(1, micro=2, accumulation=1))
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
    engine.zero_grad()
    engine.step()
    assert engine.get_global_grad_norm() == 0.0


def test_misuse_is_an_error_with_a_way_out() -> None:
    engine = make_engine(config(1, micro=2))
    inputs, targets = batches(0, samples=2)
    with pytest.raises(ModelError, match="no backward through the engine's model since the last step"):
        engine.step()
    with pytest.raises(ModelError, match=r"the loss has shape \(2, 12, 61\)"):
        engine.backward(engine(inputs))
    with torch.no_grad(), pytest.raises(ModelError, match="requires_grad=False"):
        engine.backward(loss_of(engine(inputs), targets))
    loss = loss_of(engine(inputs), targets)
    given: list[tuple[Any, str]] = [(loss.item(), "float"), ({"loss": loss}, "dict"), ((loss,), "tuple")]
    for take in (engine.backward, engine.scale):
        for what, kind in given:
            with pytest.raises(ModelError, match=f"the loss is a {kind}; expected a tensor") as caught:
                take(what)
            assert caught.value.hint is not None
            assert "output.loss" in caught.value.hint
    settings = config(1, micro=2)
    del settings["optimizer"]
    watching = dsrun.initialize(model=TinyGPT(), config=settings)[0]
    with pytest.raises(ModelError, match="the engine has no optimizer"):
        watching.backward(loss_of(watching(inputs), targets))
    assert watching.get_lr() == []
    with pytest.raises(AttributeError, match="neither Engine nor TinyGPT has `nonsense`"):
        _ = engine.nonsense


def test_a_loss_of_one_element_in_any_shape_is_taken() -> None:
    engine = make_engine(config(1, micro=2))
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets).view(1, 1))
    engine.step()
    assert engine.global_steps == 1


def test_the_module_is_reachable_through_the_engine() -> None:
    engine = make_engine(config(2, micro=2))
    assert engine.embed is engine.module.embed
    assert engine.eval() is engine
    assert not engine.module.training
    assert engine.train().module.training
    assert len(engine.state_dict()) == len(engine.module.state_dict())
    with pytest.raises(ModelError, match=r"`position` of TinyGPT\.state_dict.* is sharded: at ZeRO stage 3 no rank"):
        make_engine(config(3, micro=2)).module.state_dict()["position"].clone()


# Gradients that are not finite ----------------------------------------------------------------------------------------


def _skip(stage: int) -> list[Any]:
    engine = make_engine(config(stage, micro=2, bf16=True, scheduler=WARMUP))
    train(engine, range(3), samples=2 * engine.world_size)
    before, rate = full_parameters(engine), engine.get_lr()
    inputs, targets = batches(0, samples=2)
    loss = loss_of(engine(inputs), targets)
    bad = float("nan") if engine.global_rank == engine.world_size - 1 else 1.0
    engine.backward(loss * bad)
    engine.step()
    after = full_parameters(engine)
    found = [
        engine.skipped_steps,
        engine.global_steps,
        engine.was_step_applied(),
        engine.get_lr() == rate,
        engine.lr_scheduler.last_batch_iteration,
        all(torch.equal(value, before[name]) for name, value in after.items()),
        math.isfinite(engine.get_global_grad_norm()),
    ]
    losses = train(engine, range(3, 5), samples=2 * engine.world_size)
    return [*found, all(math.isfinite(loss) for loss in losses), engine.was_step_applied()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_of_one_rank_that_is_not_finite_skips_the_update_on_all(stage: int) -> None:
    expected = [1, 4, False, True, 2, True, False, True, True]
    assert run_ranks(2, _skip, stage) == [expected, expected]


def test_in_fp32_the_update_is_taken_as_torch_does() -> None:
    engine = make_engine(config(0, micro=2))
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets) * float("nan"))
    engine.step()
    assert engine.skipped_steps == 0
    assert engine.was_step_applied()


# What a step sends ----------------------------------------------------------------------------------------------------


def _traffic(stage: int, bf16: bool, accumulation: int) -> tuple[dict[str, int], dict[str, int], int, int]:
    engine = make_engine(config(stage, micro=2, accumulation=accumulation, bf16=bf16))
    samples = 2 * accumulation * engine.world_size
    train(engine, range(2), samples=samples)
    before = engine.counters()
    train(engine, range(2, 4), samples=samples)
    traffic = engine.counters().since(before).collectives
    units = units_of(engine)
    return dict(traffic.calls), dict(traffic.bytes), len(units), sum(unit.layout.padded_numel for unit in units)


#: Every pair of stage, bf16 and accumulation.
PAIRS = [(stage, bf16, 3 if (stage + bf16) % 2 else 1) for stage in STAGES for bf16 in (False, True)]


@pytest.mark.parametrize(
    ("stage", "bf16", "accumulation"),
    [
        *PAIRS,
        *(
            pytest.param(stage, bf16, 4 - steps, marks=pytest.mark.soak("all pairs of what differs"))
            for stage, bf16, steps in PAIRS
        ),
    ],
)
def test_a_step_sends_what_the_formula_says(stage: int, bf16: bool, accumulation: int) -> None:
    calls, sent, units, numel = _traffic(stage, bf16, accumulation)
    steps, size = 2, 2 if bf16 else 4
    micro = steps * accumulation
    # Numbers of 8 bytes: those of `StepSums`, and how many parameters they have not used; where gradients
    # are spread, the sum of the norm with them, and before them the norm's largest block with the bounds of a mark of
    # what ranks gathered and wrote; where they are not, that mark and its square.
    if stage == 0:
        expected = {"all_reduce": micro * units + steps}
        expected_bytes = {"all_reduce": micro * numel * size + steps * (NUMBERS + 1 + 2) * 8}
    else:
        expected = {"reduce_scatter": micro * units, "all_reduce": steps * 2}
        expected_bytes = {"reduce_scatter": micro * numel * size, "all_reduce": steps * (NUMBERS + 1 + 4) * 8}
    if stage in (1, 2):
        expected["all_gather"] = steps * units
        expected_bytes["all_gather"] = steps * numel * size
    gathered, gathered_bytes = calls.pop("all_gather", 0), sent.pop("all_gather", 0)
    if stage == 3:
        # Each unit for forward and for backward; what still lies in its slot is not gathered again: the rest unit
        # all step long, and at the turn the units that forward used last.
        assert micro * units <= gathered <= 2 * micro * units
        assert gathered_bytes <= 2 * micro * numel * size
    else:
        assert gathered == expected.pop("all_gather", 0)
        assert gathered_bytes == expected_bytes.pop("all_gather", 0)
    assert calls == expected
    assert sent == expected_bytes


def _gathers() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for layers in (4, 6):
        engine = make_engine(config(3, micro=2), model=TinyGPT(layers=layers))
        train(engine, range(2), samples=2 * engine.world_size)
        before = engine.counters()
        train(engine, range(2, 3), samples=2 * engine.world_size)
        gathers = engine.counters().since(before).collectives.calls["all_gather"]
        units = [unit.name for unit in units_of(engine)]
        found.append((gathers, len(units)))
    return found


def test_stage_3_gathers_each_unit_twice_a_step_but_for_those_that_are_still_there() -> None:
    # embed, blocks, head: twice each, without the two that lie in the slots at the turn; the rest once.
    for calls, units in run_ranks(2, _gathers)[0]:
        shared = units - 1
        assert calls == 2 * shared - 2 + 1


# What a rank holds ----------------------------------------------------------------------------------------------------


def _bytes_held(stage: int, bf16: bool, optimizer: str) -> tuple[int, int]:
    engine = make_engine(config(stage, micro=2, bf16=bf16, optimizer=optimizer))
    train(engine, range(1), samples=2 * engine.world_size)
    step = step_of(engine)
    first = step.units[0]
    prediction = StatePrediction(
        layouts=[unit.layout for unit in step.units],
        has_module=[unit.module is not None for unit in step.units],
        compute=first.shard.dtype,
        master=first.master.dtype,
        states_per_element=states_per_element(engine.optimizer),
        shard_optimizer=step.plan.shard_optimizer,
        shard_gradients=step.plan.shard_gradients,
        shard_parameters=step.plan.shard_parameters,
    )
    scalars = sum(t.nbytes for t in step.optimizer.tensors() if t.ndim == 0)
    return engine.model_state_bytes() - scalars, prediction.total_bytes()


def _all_bytes_held(stage: int) -> list[tuple[int, int]]:
    return [_bytes_held(stage, *case) for case in ((False, "AdamW"), (True, "AdamW"), (True, "SGD"))]


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_the_bytes_that_were_predicted(stage: int) -> None:
    for rank in run_ranks(2, _all_bytes_held, stage):
        assert len(rank) == 3
        for held, predicted in rank:
            assert held == predicted, "exactly, but for scalar step counts"


def _more_ranks_than_elements() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    engine = dsrun.initialize(
        model=model,
        model_parameters=[{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}],
        config=config(3, micro=1),
    )[0]
    losses: list[float] = []
    for _ in range(3):
        loss = engine(torch.ones(2, 3)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_ranks_may_own_nothing() -> None:
    results = run_ranks(3, _more_ranks_than_elements)
    assert results[0] == results[1] == results[2]
    assert results[0][2] < results[0][0]


def test_destroy_leaves_the_process_group() -> None:
    engine = make_engine(config(1, micro=2))
    assert dist.is_initialized()
    engine.destroy()
    assert not dist.is_initialized()


def test_the_process_group_stays_for_as_long_as_an_engine_is_on_it() -> None:
    first, second = make_engine(config(1, micro=2)), make_engine(config(3, micro=2))
    first.destroy()
    first.destroy()
    assert dist.is_initialized()
    train(second, range(1), samples=2)
    second.destroy()
    assert not dist.is_initialized()


def test_a_process_group_of_the_scripts_own_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make_engine(config(1, micro=2)).destroy()
    assert dist.is_initialized()


def _two_engines() -> tuple[list[float], bool, bool]:
    first, second = make_engine(config(2, micro=2)), make_engine(config(2, micro=2))
    train(first, range(1), samples=4)
    first.destroy()
    losses = train(second, range(2), samples=4)
    there = dist.is_initialized()
    second.destroy()
    return losses, there, dist.is_initialized()


def test_an_engine_trains_on_after_another_one_of_its_ranks_has_gone() -> None:
    (losses, there, left), others = run_ranks(2, _two_engines)
    assert (losses, there, left) == others
    assert (len(losses), there, left) == (2, True, False)


def _passing_the_engine_by(stage: int) -> tuple[bool, list[str]]:
    engine = make_engine(config(stage, micro=4))
    train(engine, range(2), samples=4 * engine.world_size)
    inputs, _ = batches(9, samples=2)
    with torch.no_grad():
        direct = engine.module(inputs)
        same = torch.equal(direct, engine(inputs))
    refused: list[str] = []
    position = {"position": torch.zeros(engine.module.position.shape)}
    for misuse in (engine.optimizer.step, lambda: engine.module.load_state_dict(position, strict=False)):
        try:
            misuse()
        except ModelError as error:
            refused.append(str(error).split(":")[0])
    return same, refused


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_module_called_by_itself_reads_the_new_weights_and_what_would_be_lost_is_refused(stage: int) -> None:
    for same, refused in run_ranks(2, _passing_the_engine_by, stage):
        assert same
        assert refused == ["optimizer.step", "TinyGPT.load_state_dict"][: 2 if stage == 3 else 1]
