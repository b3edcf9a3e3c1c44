"""A model, a config and an optimizer in any accepted form become an engine; anything else is refused by name."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

import dsrun
from dsrun.contract.environment import CONFIG_ENV
from dsrun.errors import ConfigError, InputError, ModelError
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train


def gpt(seed: int = 7) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT()


def without_optimizer(stage: int = 1, **more: Any) -> dict[str, Any]:
    settings = config(stage, micro=6, gradient_clipping=0, **more)
    del settings["optimizer"]
    return settings


def refuse(match: str, **arguments: Any) -> InputError:
    with pytest.raises(InputError, match=match) as caught:
        dsrun.initialize(**arguments)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


# What is refused ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused() -> None:
    settings = config(1, micro=6)
    refuse("model is None", config=settings)
    refuse("none of the 0 parameters of ReLU is trainable", model=nn.ReLU(), config=settings)
    refuse("none of the 38 parameters of TinyGPT is trainable", model=gpt().requires_grad_(False), config=settings)
    foreign = optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    said = r"^optimizer: group 0 holds a tensor of shape \(3,\) that is no parameter of TinyGPT"
    refuse(said, model=gpt(), config=settings, optimizer=foreign)
    said = r"^model_parameters: group 0 holds a tensor of shape \(3,\) that is no parameter of TinyGPT"
    refuse(said, model=gpt(), config=settings, model_parameters=foreign.param_groups[0]["params"])
    error = refuse("model is the class ReLU; expected a torch.nn.Module", model=nn.ReLU, config=settings)
    assert error.hint == "pass a model of that class, ReLU(...)"


def test_one_config_is_needed_and_only_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    settings = config(1, micro=6)
    refuse("no config was given", model=gpt())
    refuse("2 different configs were given", model=gpt(), config=settings, config_params={**settings, "x": 1})
    args = Namespace(deepspeed_config="a.json")
    refuse("2 different configs were given", model=gpt(), config="b.json", args=args)
    with pytest.raises(ConfigError, match=r"a\.json"):
        dsrun.initialize(args=args, model=gpt())
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    parser = dsrun.add_config_arguments(ArgumentParser())
    for arguments in (
        {"config": str(path)},
        {"config": path, "config_params": path},
        {"args": parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])},
        {"args": {"deepspeed_config": str(path)}},
    ):
        assert dsrun.initialize(model=gpt(), **arguments)[0].train_batch_size() == 6
    monkeypatch.setenv(CONFIG_ENV, str(path))
    assert dsrun.initialize(model=gpt())[0].zero_optimization_stage() == 1


def test_schedules_and_optimizers_that_do_not_go_together_are_refused() -> None:
    schedule = {"type": "WarmupLR", "params": {}}
    refuse("there is a schedule, and no optimizer", model=gpt(), config=without_optimizer(scheduler=schedule))
    model = gpt()
    stepped = optim.AdamW(model.parameters())
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    stepped.step()
    refuse("this AdamW holds state already", model=model, optimizer=stepped, config=without_optimizer())
    refuse("Adafactor is not known", model=gpt(), optimizer=optim.Adafactor, config=without_optimizer())


# Optimizers and schedules of the script -------------------------------------------------------------------------------


class Lion(optim.Optimizer):
    """An optimizer of the script's own, elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    param.add_(param.grad.sign(), alpha=-group["lr"])


def test_an_untested_optimizer_is_taken_where_the_config_allows_it() -> None:
    model = gpt()
    refuse("Lion is not known", model=model, optimizer=Lion(model.parameters()), config=without_optimizer())
    losses: list[list[float]] = []
    for stage in (0, 3):
        settings = without_optimizer(stage, zero_allow_untested_optimizer=True)
        engine, optimizer, _, _ = dsrun.initialize(model=gpt(), optimizer=Lion, config=settings)
        assert isinstance(optimizer, Lion)
        losses.append(train(engine, range(4), samples=6))
    assert losses[0] == losses[1]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_groups_are_kept_in_every_form(stage: int) -> None:
    """As model_parameters, in an optimizer object, and through a function: all the same training."""
    results: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for form in ("config", "object", "function"):
        model = gpt()
        groups = decay_groups(model)
        if form == "config":
            settings = config(stage, micro=6, gradient_clipping=0)
            engine, optimizer, _, _ = dsrun.initialize(model=model, model_parameters=groups, config=settings)
        elif form == "object":
            given = optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
            engine, optimizer, _, _ = dsrun.initialize(model=model, optimizer=given, config=without_optimizer(stage))
            assert optimizer is given is engine.optimizer
        else:
            engine, optimizer, _, _ = dsrun.initialize(
                model=model,
                model_parameters=groups,
                optimizer=lambda g: optim.AdamW(g, lr=1e-2, weight_decay=0.1, fused=True),
                config=without_optimizer(stage),
            )
        assert optimizer is not None
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
        assert engine.get_lr() == [1e-2, 3e-2]
        results.append((train(engine, range(4), samples=6), full_parameters(engine)))
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(weights[name], value) for name, value in results[0][1].items())


