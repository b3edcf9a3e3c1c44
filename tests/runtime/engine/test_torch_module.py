"""The engine as a torch module, as clients of DeepSpeed use it: a child, walked over, and never converted."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dsrun
from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.errors import ModelError
from dsrun.runtime.engine import generation
from support.core_speed import core_seconds
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import batches, config, make_engine, train

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Scaled(nn.Module):
    """A model with a buffer, a child called `module` and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))
        self.label = "scaled"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x)) * self.scale


def engine_of(model: nn.Module | None = None, *, stage: int = 0) -> Any:
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": {"stage": stage}}
    return dsrun.initialize(model=model or Scaled(), config=settings)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_is_a_child_of_another_module_which_finds_each_parameter_once(stage: int) -> None:
    engine = engine_of(stage=stage)
    parent = nn.Module()
    parent.actor = engine
    assert isinstance(engine, nn.Module)
    assert parent.actor is engine
    assert [name for name, _ in engine.named_children()] == ["module"]
    names = [name for name, _ in parent.named_parameters()]
    assert names == [f"actor.module.{name}" for name, _ in engine.module.named_parameters()]
    assert len(set(map(id, parent.parameters()))) == len(names) == 4
    assert list(engine.modules())[:2] == [engine, engine.module]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_state_dict_of_an_engine_is_the_models_below_module_and_loads_again(stage: int) -> None:
    engine = engine_of(stage=stage)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    assert list(state) == [f"module.{name}" for name in engine.module.state_dict()]
    state["module.head.bias"].fill_(3.0)
    engine.load_state_dict(state)
    assert engine.module.head.bias.item() == 3.0


def test_attributes_that_an_engine_lacks_are_the_models_and_hasattr_is_honest() -> None:
    engine = engine_of()
    assert engine.label == "scaled"
    assert engine.head is engine.module.head
    assert isinstance(engine.module, Scaled)
    assert not hasattr(engine, "generate")
    with pytest.raises(AttributeError, match="neither Engine nor Scaled has `generate`"):
        _ = engine.generate
    with pytest.raises(AttributeError, match="there is no sequence or expert parallelism"):
        _ = engine.get_sequence_parallel_group


def test_train_and_eval_switch_engine_and_model_alike() -> None:
    engine = engine_of()
    assert engine.training
    assert engine.eval() is engine
    assert (engine.training, engine.module.training, engine.head.training) == (False, False, False)
    assert engine.train().module.training


def test_an_engine_over_a_model_in_evaluation_begins_there() -> None:
    assert not engine_of(Scaled().eval()).training


@pytest.mark.parametrize("stage", [0, 3])
def test_moves_and_conversions_that_change_nothing_pass_and_others_are_refused_by_name(stage: int) -> None:
    engine = engine_of(stage=stage)
    parent = nn.Sequential(engine)
    parent.to("cpu").to(torch.float32).float().cpu().to("cpu:0")
    for change in (parent.half, parent.double, lambda: parent.to(torch.bfloat16), engine.bfloat16):
        with pytest.raises(ModelError, match=r"engine: its parameters would get \w+ on cpu in place of float32 on"):
            change()
    for change in (lambda: parent.to_empty(device="cpu"), parent.share_memory):
        with pytest.raises(ModelError, match="would get other memory"):
            change()
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()


def test_engines_are_not_copied_or_pickled() -> None:
    engine = engine_of()
    with pytest.raises(ModelError, match=r"copy.deepcopy: an engine cannot be copied"):
        copy.deepcopy(engine)
    with pytest.raises(ModelError, match="pickle: an engine cannot be pickled"):
        pickle.dumps(engine)


def test_hooks_on_the_engine_run_around_its_forward() -> None:
    engine = engine_of()
    seen: list[str] = []
    engine.register_forward_pre_hook(lambda *_: seen.append("before"))
    engine.register_forward_hook(lambda *_: seen.append("after"))
    engine(torch.ones(1, 4))
    assert seen == ["before", "after"]


def test_zero_grad_takes_torchs_argument() -> None:
    engine = engine_of()
    before = engine.head.bias.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.zero_grad(set_to_none=False)
    engine.backward(engine(torch.zeros(1, 4)).mean() * 0)
    engine.step()
    assert torch.equal(engine.head.bias, before)


def test_a_model_with_an_engine_inside_gets_no_second_engine() -> None:
    parent = nn.Sequential(engine_of())
    with pytest.raises(ModelError, match="has an engine already"):
        engine_of(parent)
    with pytest.raises(ModelError, match="model is an engine; expected a torch"):
        engine_of(engine_of())


@pytest.mark.depends_on_speed("microseconds of a call")
def test_being_a_module_costs_a_call_less_than_20_microseconds() -> None:
    engine = engine_of(nn.Linear(1, 1))
    inputs = torch.ones(1, 1)
    with torch.no_grad():
        through, inner = (
            core_seconds(lambda call=call: [call(inputs) for _ in range(500)], tries=9) / 500
            for call in (engine, engine.forward)
        )
    assert through - inner < 20e-6


