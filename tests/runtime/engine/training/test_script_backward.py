"""Backwards that a script runs itself count as the engine's own do, to the bit, at every stage, dtype and offload."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsrun
from dsrun.errors import InputError, ModelError
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine

STAGES = (0, 1, 2, 3)
WIDTH = 8


class Small(nn.Module):
    """Every parameter is in the rest unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.second = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gain)


def gpt() -> TinyGPT:
    return TinyGPT(layers=2)


def micro_step(engine: Any, seed: int, *, script: bool) -> None:
    inputs, targets = batches(seed, samples=4)
    share = slice(2 * engine.global_rank, 2 * engine.global_rank + 2)
    loss = loss_of(engine(inputs[share]), targets[share])
    if script:
        engine.scale(loss).backward()
    else:
        engine.backward(loss)
    assert all(param.grad is None for param in engine.module.parameters())
    engine.step()


def both_ways(settings: dict[str, Any], *, model: Any = gpt, steps: int = 4) -> None:
    """Trains by the engine's backward, and mostly by the script's: `steps` micro steps."""
    found: list[dict[str, Tensor]] = []
    for turns in ([False], [True, True, False]):
        torch.manual_seed(7)
        engine = make_engine(settings, model=model())
        for seed in range(steps):
            micro_step(engine, seed, script=turns[seed % len(turns)])
        found.append(full_parameters(engine))
        engine.destroy()
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


def offloaded(stage: int, settings: dict[str, Any], **sections: Any) -> dict[str, Any]:
    settings["zero_optimization"] = {"stage": stage, **sections}
    return settings


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_of_the_scripts_own_counts_as_the_engines_does(stage: int) -> None:
    both_ways(config(stage, micro=2, accumulation=2))


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 2}}


@pytest.mark.parametrize(
    ("stage", "bits"),
    [
        (0, FP16),
        (1, {"bf16": True, "accumulation": 2}),
        (2, FP16),
        (3, {"bf16": True, "accumulation": 2}),
        *(
            pytest.param(stage, bits, marks=pytest.mark.soak("each stage in one of two formats, each twice"))
            for stage, bits in (
                (0, {"bf16": True, "accumulation": 2}),
                (1, FP16),
                (2, {"bf16": True, "accumulation": 2}),
                (3, FP16),
            )
        ),
    ],
)
def test_it_counts_in_16_bits_and_with_the_loss_scale_that_engine_scale_gives(stage: int, bits: dict[str, Any]) -> None:
    both_ways(config(stage, micro=2, **bits))


OFFLOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "optimizer on the host": (1, {"offload_optimizer": {"device": "cpu"}}),
    "super-offload": (2, {"offload_optimizer": {"device": "cpu", "super_offload": True}}),
    "parameters and optimizer on the host": (
        3,
        {"offload_optimizer": {"device": "cpu", "super_offload": True}, "offload_param": {"device": "cpu"}},
    ),
    "on a drive": (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
}


@pytest.mark.parametrize("name", OFFLOADS)
def test_it_counts_where_the_optimizer_or_parameters_are_elsewhere(name: str, tmp_path: Path) -> None:
    stage, sections = OFFLOADS[name]
    placed = {
        key: {**where, **({"nvme_path": str(tmp_path)} if where["device"] == "nvme" else {})}
        for key, where in sections.items()
    }
    both_ways(offloaded(stage, config(stage, micro=2, accumulation=2, bf16=True), **placed))


def _both_ways_on_this_rank() -> None:
    for stage in STAGES:
        both_ways(config(stage, micro=2), steps=3)


def test_it_counts_on_several_ranks() -> None:
    run_ranks(2, _both_ways_on_this_rank)


# Beside plain torch ---------------------------------------------------------------------------------------------------


def settings_of(stage: int, **more: Any) -> dict[str, Any]:
    return {**config(stage, micro=1, optimizer="SGD"), "gradient_clipping": 0, **more}


def small(stage: int, seed: int = 7, **more: Any) -> Any:
    return make_engine(settings_of(stage, **more), model=plain(seed))


