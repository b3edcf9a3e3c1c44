"""What scripts do with an engine, at every stage, beside plain torch: what the tests of the parts do not show.

Models in forward and backward are in zero/hooks/test_modules.py and test_odd_models.py, compiled ones in
zero/test_compile.py, experts in zero/units/test_leaves.py, and what is refused in test_ownership.py and
test_guard.py.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

import dsrun
from dsrun.errors import InputError, ModelError
from support.models import TinyGPT, loss_of
from support.training import batches, config, full_parameters, make_engine

STAGES = (0, 1, 2, 3)
#: Sizes without vector tails, see engine/test_exactness.py.
ROUND = {"width": 64, "vocab": 64, "odd": 0}


def gpt(**options: Any) -> TinyGPT:
    torch.manual_seed(7)
    return TinyGPT(**{"layers": 2, **options})


def loss(model: Any, seed: int) -> Tensor:
    inputs, targets = batches(seed, samples=2)
    return loss_of(model(inputs), targets)


def without_optimizer(stage: int, **more: Any) -> dict[str, Any]:
    settings = config(stage, micro=2, gradient_clipping=0, **more)
    del settings["optimizer"]
    return settings


def assert_weights(engine: Any, model: nn.Module, where: str) -> None:
    for name, value in full_parameters(engine).items():
        assert torch.equal(value, dict(model.named_parameters())[name]), f"{where}: {name}"


# Optimizers and groups ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam, amsgrad": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True, foreach=False),
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "SGD, nesterov": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True, foreach=False),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2, foreach=False),
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.5, foreach=False),
    "Adamax": lambda params: optim.Adamax(params, lr=1e-2, foreach=False),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2, foreach=False),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2, foreach=False),
    "ASGD": lambda params: optim.ASGD(params, lr=1e-2, foreach=False),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *(pytest.param(name, (number % 4,), id=name) for number, name in enumerate(OPTIMIZERS)),
        *(
            pytest.param(name, STAGES, id=f"{name}-all", marks=pytest.mark.soak("each at one stage, in turn"))
            for name in OPTIMIZERS
        ),
    ],
)
def test_optimizers_of_torch_train_as_on_whole_tensors(name: str, stages: tuple[int, ...]) -> None:
    plain = gpt(**ROUND)
    theirs = OPTIMIZERS[name](plain.parameters())
    for seed in range(3):
        loss(plain, seed).backward()
        theirs.step()
        theirs.zero_grad()
    for stage in stages:
        engine = dsrun.initialize(model=gpt(**ROUND), optimizer=OPTIMIZERS[name], config=without_optimizer(stage))[0]
        for seed in range(3):
            engine.backward(loss(engine, seed))
            engine.step()
        assert_weights(engine, plain, f"stage {stage}")


@pytest.mark.parametrize("stage", STAGES)
def test_groups_over_trained_and_frozen_parameters_keep_their_options(stage: int) -> None:
    """A group of frozen parameters alone stays a group, so that schedules over groups fit."""

    def groups(model: TinyGPT) -> list[dict[str, Any]]:
        model.blocks[1].requires_grad_(False)
        model.head.requires_grad_(False)
        rest = [p for name, p in model.named_parameters() if not name.startswith(("head", "blocks"))]
        return [
            {"params": list(model.head.parameters()), "lr": 0.5},
            {"params": list(model.blocks.parameters()), "lr": 1e-2, "weight_decay": 0.3},
            {"params": rest, "lr": 3e-2, "weight_decay": 0.0},
        ]

    plain, model = gpt(**ROUND), gpt(**ROUND)
    theirs = optim.AdamW(groups(plain), fused=True)
    engine = dsrun.initialize(
        model=model,
        model_parameters=groups(model),
        optimizer=lambda given: optim.AdamW(given, fused=True),
        config=without_optimizer(stage),
    )[0]
    assert engine.get_lr() == [0.5, 1e-2, 3e-2]
    for seed in range(3):
        loss(plain, seed).backward()
        theirs.step()
        theirs.zero_grad()
        engine.backward(loss(engine, seed))
        engine.step()
    assert_weights(engine, plain, f"stage {stage}")
    state = engine.module_state_dict()
    assert state is not None
    for name, param in plain.named_parameters():
        assert torch.equal(state[name], param), name


def test_momentum_is_told_in_the_words_of_the_optimizer() -> None:
    assert make_engine(config(1, micro=2)).get_mom() == [(0.9, 0.999)]
    assert make_engine(config(1, micro=2, optimizer="SGD")).get_mom() == [0.9]
    assert dsrun.initialize(model=gpt(), config=without_optimizer(1))[0].get_mom() == []


class Counting(optim.lr_scheduler.LRScheduler):
    """A schedule whose step says by how much, as Megatron's does."""

    counted = 0

    def get_lr(self) -> list[float]:
        return [0.1 for _ in self.base_lrs]

    def step(self, increment: int = 0) -> None:  # type: ignore[override]
        self.counted += increment
        super().step()


