"""An optimizer in host memory: the bits of one on the device, no byte more over the bus, and nothing read early."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dsrun
from dsrun.errors import ConfigError, ModelError
from dsrun.runtime.optim.algorithms.lamb import Lamb
from support.covering import with_all
from support.devices import on_devices
from support.inside_engine import predicted_bytes, store_of, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (1, 2, 3)
Weights = dict[str, Tensor]


def away(stage: int, **more: Any) -> dict[str, Any]:
    """A config with the optimizer in host memory."""
    settings = config(stage, **more)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return settings


def counts_of(engine: Any) -> Any:
    return engine.counters().bus


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# The same bits --------------------------------------------------------------------------------------------------------


def _compare(case: dict[str, Any], stages: tuple[int, ...], steps: int) -> None:
    """Stages and worlds agree without offload, which is proved elsewhere: one run of stage 1 stands for them."""
    samples = case["micro"] * case.get("accumulation", 1)
    plain = make_engine(config(1, **case))
    samples *= plain.world_size
    losses = train(plain, range(steps), samples=samples)
    expected = full_parameters(plain)
    for stage in stages:
        engine = make_engine(away(stage, **case))
        if stage == 3:
            store_of(engine).poison = True
        assert train(engine, range(steps), samples=samples) == losses, stage
        assert_same(full_parameters(engine), expected)
        engine.destroy()


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"micro": 2},
    "bf16": {"micro": 2, "bf16": True},
    "accumulation": {"micro": 1, "accumulation": 2, "bf16": True},
    "accumulation-fp32": {"micro": 1, "accumulation": 2},
    "wide-wire": {"micro": 2, "bf16": True, "communication_data_type": "fp32"},
    "divided-before": {"micro": 2, "bf16": True, "gradient_predivide_factor": 3.0},
    "momentum": {"micro": 2, "bf16": True, "optimizer": "SGD"},
    "fp16": {"micro": 2, "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
}


#: Memory is looked at in the first three, which waits for updates.
STEPS = 5


@pytest.mark.parametrize(
    ("case", "stages"),
    with_all(
        {
            "fp32": (1, 3),
            "bf16": (2, 3),
            "accumulation": (1,),
            "accumulation-fp32": (3,),
            "wide-wire": (2,),
            "divided-before": (1,),
            "momentum": (3,),
            "fp16": (3,),
        },
        STAGES,
    ),
)
def test_one_rank_has_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...]) -> None:
    _compare(CASES[case], stages, STEPS)


@pytest.mark.parametrize(
    ("case", "stages"),
    with_all({"fp32": (2,), "bf16": (1, 3), "accumulation": (2, 3), "wide-wire": (3,), "divided-before": (2,)}, STAGES),
)
def test_two_ranks_have_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...]) -> None:
    run_ranks(2, _compare, CASES[case], stages, STEPS)


@pytest.mark.parametrize(("case", "stages"), with_all({"bf16": (1,), "accumulation": (3,)}, (1, 3)))
def test_three_ranks_whose_mean_no_power_of_two_makes_have_the_same_bits(case: str, stages: tuple[int, ...]) -> None:
    run_ranks(3, _compare, CASES[case], stages, 3)


def test_steps_that_overflow_are_left_out_alike() -> None:
    settings = CASES["fp16"]
    skipped: list[int] = []
    for made in (config(2, **settings), away(2, **settings)):
        engine = make_engine(made)
        train(engine, range(6), samples=2)
        skipped.append(engine.skipped_steps)
    assert skipped[0] == skipped[1] > 0


class Halving(optim.Optimizer):
    """A script's own elementwise optimizer, with a count of its own for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.5)
                param.sub_(mean, alpha=group["lr"] / state["steps"])


def _odd_model() -> nn.Module:
    torch.manual_seed(7)
    model: Any = TinyGPT()
    model.blocks[1].up.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