def plain(seed: int = 7) -> Small:
    torch.manual_seed(seed)
    return Small()


def x(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_gradients(engine: Any, model: nn.Module, *, divided_by: float = 1.0) -> None:
    """The gradients that the next step takes are those of a plain model."""
    names = dict(model.named_parameters())
    for name, param in engine.module.named_parameters():
        found = dsrun.zero.safe_get_full_grad(param)
        wanted = names[name].grad
        assert found is not None, name
        assert wanted is not None, name
        torch.testing.assert_close(found, wanted / divided_by, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_without_units_counts_whatever_its_loss_reads(stage: int) -> None:
    """Small leftovers alone; a backward of a tensor with a gradient; a penalty past the model, before and after."""
    engine, model = small(stage), plain()
    for seed in range(2):
        for each in (engine, model):
            each(x(seed)).square().mean().backward()
            each(x(seed + 5)).backward(torch.full((3, 1), 0.5))
            (each(x(seed)).mean() * getattr(each, "module", each).gain.sum()).backward()
        assert_gradients(engine, model)
        engine.step()
        model.load_state_dict(full_parameters(engine))
        model.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_penalty_that_the_script_takes_past_the_model_counts(stage: int, last: bool) -> None:
    engine, model = small(stage, gradient_accumulation_steps=2), plain()
    engine.set_gradient_accumulation_boundary(True)

    def penalty(module: Any) -> None:
        (0.1 * module.second.weight.square().sum()).backward()

    if not last:
        penalty(engine.module)
    engine.backward(engine(x(0)).square().mean())
    if last:
        penalty(engine.module)
    engine.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1, momentum=0.9)
    penalty(model)
    model(x(0)).square().mean().backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad /= 2
    optimizer.step()
    for name, value in full_parameters(engine).items():
        torch.testing.assert_close(value, dict(model.named_parameters())[name])


@pytest.mark.parametrize("stage", STAGES)
def test_one_loss_through_several_engines_counts_for_each(stage: int) -> None:
    """Side by side, and one behind the other; each divides by its own accumulation steps."""
    engines = small(stage, 7, gradient_accumulation_steps=2), small(stage, 8, gradient_accumulation_steps=4)
    models = plain(7), plain(8)
    for actor, critic in (engines, models):
        (actor(x(0)).square().mean() + critic(x(1)).square().mean()).backward()
        critic(actor(x(2)) * torch.ones(WIDTH)).mean().backward()
    assert_gradients(engines[0], models[0], divided_by=2)
    assert_gradients(engines[1], models[1], divided_by=4)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_no_backward_into_gradients_stays_what_it_is(stage: int) -> None:
    engine, judge = make_engine(config(stage, micro=2), model=gpt()), small(stage, 8)
    inputs, targets = batches(0, samples=2)
    loss = loss_of(engine(inputs), targets)
    assert torch.autograd.grad(loss, engine.module.position)[0].any()
    embedded = torch.randn(1, WIDTH, requires_grad=True)
    judge(embedded).sum().backward(inputs=[embedded])
    assert embedded.grad is not None
    maker = small(stage, 9)
    maker.backward(judge(maker(x(0)) * torch.ones(WIDTH)).mean())  # what the judge gets there is not its own
    for each in (engine, judge):
        with pytest.raises(ModelError, match="no backward through the engine's model"):
            each.step()
        assert all(param.grad is None for param in each.module.parameters())
    maker.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_that_is_kept_may_be_gone_through_again(stage: int) -> None:
    found: list[dict[str, Tensor]] = []
    for script in (False, True):
        torch.manual_seed(7)
        engine = make_engine(config(stage, micro=2, accumulation=2), model=gpt())
        for seed in range(2):
            inputs, targets = batches(seed, samples=2)
            loss = loss_of(engine(inputs), targets)
            if script:
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                engine.backward(loss, retain_graph=True)
                engine.backward(loss)
            engine.step()
        assert engine.global_steps == 1
        found.append(full_parameters(engine))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("stage", STAGES)
def test_inside_no_sync_it_stays_or_is_reduced_as_the_engines(stage: int) -> None:
    found: list[dict[str, Tensor]] = []
    for script in (False, True):
        torch.manual_seed(7)
        engine = make_engine(config(stage, micro=2, accumulation=4), model=gpt())
        engine.set_gradient_accumulation_boundary(True)
        with engine.no_sync():
            for seed in range(3):
                inputs, targets = batches(seed, samples=2)
                loss = loss_of(engine(inputs), targets)
                loss.backward() if script and seed != 1 else engine.backward(loss)
        engine.step()
        found.append(full_parameters(engine))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


# Refused, and failed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_without_the_loss_scale_is_refused_and_changes_nothing(stage: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    engine = make_engine(config(stage, micro=2, fp16=fp16), model=gpt())
    inputs, targets = batches(0, samples=2)
    with pytest.raises(ModelError, match=r"has not been multiplied by the loss scale, 256") as caught:
        loss_of(engine(inputs), targets).backward()
    assert "engine.scale(loss).backward()" in str(caught.value.hint)
    with pytest.raises(ModelError, match="no backward through the engine's model"):
        engine.step()
    scaled = engine.scale(loss_of(engine(inputs), targets))
    for again in (engine.scale, engine.backward):
        with pytest.raises(ModelError, match="multiplied by a loss scale already"):
            again(scaled)
    scaled.backward()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_gradients_is_refused(stage: int) -> None:
    engine = small(stage)
    with pytest.raises(ModelError, match="create_graph=True"):
        engine(x(0)).sum().backward(create_graph=True)
    with pytest.raises(ModelError, match="expected a scalar"):
        engine.scale(engine(x(0)))
    engine(x(0)).sum().backward()
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("script", [False, True])
def test_a_graph_from_before_the_last_step_is_refused(stage: int, script: bool) -> None:
    engine = make_engine(config(stage, micro=2), model=gpt())
    inputs, targets = batches(0, samples=2)
    losses = [loss_of(engine(inputs), targets) for _ in range(2)]
    engine.backward(losses[0])
    engine.step()
    with pytest.raises(ModelError, match=r"a forward (of `head` )?from before the last engine\.step") as caught:
        losses[1].backward() if script else engine.backward(losses[1])
    assert "detach()" in str(caught.value.hint)
    micro_step(engine, 1, script=script)
    assert engine.global_steps == 2


def _fail(grad: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("stage", STAGES)
def test_one_that_raises_leaves_the_engine_as_one_of_the_engines_does(stage: int) -> None:
    found: list[dict[str, Tensor]] = []
    for fails in (False, True):
        torch.manual_seed(7)
        engine = make_engine(config(stage, micro=2), model=gpt())
        if fails:
            inputs, targets = batches(0, samples=2)
            loss = loss_of(engine(inputs), targets)
            handle = engine.module.blocks[0].down.weight.register_hook(_fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            with pytest.raises(ModelError, match="no backward through the engine's model"):
                engine.step()
        for seed in range(2):
            micro_step(engine, seed, script=True)
        found.append(full_parameters(engine))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("stage", STAGES)
def test_with_its_engine_gone_a_backward_is_refused_until_the_model_has_another(stage: int) -> None:
    """Where torch would leave gradients, none are there: an optimizer of the script's own would train nothing."""
    model = plain()
    engine = make_engine(settings_of(stage), model=model)
    engine(x(0)).sum().backward()
    del engine
    gc.collect()
    with pytest.raises(ModelError, match="the engine of the model is gone") as caught:
        model(x(0)).sum().backward()
    assert "destroy()" in str(caught.value.hint)
    assert all(param.grad is None for param in model.parameters())
    embedded = torch.randn(1, WIDTH, requires_grad=True)
    assert torch.autograd.grad(model(embedded).sum(), embedded)[0].any()
    maker = small(stage, 9)
    maker.backward(model(maker(x(0)) * torch.ones(WIDTH)).mean())  # another engine's own has no part in it
    maker.step()
    engine = make_engine(settings_of(stage), model=model)
    engine(x(0)).sum().backward()
    engine.step()
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_forgotten_by_the_engine_alone(stage: int) -> None:
    """Loops written for torch call `zero_grad` of the others, some of them at every micro step."""
    found: list[dict[str, Tensor]] = []
    for forgets in (None, "others", "engine"):
        engine = small(stage, gradient_accumulation_steps=2)
        engine.set_gradient_accumulation_boundary(True)
        engine(x(0)).square().mean().backward()
        if forgets == "others":
            engine.module.zero_grad()
            engine.optimizer.zero_grad()
        elif forgets == "engine":
            engine.zero_grad()
        engine(x(1)).square().mean().backward()
        engine.step()
        found.append(full_parameters(engine))
    kept, others, forgotten = found
    for name, value in kept.items():
        assert torch.equal(others[name], value), name
    assert not torch.equal(forgotten["second.weight"], kept["second.weight"])


# The boundary, and what is reported -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_that_owns_the_boundary_updates_at_every_step(stage: int) -> None:
    torch.manual_seed(7)
    model = gpt()
    engine = make_engine(
        config(stage, micro=2, accumulation=2, managed_gradient_accumulation=False), model=copy.deepcopy(model)
    )
    counted = make_engine(config(stage, micro=2, accumulation=2), model=model)
    for each in (engine, counted):
        counted.set_gradient_accumulation_boundary(True)
        for backwards in (1, 3, 2):
            for seed in range(backwards):
                inputs, targets = batches(seed, samples=2)
                loss = loss_of(each(inputs), targets)
                assert each is counted or not engine.is_gradient_accumulation_boundary()
                loss.backward() if seed == 1 else each.backward(loss)
            each.step()
    for name, value in full_parameters(counted).items():
        assert torch.equal(full_parameters(engine)[name], value), name
    assert (engine.global_steps, engine.global_samples, counted.global_samples) == (3, 12, 12)
    with pytest.raises(InputError, match="`managed_gradient_accumulation` is false"):
        engine.set_gradient_accumulation_boundary(True)


def test_the_loss_is_reported_where_it_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = small(1, steps_per_print=1)
    for way in range(3):
        loss = engine(x(0)).square().mean()
        if way == 2:
            engine.backward(loss)
        else:
            (engine.scale(loss) if way else loss).backward()
        engine.step()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["loss not seen" in line for line in lines] == [True, False, False]
    assert "loss 0." in lines[1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_inside_no_sync_is_refused(stage: int) -> None:
    engine = small(stage)
    with engine.no_sync():
        engine.backward(engine(x(0)).sum())
        with pytest.raises(ModelError, match=r"engine\.step: called inside engine\.no_sync"):
            engine.step()
    engine.step()
    assert engine.global_steps == 1


def _gradients_inside_no_sync() -> None:
    for stage in STAGES:
        engine, model = small(stage), plain()
        rank = engine.global_rank
        engine.backward(engine(x(rank)).sum())
        with engine.no_sync():
            engine.backward(engine(x(rank + 2)).sum())
            for seed in range(4):
                (model(x(seed)).sum() / 2).backward()
            assert_gradients(engine, model)
            for name, param in engine.module.named_parameters():
                piece, wanted = dsrun.zero.safe_get_local_grad(param), dict(model.named_parameters())[name].grad
                assert piece is not None
                assert wanted is not None
                if piece.numel() == wanted.numel():
                    torch.testing.assert_close(piece, wanted.reshape(-1), rtol=1e-6, atol=1e-6)
        engine.step()


def test_gradients_can_be_read_inside_no_sync_at_every_stage() -> None:
    run_ranks(2, _gradients_inside_no_sync)


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_the_step_is_refused_where_a_model_has_no_units(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    settings = config(stage, micro=2)
    engine = dsrun.initialize(model=model, config=settings)[0]
    first, second = (engine(torch.randn(2, 8)).square().mean() for _ in range(2))
    engine.backward(first)
    engine.step()
    with pytest.raises(ModelError, match=r"goes through a forward from before the last engine\.step"):
        engine.backward(second)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    assert engine.global_steps == 2