def test_words_for_the_schedule_reach_it_on_the_boundary() -> None:
    engine = dsrun.initialize(
        model=gpt(),
        optimizer=optim.SGD,
        lr_scheduler=Counting,
        config=without_optimizer(1, gradient_accumulation_steps=2),
    )[0]
    for seed in range(4):
        engine.backward(loss(engine, seed))
        engine.step(lr_kwargs={"increment": 32})
    assert engine.lr_scheduler.counted == 64


def test_the_optimizer_says_that_an_update_was_left_out() -> None:
    engine = make_engine(config(2, micro=2, bf16=True))
    seen = [engine.optimizer.overflow]
    for factor in (1.0, float("inf"), 1.0):
        engine.backward(loss(engine, 0) * factor)
        engine.step()
        seen.append(engine.optimizer.overflow)
    assert seen == [False, False, True, False]
    assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == 1.0


# Micro steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_boundary_set_by_the_script_ends_global_batches_where_it_says(stage: int) -> None:
    """Two micro steps, then three, then one: as plain torch does with as many backwards before each step."""
    plain = gpt(**ROUND)
    theirs = optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    engine = make_engine(config(stage, micro=2, gradient_clipping=0), model=gpt(**ROUND))
    seed = 0
    for micro_steps in (2, 3, 1):
        for number in range(micro_steps):
            engine.set_gradient_accumulation_boundary(number == micro_steps - 1)
            engine.backward(loss(engine, seed))
            engine.step()
            loss(plain, seed).backward()
            seed += 1
        theirs.step()
        theirs.zero_grad()
        assert_weights(engine, plain, f"after {seed} micro steps")
    assert (engine.global_steps, engine.micro_steps) == (3, 6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_shows_no_gradient_that_is_not_its_own(stage: int) -> None:
    """Between backwards `.grad` is None: its buffer holds sums, or another unit's values. Clipping by hand is idle."""
    plain, engine = (make_engine(config(stage, micro=2, gradient_clipping=0), model=gpt()) for _ in range(2))
    for seed in range(2):
        for other in (plain, engine):
            other.backward(loss(other, seed))
        assert all(param.grad is None for param in engine.module.parameters())
        assert float(nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)) == 0.0
        whole = dsrun.zero.safe_get_full_grad(engine.module.position)
        assert whole is not None
        assert bool(whole.any())
        engine.step(), plain.step()
    theirs = full_parameters(plain)
    assert all(torch.equal(value, theirs[name]) for name, value in full_parameters(engine).items())


@pytest.mark.parametrize("stage", STAGES)
def test_backwards_of_the_scripts_own_count_between_those_of_the_engine(stage: int) -> None:
    """Through the model, past it, and between micro steps whose gradients stay where they are."""
    found: list[dict[str, Tensor]] = []
    for own in (False, True):
        engine = make_engine(config(stage, micro=2, gradient_clipping=0), model=gpt())
        for _ in range(2):
            with engine.no_sync():
                engine.backward(loss(engine, 0))
            through, past = loss(engine, 5), engine.module.norm.weight.square().sum()
            through.backward() if own else engine.backward(through)
            if stage < 3:
                past.backward() if own else engine.backward(past)
            engine.backward(loss(engine, 1))
            engine.step()
            engine.zero_grad()
        found.append(full_parameters(engine))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
    if stage == 3:
        past.backward()
        with pytest.raises(ModelError, match=r"`norm\.weight` of `rest` gets a gradient outside of the backward"):
            engine.backward(loss(engine, 1))


def test_a_micro_batch_that_is_changed_changes_the_global_batch_and_not_the_accumulation() -> None:
    engine = make_engine(config(1, micro=2, accumulation=3))
    engine.set_train_micro_batch_size(4)
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (4, 12)
    assert engine.gradient_accumulation_steps() == 3
    with pytest.raises(InputError, match="micro_batch_size is 0"):
        engine.set_train_micro_batch_size(0)