def _train_as_a_child(stage: int) -> tuple[list[float], list[float]]:
    alone = train(make_engine(config(stage, micro=2)), range(3), samples=4)
    parent = nn.Module()
    parent.actor = make_engine(config(stage, micro=2))
    parent.train()
    return alone, train(parent.actor, range(3), samples=4)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_trains_the_same_as_a_child_of_another_module(stage: int) -> None:
    for alone, as_child in run_ranks(2, _train_as_a_child, stage):
        assert alone == as_child


def _generate(stage: int, offload: bool) -> dict[str, Any]:
    """Ranks run other numbers of forwards inside `GatheredParameters`, twice, and train in between."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_param"] = {"device": "cpu"}
    engine = make_engine(config(stage, micro=2, zero_optimization=zero))
    twin = make_engine(config(stage, micro=2, zero_optimization=zero))
    found: dict[str, Any] = {"same": [], "losses": [], "calls": []}
    tokens = torch.arange(8).view(2, 4)
    for step in range(2):
        with torch.no_grad():
            wanted = twin.module(tokens)
        with dsrun.zero.unwrap_model_for_generation(engine) as module, torch.no_grad():
            assert module is engine.module
            gathered = engine.counters().collectives.calls
            for _ in range(1 + 3 * engine.global_rank):  # ranks would wait for each other, were any unit gathered
                found["same"].append(torch.equal(module(tokens), wanted))
            found["calls"].append(engine.counters().collectives.calls == gathered)
        found["losses"].append(
            (train(engine, range(step, step + 1), samples=4), train(twin, range(step, step + 1), samples=4))
        )
    return found


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (3, False), (3, True)])
def test_inside_gathered_parameters_each_rank_runs_as_many_forwards_as_it_wants(stage: int, offload: bool) -> None:
    for rank, found in enumerate(run_ranks(2, _generate, stage, offload)):
        assert len(found["same"]) == 2 * (1 + 3 * rank)
        assert all(found["same"])
        assert all(found["calls"])
        assert all(here == there for here, there in found["losses"])


class Talker(nn.Module):
    """A model that generates as transformers' do: `synced_gpus` says whether ranks go on together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.said: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def generate(self, x: torch.Tensor, *, tokens: int, synced_gpus: bool | None = None) -> torch.Tensor:
        self.said.append(synced_gpus)
        for _ in range(tokens):
            x = self(x)
        return x


def _talk(stage: int) -> tuple[list[Any], bool]:
    torch.manual_seed(0)
    model = Talker()
    plain = copy.deepcopy(model)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": {"stage": stage}}
    engine: Any = dsrun.initialize(model=model, config=settings)[0]
    tokens = 2 + 3 * engine.global_rank
    same = torch.equal(
        engine.generate(torch.ones(1, 8), tokens=tokens), plain.generate(torch.ones(1, 8), tokens=tokens)
    )
    engine.generate(torch.ones(1, 8), tokens=2, synced_gpus=True)
    engine.backward(engine(torch.ones(1, 8)).mean())
    engine.step()
    return model.said, same


@pytest.mark.parametrize(("stage", "said"), [(2, [None, True]), (3, [False, True])])
def test_an_engine_generates_with_weights_gathered_once_and_each_rank_on_its_own(stage: int, said: list[Any]) -> None:
    assert run_ranks(2, _talk, stage) == [(said, True)] * 2


def _twice(stage: int, stands: bool) -> list[list[float]]:
    if stands:
        os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    losses: list[list[float]] = []
    for is_evaluated_first in (False, True):
        torch.manual_seed(7)
        model = TinyGPT()
        if is_evaluated_first:
            first: Any = dsrun.initialize(
                model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
            )[0]
            with torch.no_grad():
                first(batches(0, samples=2)[0])
        engine = make_engine(config(stage, micro=2), model=model)
        losses.append(train(engine, range(2), samples=4))
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_evaluates_makes_room_for_one_that_trains_where_dsrun_stands_for_deepspeed(
    stage: int,
) -> None:
    with pytest.raises(AssertionError, match="has an engine already"):
        run_ranks(2, _twice, stage, False)
    for plain, after_evaluation in run_ranks(2, _twice, stage, True):
        assert plain == after_evaluation