def _groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [p for name, p in trained if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for name, p in trained if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Adagrad", "RMSprop", "own"])
def test_groups_frozen_parameters_and_any_elementwise_optimizer_step_alike(kind: str) -> None:
    results: list[tuple[list[float], Weights]] = []
    for stage, make in ((1, config), (1, away), (3, away)):
        model = _odd_model()
        settings = make(stage, micro=2, bf16=True, optimizer=kind, zero_allow_untested_optimizer=True)
        if kind == "AdamW":
            engine = make_engine(settings, model=model, model_parameters=_groups_of(model))
        elif kind == "own":
            del settings["optimizer"]
            engine = make_engine(settings, model=model, optimizer=Halving)
        else:
            engine = make_engine(settings, model=model)
        results.append((train(engine, range(5), samples=2), full_parameters(engine)))
        engine.destroy()
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert_same(weights, results[0][1])


def test_a_schedule_of_torchs_and_hooks_of_the_script_see_every_step() -> None:
    seen: list[float] = []

    def schedule(optimizer: optim.Optimizer) -> Any:
        optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
        return optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    results: list[Weights] = []
    for make in (config, away):
        seen.clear()
        engine = make_engine(make(3, micro=2), lr_scheduler=schedule)
        train(engine, range(4), samples=2)
        results.append(full_parameters(engine))
        assert seen == [1e-2 * 0.5**step for step in range(4)]
    assert_same(results[1], results[0])


# What crosses the bus -------------------------------------------------------------------------------------------------


def _moved(case: dict[str, Any], stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = make_engine(away(stage, **case))
        owned = sum(unit.layout.shard_numel for unit in units_of(engine))
        units = len(units_of(engine))
        train(engine, range(3), samples=case["micro"] * case.get("accumulation", 1) * engine.world_size)
        full_parameters(engine)
        counts = counts_of(engine)
        compute = 2 if case.get("bf16") else 4
        gradient = 4 if case.get("accumulation", 1) > 1 else compute
        assert (counts.out["gradients"].calls, counts.out["gradients"].nbytes) == (3 * units, 3 * owned * gradient)
        assert (counts.back["parameters"].calls, counts.back["parameters"].nbytes) == (3 * units, 3 * owned * compute)
        assert counts.out_bytes == counts.out["gradients"].nbytes
        assert counts.back_bytes == counts.back["parameters"].nbytes


@pytest.mark.parametrize("case", ["fp32", "bf16", "accumulation"])
def test_gradients_leave_once_in_their_own_dtype_and_parameters_come_back_once(case: str) -> None:
    run_ranks(2, _moved, CASES[case], STAGES)


def test_what_was_added_up_without_being_announced_comes_back_once_and_has_the_same_bits() -> None:
    results: list[Weights] = []
    for make in (config, away):
        engine = make_engine(make(2, micro=2, bf16=True))
        inputs, targets = batches(0, samples=4)
        for step in range(2):
            for first in (0, 2):
                engine.backward(loss_of(engine(inputs[first : first + 2]), targets[first : first + 2]))
                if step == 1:
                    break
            engine.step()
        results.append(full_parameters(engine))
    assert_same(results[1], results[0])
    owned = sum(unit.layout.shard_numel for unit in units_of(engine))
    counts = counts_of(engine)
    assert counts.out["gradients"].nbytes == owned * (2 + 4 + 2)
    assert counts.back["gradients"].nbytes == owned * 2


# What is held ---------------------------------------------------------------------------------------------------------


def _held(case: dict[str, Any], stages: tuple[int, ...], both: bool) -> None:
    for stage in stages:
        settings = away(stage, **case)
        if both:
            settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
        engine = make_engine(settings)
        prediction = predicted_bytes(engine)
        for step in range(2):
            report = engine.memory_arenas()
            state = [use for use in report.arenas if use.name != "wire staging"]
            assert sum(use.reserved_bytes for use in state) == prediction, (stage, step)
            assert report.bytes_in("host") > report.bytes_in("device") / 2
            train(
                engine, range(step, step + 1), samples=case["micro"] * case.get("accumulation", 1) * engine.world_size
            )
        full_parameters(engine)
        counts = sum(t.nbytes for s in engine.optimizer.state.values() for t in s.values() if t.ndim == 0)
        assert engine.model_state_bytes() == prediction + counts
        names = {use.name for use in engine.memory_arenas().arenas if use.tier == "host" and use.reserved_bytes}
        if stage == 3 and both and not case.get("bf16"):
            assert "masters" not in names, "the slices are the masters"
        else:
            assert "masters" in names
        assert "optimizer states" in names
        engine.destroy()


@pytest.mark.parametrize(
    ("case", "stages"),
    with_all(
        {"fp32": (1, 3), "bf16": STAGES, "accumulation": (2, 3), "wide-wire": (2,), "divided-before": (1,)}, STAGES
    ),
)
def test_host_memory_is_as_large_as_predicted_to_the_byte(case: str, stages: tuple[int, ...]) -> None:
    run_ranks(2, _held, CASES[case], stages, False)


@pytest.mark.parametrize("case", ["fp32", "bf16", "accumulation"])
def test_with_parameters_in_host_memory_too_it_is_as_large_as_predicted(case: str) -> None:
    run_ranks(2, _held, CASES[case], (3,), True)


# State that others read and write -------------------------------------------------------------------------------------


def test_checkpoints_pass_between_an_optimizer_on_the_device_and_in_host_memory(tmp_path: Any) -> None:
    straight = make_engine(config(1, micro=2, bf16=True))
    losses = train(straight, range(6), samples=2)
    for before, after in (
        (away(3, micro=2, bf16=True), config(2, micro=2, bf16=True)),
        (config(1, micro=2, bf16=True), away(2, micro=2, bf16=True)),
    ):
        first = make_engine(before)
        train(first, range(3), samples=2)
        first.save_checkpoint(tmp_path, "here")
        first.destroy()
        second = make_engine(after, seed=11)
        second.load_checkpoint(tmp_path, "here")
        assert train(second, range(3, 6), samples=2) == losses[3:]
        assert_same(full_parameters(second), full_parameters(straight))


def _fragments(engine: Any) -> list[Tensor]:
    param = engine.module.blocks[1].qkv.weight
    inputs, targets = batches(0, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
    found = [dsrun.utils.safe_get_full_grad(param)]
    dsrun.utils.safe_set_full_grad(param, found[0] * 0.5)
    found.append(dsrun.utils.safe_get_full_grad(param))
    engine.step()
    found += [dsrun.utils.safe_get_full_fp32_param(param), dsrun.utils.safe_get_local_fp32_param(param)]
    found += [dsrun.utils.safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
    dsrun.utils.safe_set_full_fp32_param(param, found[2] + 0.125)
    dsrun.utils.safe_set_full_optimizer_state(param, found[4] * 2, "exp_avg")
    engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    with dsrun.zero.GatheredParameters(param):
        found.append(param.detach().clone())
    found.append(dsrun.utils.safe_get_local_optimizer_state(param, "exp_avg"))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_fragments_are_read_and_written_as_on_the_device(stage: int) -> None:
    plain, hosted = (_fragments(make_engine(make(stage, micro=2, bf16=True))) for make in (config, away))
    for one, other in zip(hosted, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stage", [1, 2])
def test_reads_through_the_module_wait_for_the_update_and_others_show(stage: int) -> None:
    plain = make_engine(config(stage, micro=2))
    train(plain, range(2), samples=2)
    expected = {name: value.clone() for name, value in plain.module.state_dict().items()}
    engine = make_engine(away(stage, micro=2))
    weight = engine.module.blocks[2].down.weight
    for read in (
        lambda: dict(engine.module.named_parameters())["blocks.2.down.weight"],
        lambda: engine.module.blocks[2].down.weight,
        lambda: engine.module.state_dict()["blocks.2.down.weight"],
        lambda: copy.deepcopy(engine.module).blocks[2].down.weight,
    ):
        train(engine, range(1, 2), samples=2)
        found = read().detach().clone()
        assert torch.equal(found, weight.detach()), "it has settled"
        assert bool(torch.isfinite(found).all())
    engine = make_engine(away(stage, micro=2))
    train(engine, range(2), samples=2)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "AdamMini", "Adafactor"])
def test_structured_optimizers_are_refused_by_name(kind: str) -> None:
    settings = away(1, micro=2, optimizer=kind)
    settings["optimizer"]["params"] = {"lr": 1e-3}
    with pytest.raises(ConfigError, match=rf'"{kind}" needs whole tensors'):
        make_engine(settings)


def test_a_scripts_own_structured_optimizer_is_refused_by_name() -> None:
    settings = away(1, micro=2)
    del settings["optimizer"]
    with pytest.raises(ModelError, match=r"Lamb needs whole tensors"):
        make_engine(settings, optimizer=Lamb)


# The end --------------------------------------------------------------------------------------------------------------


def _threads() -> list[str]:
    import threading

    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(("host-opt", "bus-")))


def _dropped(stage: int) -> None:
    import gc

    model: Any = TinyGPT()
    engine = make_engine(away(stage, micro=2), model=model)
    train(engine, range(2), samples=2)
    assert _threads() != []
    inputs, _ = batches(9, samples=2)
    with torch.no_grad():
        expected = engine(inputs).clone()
    train(engine, range(2, 3), samples=2)
    del engine
    gc.collect()
    names = [name for name in _threads() if name.startswith("host-opt")]
    assert names == [], "its thread ended with the engine"
    with torch.no_grad():
        assert not torch.equal(model(inputs), expected), "the last update arrived"
        assert bool(torch.isfinite(model(inputs)).all())
    del model
    gc.collect()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_is_dropped_settles_and_leaves_no_thread(stage: int) -> None:
    run_ranks(1, _dropped, stage)


_ENDING = """
import threading
import torch
import dsrun
from torch import nn, optim

class Slow(optim.SGD):
    def step(self, closure=None):
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            threading.Event().wait(0.05)
        return super().step(closure)

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
settings = {"train_batch_size": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
engine = dsrun.initialize(model=model, config=settings, optimizer=lambda groups: Slow(groups, lr=0.1))[0]
for step in range(5):  # memory is looked at after the first ones, which settles
    engine.backward(engine(torch.ones(2, 64)).mean())
    engine.step()
print("under way:", not all(future.done() for future in engine._update.away._host._pending.values()))
"""


def test_a_script_that_ends_in_the_middle_of_an_update_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "under way: True" in done.stdout
    assert "Traceback" not in done.stderr


def _destroyed() -> None:
    model: Any = TinyGPT()
    engine = make_engine(away(1, micro=2), model=model)
    train(engine, range(2), samples=2)
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    assert _threads() == [] or all(name.startswith("bus-") for name in _threads())
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_destroy_leaves_an_ordinary_model() -> None:
    run_ranks(1, _destroyed)


# Streams of the script ------------------------------------------------------------------------------------------------


def _trained_on(stream: Any, settings: dict[str, Any]) -> Weights:
    """Weights after some steps of a model whose kernels have the same bits each time, on a stream."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)))
    with stream:
        engine = make_engine(settings, model=model)
        for step in range(4):
            for micro_step in range(settings["gradient_accumulation_steps"]):
                generator = torch.Generator().manual_seed(10 * step + micro_step)
                inputs = torch.randn(2, 512, generator=generator).to(engine.device, torch.bfloat16)
                engine.backward(engine(inputs).float().square().mean())
                engine.step()
        weights = {name: value.cpu() for name, value in full_parameters(engine).items()}
        engine.destroy()
    return weights


#: Stage, accumulation steps, and whether the optimizer steps ahead.
ON_STREAMS = [(1, 1, True), (3, 2, False), (3, 2, True)]
OTHERS_ON_STREAMS = [case for case in product([1, 3], [1, 2], [False, True]) if case not in ON_STREAMS]


@pytest.mark.gpu_seconds(1.5)
@pytest.mark.parametrize(
    ("device", "stage", "accumulation", "ahead"),
    on_devices(
        [*ON_STREAMS, *OTHERS_ON_STREAMS],
        on_gpu=[(3, 2, True)],
        soak=OTHERS_ON_STREAMS,
        stands="three of these, for the CPU has one stream",
    ),
    indirect=["device"],
)
def test_a_script_may_train_on_a_stream_of_its_own(
    stage: int, accumulation: int, ahead: bool, device: torch.device
) -> None:
    settings = away(stage, micro=2, accumulation=accumulation, bf16=True)
    settings["zero_optimization"]["offload_optimizer"]["super_offload"] = ahead
    module = torch.get_device_module(device)
    expected = _trained_on(nullcontext(), settings)
    assert_same(_trained_on(module.stream(module.Stream()), settings), expected)