# Compiling, loading data ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
@pytest.mark.parametrize("stage", [0, 3])
def test_the_engine_compiles_its_module(stage: int) -> None:
    torch._dynamo.reset()
    eager, compiled = (make_engine(config(stage, micro=2), model=gpt(layers=2)) for _ in range(2))
    assert not compiled.is_compiled
    compiled.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert compiled.is_compiled
    for seed in range(2):
        for engine in (eager, compiled):
            engine.backward(loss(engine, seed))
            engine.step()
    weights = full_parameters(eager)
    for name, value in full_parameters(compiled).items():
        assert torch.equal(value, weights[name]), name
    with pytest.raises(InputError, match="schedule is"):
        eager.compile(schedule=[(0, [])])


def test_a_loader_made_by_the_engine_shares_samples_out() -> None:
    engine = make_engine(config(1, micro=2))
    data = TensorDataset(torch.arange(6))
    assert [len(batch[0]) for batch in engine.deepspeed_io(data)] == [2, 2, 2]
    assert sorted(engine.deepspeed_io(data, batch_size=6).__iter__().__next__()[0].tolist()) == list(range(6))
    with pytest.raises(InputError, match="data_sampler is given"):
        engine.deepspeed_io(data, data_sampler=object())


def test_a_repeating_loader_begins_again_and_refuses_what_cannot() -> None:
    loader = dsrun.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    once = dsrun.utils.RepeatingLoader(iter([1]))
    assert next(once) == 1
    with pytest.raises(ModelError, match="an iteration over the list_iterator yields nothing"):
        next(once)


def test_a_function_that_would_load_slices_is_not_taken() -> None:
    with pytest.raises(InputError, match="custom_load_fn is given"):
        make_engine(config(3, micro=2)).load_checkpoint("anywhere", custom_load_fn=print)


# Around the engine ----------------------------------------------------------------------------------------------------


def test_lines_are_logged_on_the_ranks_that_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dsrun"):
        for ranks in ([0], [1, 2], [-1], None):
            dsrun.utils.log_dist(f"for {ranks}", ranks=ranks)
    assert caplog.messages == ["[Rank 0] for [0]", "[Rank 0] for [-1]", "[Rank 0] for None"]


def test_models_are_built_on_a_device_in_a_dtype() -> None:
    with dsrun.OnDevice(dtype=torch.bfloat16):
        model = nn.Linear(3, 3)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    with dsrun.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(3, 3).weight.device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32


def test_an_external_parameter_has_to_be_one() -> None:
    model = gpt()
    dsrun.zero.register_external_parameter(model, model.head.weight)
    dsrun.zero.unregister_external_parameter(model, model.head.weight)
    with pytest.raises(ModelError, match="got a TinyGPT and a str; expected a module and a parameter"):
        dsrun.zero.register_external_parameter(model, "head.weight")
    with (
        pytest.raises(ModelError, match="unwrap_model_for_generation: got a str"),
        dsrun.zero.unwrap_model_for_generation("model"),
    ):
        pass