def _use_destroyed(stage: int) -> dict[str, str]:
    engine = make_engine(config(stage, micro=2))
    tokens = batches(0, samples=2)[0]
    loss = engine(tokens).sum()
    engine.destroy()
    said: dict[str, str] = {}
    for name, call in {
        "engine(...)": lambda: engine(tokens),
        "engine.backward": lambda: engine.backward(loss),
        "engine.step": engine.step,
        "engine.save_checkpoint": lambda: engine.save_checkpoint("nowhere"),
        "engine.load_checkpoint": lambda: engine.load_checkpoint("nowhere"),
        "engine.module_state_dict": engine.module_state_dict,
    }.items():
        try:
            call()
        except ModelError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_destroyed_engine_refuses_by_name_what_needs_other_ranks(stage: int) -> None:
    alone = {"engine(...)", "engine.module_state_dict"}  # the module is an ordinary one again
    for said in run_ranks(2, _use_destroyed, stage):
        assert all(text.startswith(f"{name}: the engine has been destroyed") for name, text in said.items())
        names = {"engine.backward", "engine.step", "engine.save_checkpoint", "engine.load_checkpoint"}
        assert said.keys() == (names | alone if stage == 3 else names)


def _destroy_the_old_one(stage: int) -> tuple[bool, str]:
    os.environ[AS_DEEPSPEED_ENV] = "0.19.8"
    model = TinyGPT()
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    first: Any = dsrun.initialize(model=model, config=settings)[0]
    engine = make_engine(config(stage, micro=2), model=model)
    first.destroy()  # whoever made it; the second engine has ended it already
    train(engine, range(1), samples=4)
    has_grad = dsrun.utils.safe_get_full_grad(next(model.parameters())) is not None
    try:
        make_engine(config(stage, micro=2), model=nn.Sequential(model))  # which the engine has a part of
    except ModelError as error:
        return has_grad, str(error)
    return has_grad, ""


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_made_room_may_be_destroyed_and_the_next_one_keeps_the_model(stage: int) -> None:
    for has_grad, said in run_ranks(2, _destroy_the_old_one, stage):
        assert has_grad
        assert "has an engine already" in said


class Mute(nn.Module):
    """A model that generates and knows no word by which ranks stay in step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def _without_room(kind: str) -> Any:
    generation._PART_FOR_WEIGHTS = 0.0
    model: Any = Talker() if kind == "talker" else Mute()
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": {"stage": 3}}
    engine: Any = dsrun.initialize(model=model, config=settings)[0]
    if kind == "talker":
        engine.generate(torch.ones(1, 8), tokens=2)
        return model.said
    try:
        engine.generate(torch.ones(1, 8))
    except ModelError as error:
        return str(error)
    return ""


def test_where_the_whole_weights_do_not_fit_ranks_stay_in_step_or_are_refused() -> None:
    assert run_ranks(2, _without_room, "talker") == [[True]] * 2
    for said in run_ranks(2, _without_room, "mute"):
        assert said.startswith("engine.generate: the whole weights take ")
        assert "has no `synced_gpus`" in said


def _tied(stage: int) -> list[bool]:
    """A head that reads the embedding's weight outside of its unit, half a unit opened, and forwards with a graph."""
    engine = make_engine(config(stage, micro=2, gradient_clipping=0.0), model=Tied())
    tokens = torch.arange(8).view(2, 4)
    same: list[bool] = []
    with torch.no_grad():
        wanted = engine.module(tokens)
    weights = list(engine.module.parameters())
    with dsrun.zero.GatheredParameters(weights), torch.no_grad():
        for _ in range(1 + 2 * engine.global_rank):
            same.append(torch.equal(engine.module(tokens), wanted))
    with dsrun.zero.GatheredParameters(weights[:1]), torch.no_grad():  # the units are gathered as always
        same.append(torch.equal(engine.module(tokens), wanted))
    with dsrun.zero.GatheredParameters(weights):
        with torch.no_grad():
            same.append(torch.equal(engine.module(tokens), wanted))
        with torch.enable_grad():
            same.append(torch.equal(engine(tokens).detach(), wanted))
    loss = engine(tokens).mean()
    engine.backward(loss)
    engine.step()
    return [*same, bool(loss.detach() == wanted.mean())]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.embedding.weight.T


def test_weights_that_are_read_outside_of_their_unit_are_read_where_they_were_gathered() -> None:
    for same in run_ranks(2, _tied, 3):
        assert all(same)


def test_the_optimizer_moves_its_states_out_and_back_as_the_engine_does() -> None:
    engine = make_engine(config(2, micro=2))
    train(engine, range(1), samples=2)
    assert engine.optimizer.offload_states(include=["optim_states", "hp_params"], device="cpu") > 0
    with pytest.raises(ModelError, match="states are in host memory"):
        train(engine, range(1, 2), samples=2)
    engine.optimizer.reload_states()
    train(engine, range(1, 2), samples=2)
    assert not hasattr(engine.optimizer, "parameter_offload")


def test_hooks_of_stage_3_may_be_taken_off_and_put_on_as_trl_does() -> None:
    pytest.importorskip("trl", reason="trl is not installed; pip install -e '.[test-clients]'")
    from trl.models.utils import add_hooks, remove_hooks

    before = train(make_engine(config(3, micro=2)), range(1), samples=2)
    engine = make_engine(config(3, micro=2))
    remove_hooks(engine)
    add_hooks(engine)
    assert train(engine, range(1), samples=2) == before