@pytest.mark.parametrize("form", ["object", "function"])
def test_schedules_of_torch_drive_the_rate(form: str) -> None:
    model = gpt()
    given = optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = (
        optim.lr_scheduler.StepLR(given, step_size=2, gamma=0.5)
        if form == "object"
        else lambda optimizer: optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    )
    engine, _, _, returned = dsrun.initialize(
        model=model, optimizer=given, lr_scheduler=scheduler, config=without_optimizer()
    )
    assert returned is engine.lr_scheduler
    rates: list[float] = []
    for step in range(5):
        rates += engine.get_lr()
        train(engine, range(step, step + 1), samples=6)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_the_configs_schedule_takes_the_optimizers_rate() -> None:
    for kind, params in (
        ("WarmupLR", {"warmup_num_steps": 2}),
        ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 2}),
        ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 2}),
    ):
        engine = make_engine(config(1, micro=6, scheduler={"type": kind, "params": params}))
        assert engine.get_lr() == [0.0]
        train(engine, range(3), samples=6)
        assert 0.008 < engine.get_lr()[0] <= 0.01


# What comes back, and what is taken over ------------------------------------------------------------------------------


def test_the_four_things_come_back() -> None:
    data = TensorDataset(torch.zeros(12, 2))
    engine, optimizer, loader, scheduler = dsrun.initialize(
        model=gpt(), training_data=data, config=config(2, micro=3, accumulation=2)
    )
    assert isinstance(engine, dsrun.Engine)
    assert (engine.optimizer, engine.training_dataloader, scheduler) == (optimizer, loader, None)
    assert loader is not None
    assert len(loader) == 4
    assert next(iter(loader))[0].shape == (3, 2)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6, 2)


def test_a_batch_size_left_to_the_script_is_an_input_error() -> None:
    settings = config(1, micro=6)
    settings["train_micro_batch_size_per_gpu"] = "auto"
    refuse("batch", model=gpt(), config=settings)


@pytest.mark.parametrize("stage", [0, 3])
def test_values_move_into_flat_buffers_unchanged_in_any_dtype(stage: int) -> None:
    model = gpt()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = model.blocks[0].requires_grad_(False)
    casts = config(stage, micro=6, data_types={"param_dtype": "fp32"})
    engine = dsrun.initialize(model=model.double(), config=casts)[0]
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, expected[name]), name
    assert all(p.dtype == torch.float32 for p in frozen.parameters())
    assert engine.module.scale.dtype == torch.float32
    train(engine, range(1), samples=6)


def _ranks_start_from_rank_0(stage: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    info = dsrun.init_distributed()
    model = gpt(seed=info.rank)
    model.scale.fill_(info.rank + 2.0)
    engine = dsrun.initialize(model=model, config=config(stage, micro=3))[0]
    return full_parameters(engine), engine.module.scale


@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_starts_from_rank_0s_values(stage: int) -> None:
    expected = dict(gpt(seed=0).named_parameters())
    for weights, scale in run_ranks(2, _ranks_start_from_rank_0, stage):
        assert all(torch.equal(weights[name], param) for name, param in expected.items())
        assert scale == 2.0


def _disagree(what: str) -> str:
    info = dsrun.init_distributed()
    odd = info.rank == 1
    settings = config(2, micro=3)
    model = TinyGPT(layers=3 if odd and what == "model" else 2)
    arguments: dict[str, Any] = {}
    if odd and what == "frozen":
        model.blocks[0].requires_grad_(False)
    if odd and what == "buffer":
        model.register_buffer("more", torch.zeros(3))
    if odd and what == "config":
        settings["gradient_clipping"] = 0.5
    if what == "groups":
        arguments["model_parameters"] = [{"params": model.parameters()}]
        if odd:
            arguments["model_parameters"] = decay_groups(model)
    if what == "optimizer":
        del settings["optimizer"]
        if odd:
            arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "data":
        arguments["training_data"] = TensorDataset(torch.zeros(60 + info.rank, 2))
    with pytest.raises(ModelError) as caught:
        dsrun.initialize(model=model, config=settings, **arguments)
    return str(caught.value)


def test_ranks_that_differ_are_named_on_every_rank() -> None:
    for what, difference in {
        "model": 'the model\'s parameters: `[24]` is "norm.weight" on rank 0 and "blocks.2.norm_1.weight" there',
        "frozen": "parameters: `blocks.0.norm_1.weight.requires_grad` is true on rank 0 and false there",
        "buffer": 'rank 1 in the model\'s buffers: `[1]` is absent on rank 0 and "more" there',
        "config": "rank 1 in the config: `gradient_clipping` is 0.7 on rank 0 and 0.5 there",
        "groups": "rank 1 in the optimizer's groups: `blocks.0.norm_1.weight.group` is 0 on rank 0 and 1 there",
        "optimizer": "rank 1 in whether there is an optimizer: is false on rank 0 and true there",
        "data": "rank 1 in the length of training_data: is 60 on rank 0 and 61 there",
    }.items():
        texts = run_ranks(2, _disagree, what)
        assert texts[0] == texts[1]
        assert difference in texts[0]
        assert "do not agree with rank 0: rank 1 in " in texts[0]