def test_leaf_modules_are_set_and_unset_by_class_name_and_suffix() -> None:
    model, find = gpt(layers=3), dsrun.utils
    assert find.set_z3_leaf_modules(model, ["Block"]) == list(model.blocks) == find.get_z3_leaf_modules(model)
    assert find.unset_z3_leaf_modules_by_name(model, ["blocks.0"]) == ([model.blocks[0]], [])
    assert find.get_z3_leaf_modules(model) == list(model.blocks)[1:]
    assert find.unset_z3_leaf_modules_by_suffix(model, ["s.1", "s.2"]) == (list(model.blocks)[1:], [])
    assert find.set_z3_leaf_modules_by_name(model, ["blocks", "nowhere"], raise_if_not_found=False) == (
        [model.blocks],
        ["nowhere"],
    )
    assert find.unset_z3_leaf_modules(model, [nn.ModuleList]) == [model.blocks]
    assert find.set_z3_leaf_modules_by_suffix(model, ["ead", "d", "where"], raise_if_not_found=False) == (
        [model.head, model.embed],
        ["where"],
    )
    assert find.get_z3_leaf_modules(model) == [model.embed, model.head]
    assert find.set_z3_leaf_modules_by_name(model, ["embed"], False) == ([model.embed], [])
    assert find.set_z3_leaf_modules_by_suffix(model, ["head"], flag=False) == ([model.head], [])
    assert not find.get_z3_leaf_modules(model)
    assert find.set_z3_leaf_module(model.head, True) is None
    assert (find.z3_leaf_module(model.head), find.z3_leaf_module(model.embed)) == (True, False)
    model.embed._z3_leaf = True  # as models do themselves
    assert find.get_z3_leaf_modules(model) == [model.embed, model.head]
    for refused, message in (
        (lambda: find.set_z3_leaf_modules_by_name(model, ["head", "nowhere"]), "TinyGPT has no module `nowhere`"),
        (
            lambda: find.unset_z3_leaf_modules_by_suffix(model, ["head", "nowhere"]),
            "no module's name in TinyGPT ends in nowhere",
        ),
        (lambda: find.unset_z3_leaf_modules(model, ["Nowhere"]), "unset_z3_leaf_modules: TinyGPT has no module of"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            refused()
        assert isinstance(caught.value, ValueError), "as scripts written for DeepSpeed catch it"


def test_a_class_of_leaf_modules_stands_for_its_subclasses() -> None:
    class Sparse(nn.Linear):
        pass

    model = nn.Sequential(Sparse(2, 2), nn.Linear(2, 2), nn.ReLU())
    assert dsrun.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[1]]


def test_leaf_modules_that_would_come_too_late_are_refused_and_those_that_are_not_there_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = config(3, micro=2)
    settings["zero_optimization"]["leaf_module"] = {
        "classes": ["Block", "MixtralBlock"],
        "names": ["nowhere", "head"],
        "name_suffixes": ["bed", "where"],
    }
    engine = make_engine(settings, model=gpt())
    assert "`zero_optimization.leaf_module` names `MixtralBlock`, `nowhere`, `where`, which TinyGPT does not have" in (
        capsys.readouterr().out
    )
    assert dsrun.utils.set_z3_leaf_modules(engine.module, ["Block"]) == list(engine.module.blocks), "they are"
    with pytest.raises(ModelError, match="an engine has cut ModuleList into units already"):
        dsrun.utils.set_z3_leaf_modules_by_name(engine.module, ["blocks"])
    engine.destroy()
    assert dsrun.utils.set_z3_leaf_modules_by_name(engine.module, ["blocks"]) == ([engine.module.blocks], [])


# Copies ---------------------------------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copy_and_train(settings: dict[str, Any], copied: str) -> None:
    engine = make_engine(settings, model=gpt(**ROUND))
    engine.backward(loss(engine, 0))
    engine.step()
    expected, plain = loss(engine, 1).detach(), gpt(**ROUND)
    with dsrun.zero.GatheredParameters(engine.module.parameters()):
        twin = COPIES[copied](engine.module)
        plain.load_state_dict(engine.module.state_dict())
    before = engine.counters().collectives.calls
    assert [type(param) for param in twin.parameters()] == [type(param) for param in plain.parameters()]
    assert twin.state_dict().keys() == plain.state_dict().keys()
    for model in (twin, plain):
        loss(model, 1).backward()
        optim.SGD(model.parameters(), lr=0.5).step()
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), plain.parameters(), strict=True))
    twin.load_state_dict(COPIES[copied](twin).state_dict())
    assert engine.counters().collectives.calls == before, "the copy drives its original's engine"
    assert torch.equal(loss(engine, 1), expected), "the copy shares memory with its original"


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "save": saved}


@pytest.mark.parametrize(
    ("stage", "copied"),
    [
        (0, "save"),
        (1, "deepcopy"),
        (2, "pickle"),
        (3, "deepcopy"),
        (3, "save"),
        *(
            pytest.param(stage, copied, marks=pytest.mark.soak("each way at stage 3 or 2, and each stage in one way"))
            for stage, copied in product(STAGES, COPIES)
            if (stage, copied) not in ((0, "save"), (1, "deepcopy"), (2, "pickle"), (3, "deepcopy"), (3, "save"))
        ),
    ],
)
def test_a_copy_of_an_engines_model_is_a_plain_model(stage: int, copied: str) -> None:
    """As an average of the weights or a frozen twin is made; at stage 3 inside GatheredParameters."""
    copy_and_train(config(stage, micro=2), copied)
    if stage in (1, 3):
        copy_and_train(config(stage, micro=2, activation_checkpointing={"policy": "every_block"}), copied)


def test_a_copy_of_an_engines_model_gets_an_engine_of_its_own() -> None:
    for stage in STAGES:
        engine = make_engine(config(stage, micro=2), model=gpt())
        with dsrun.zero.GatheredParameters(engine.module.parameters()):
            twin = copy.deepcopy(engine.module)
        other = make_engine(config(stage, micro=2), model=twin)
        for each in (engine, other):
            each.backward(loss(each, 0))
            each.step()
        mine, theirs = full_parameters(engine), full_parameters(other)
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items()), stage


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_without_the_values_is_refused_by_name(copied: str) -> None:
    engine = make_engine(config(3, micro=2), model=gpt())
    engine.backward(loss(engine, 0))
    engine.step()
    with pytest.raises(ModelError, match="`position` is copied or pickled while its values"):
        COPIES[copied](engine.module)
