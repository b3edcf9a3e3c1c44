"""Steps taken during backward, before the norm is known: the bits of a step on the device, whatever came of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import dsrun
from dsrun.errors import ConfigError, OffloadError
from dsrun.runtime.engine.host.update import forward_order
from dsrun.runtime.offload.ahead.speculation import AheadCounts
from support.inside_engine import (
    deferred_update_of,
    predicted_bytes,
    sharded_of,
    shards_of,
    step_of,
    store_of,
    units_of,
)
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine

#: The norm of the small model's gradients lies around this for a batch of two samples.
CLIPPING = 2.45
STEPS = 5
DEADLINE_S = 60.0
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"micro": 2, "bf16": True},
    "fp32": {"micro": 2},
    "accumulation": {"micro": 1, "accumulation": 2, "bf16": True},
    "accumulation-fp32": {"micro": 1, "accumulation": 2},
    "fp16": {"micro": 2, "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
}
Place = tuple[int, bool]
#: Stages, and whether slices of parameters lie in host memory.
PLACES: dict[str, tuple[Place, ...]] = {
    "bf16": ((2, False), (3, True)),
    "fp32": ((3, False),),
    "accumulation": ((1, False),),
    "accumulation-fp32": ((3, True),),
    "fp16": ((2, False),),
}
#: More of them, which the others stand for.
MORE_PLACES: dict[str, tuple[Place, ...]] = {
    "bf16": ((1, False),),
    "fp32": ((2, False), (3, True)),
    "accumulation": ((3, False),),
    "accumulation-fp32": ((2, False),),
    "fp16": ((1, False), (3, False)),
}


def plain(stage: int, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"gradient_clipping": CLIPPING, **more}
    return config(stage, **settings)


def ahead(stage: int, *, slices: bool = False, **more: Any) -> dict[str, Any]:
    """A config that steps ahead, with slices of parameters in host memory or without."""
    settings = plain(stage, **more)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "super_offload": True}
    if slices:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return settings


def counts_of(engine: Any) -> AheadCounts:
    return deferred_update_of(engine).ahead


def let_it_step_ahead(engine: Any) -> None:
    """Returns when all that was begun during backward is done, so that no test depends on who is faster."""
    away = deferred_update_of(engine)
    if away is not None:
        done, late = wait(list(away._host._speculation._futures.values()), timeout=DEADLINE_S)
        assert not late, f"{len(late)} of {len(done) + len(late)} ranges were not stepped"


Between = Callable[[Any, int], None]


def nothing(engine: Any, step: int) -> None:
    """Happens between a backward and its step."""


def train(engine: Any, steps: range, between: Between = nothing) -> list[float]:
    """Takes steps on this rank's part of each batch; returns its losses."""
    micro, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses: list[float] = []
    for step in steps:
        inputs, targets = batches(step, samples=micro * gas * engine.world_size)
        for micro_step in range(gas):
            first = (micro_step * engine.world_size + engine.global_rank) * micro
            loss = loss_of(engine(inputs[first : first + micro]), targets[first : first + micro])
            engine.backward(loss)
            if micro_step == gas - 1:
                let_it_step_ahead(engine)
                between(engine, step)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def states_of(engine: Any) -> list[Tensor]:
    """Returns copies of this rank's states, in order."""
    if deferred_update_of(engine) is not None:
        deferred_update_of(engine).settle()
    found = [value for run in shards_of(engine).runs for value in engine.optimizer.state[run.param].values()]
    return [value.detach().clone() for value in found if isinstance(value, Tensor)]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def without_section(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Leaves the optimizer's section out where a script gives its own."""
    return {key: value for key, value in settings.items() if key not in more}


def clipping_of(case: dict[str, Any], **more: Any) -> float:
    """The median norm of the first steps: clipping by it acts on about half of them."""
    engine = make_engine(without_section(plain(1, **case), more), **more)
    norms: list[float] = []
    for step in range(STEPS):
        train(engine, range(step, step + 1))
        norms.append(engine.get_global_grad_norm())
    return sorted(norms)[STEPS // 2]


# The same bits --------------------------------------------------------------------------------------------------------


def _compare(places: dict[str, tuple[Place, ...]]) -> None:
    for name, wheres in places.items():
        case = {**CASES[name], "gradient_clipping": clipping_of(CASES[name])}
        engine = make_engine(plain(1, **case))
        losses = train(engine, range(STEPS))
        expected, skipped = full_parameters(engine), engine.skipped_steps
        for stage, slices in wheres:
            engine = make_engine(ahead(stage, slices=slices, **case))
            if stage == 3:
                store_of(engine).poison = True
            _check_held_and_moved(engine, losses)
            assert_same(full_parameters(engine), expected)
            counts = counts_of(engine)
            assert counts.accepted > 0, (name, counts)
            assert counts.redone["clipped"] > 0, (name, counts)
            assert counts.redone.get("not finite", 0) == engine.skipped_steps == skipped
            assert counts.accepted + sum(counts.redone.values()) == STEPS
            _check_order(engine, stage)
            owned = sum(unit.layout.shard_numel for unit in units_of(engine))
            assert (counts.elements_ahead, counts.elements_behind) == (counts.accepted * owned, 0)
            engine.destroy()


def _check_order(engine: Any, stage: int) -> None:
    """The next forward's, or, where the step waits for all of them, that in which gradients have come."""
    parts = step_of(engine)
    order = forward_order(parts.units, parts.reducer.canonical_order())
    waits_for_all = stage < 3 and engine.world_size > 1
    assert parts.away._host.order == (order[::-1] if waits_for_all else order)


def _check_held_and_moved(engine: Any, losses: list[float]) -> None:
    """Trains: memory is what was predicted, and a step that is taken again moves no byte over the bus again."""
    predicted = predicted_bytes(engine)
    use = {use.name: use.reserved_bytes for use in engine.memory_arenas().arenas if use.name != "wire staging"}
    assert sum(use.values()) == predicted
    assert use["second masters"] > 0
    assert use["second optimizer states"] == use["optimizer states"] == 2 * use["second masters"]
    assert train(engine, range(STEPS)) == losses
    scalars = sum(t.nbytes for s in engine.optimizer.state.values() for t in s.values() if t.ndim == 0)
    deferred_update_of(engine).settle()
    assert engine.model_state_bytes() == predicted + scalars
    owned = sum(unit.layout.shard_numel for unit in units_of(engine))
    gradient = 4 if engine.gradient_accumulation_steps() > 1 else sharded_of(engine).precision.compute.itemsize
    moved = engine.counters().bus
    assert moved.out["gradients"].nbytes == STEPS * owned * gradient
    if units_of(engine)[0].tier is None:
        assert moved.back["parameters"].nbytes == (
            (STEPS - engine.skipped_steps) * owned * sharded_of(engine).precision.compute.itemsize
        )


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(PLACES, id="some"),
        pytest.param(MORE_PLACES, id="more", marks=pytest.mark.soak("each dtype and each place in other pairs")),
    ],
)
def test_one_rank_has_the_bits_of_a_step_on_the_device_whether_clipping_acts_or_not(
    places: dict[str, tuple[Place, ...]],
) -> None:
    _compare(places)


_ELSEWHERE = pytest.mark.soak("other places, which one rank has too")


@pytest.mark.parametrize(
    "places",
    [
        pytest.param({"bf16": ((1, False), (3, True)), "accumulation": ((2, False),)}, id="some"),
        pytest.param({"bf16": ((2, False),), "accumulation": ((1, False), (3, False))}, id="more", marks=_ELSEWHERE),
    ],
)
def test_two_ranks_have_them_too(places: dict[str, tuple[Place, ...]]) -> None:
    run_ranks(2, _compare, places)


@pytest.mark.parametrize("places", [pytest.param((2,), id="some"), pytest.param((1, 3), id="more", marks=_ELSEWHERE)])
def test_three_ranks_whose_mean_no_power_of_two_makes_have_them_too(places: tuple[int, ...]) -> None:
    run_ranks(3, _compare, {"bf16": tuple((stage, stage == 3) for stage in places)})


class Halving(optim.Optimizer):
    """A script's own optimizer, which counts in a Python number and in a list."""

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
                state["rates"] = [*state.get("rates", []), group["lr"]]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.5)
                param.sub_(mean, alpha=sum(state["rates"]) / state["steps"] ** 2)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "own"])
def test_any_elementwise_optimizer_is_stepped_ahead_with_whatever_it_counts(kind: str) -> None:
    results: list[tuple[list[float], list[Tensor]]] = []
    case: dict[str, Any] = {
        "micro": 2,
        "optimizer": "AdamW" if kind == "own" else kind,
        "zero_allow_untested_optimizer": True,
    }
    own: dict[str, Any] = {"optimizer": Halving} if kind == "own" else {}
    case["gradient_clipping"] = clipping_of(case, **own)
    for settings in (plain(2, **case), ahead(2, **case)):
        engine = make_engine(without_section(settings, own), **own)
        results.append((train(engine, range(STEPS)), states_of(engine)))
    counts = counts_of(engine)
    assert counts.accepted > 0
    assert counts.redone["clipped"] > 0
    assert results[1][0] == results[0][0]
    assert all(torch.equal(one, other) for one, other in zip(*(states for _, states in results), strict=True))
    if kind == "own":
        assert {state["steps"] for state in engine.optimizer.state.values()} == {STEPS}


def test_a_script_keeps_the_tensors_that_it_has_taken_of_masters_and_states() -> None:
    engine = make_engine(ahead(1, micro=2, gradient_clipping=0.0))
    train(engine, range(1))
    held = [engine.optimizer.state[run.param]["exp_avg"] for run in shards_of(engine).runs]
    counts = [engine.optimizer.state[run.param]["step"] for run in shards_of(engine).runs]
    masters = [unit.master for unit in units_of(engine)]
    train(engine, range(1, 4))
    deferred_update_of(engine).settle()
    assert counts_of(engine).accepted == 4
    assert [float(count) for count in counts] == [4.0] * len(counts)
    assert all(one is unit.master for one, unit in zip(masters, units_of(engine), strict=True))
    for run, state in zip(shards_of(engine).runs, held, strict=True):
        assert engine.optimizer.state[run.param]["exp_avg"] is state
    reference = make_engine(plain(1, micro=2, gradient_clipping=0.0))
    train(reference, range(4))
    for ours, theirs in zip(shards_of(engine).runs, shards_of(reference).runs, strict=True):
        assert torch.equal(ours.param, theirs.param)
        assert torch.equal(
            engine.optimizer.state[ours.param]["exp_avg"], reference.optimizer.state[theirs.param]["exp_avg"]
        )


# What scripts do between backward and step ----------------------------------------------------------------------------


def _other_rate(engine: Any, step: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)


def _other_state(engine: Any, step: int) -> None:
    weight = engine.module.blocks[1].down.weight
    state = dsrun.zero.safe_get_full_optimizer_state(weight, "exp_avg")
    if state is not None:
        dsrun.zero.safe_set_full_optimizer_state(weight, state * 0.5, "exp_avg")


def _other_state_in_place(engine: Any, step: int) -> None:
    for run in shards_of(engine).runs:
        if step:
            engine.optimizer.state[run.param]["exp_avg_sq"].mul_(1.5)


def _other_master(engine: Any, step: int) -> None:
    weight = engine.module.blocks[0].up.weight
    with dsrun.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(0.5)


def _other_gradient(engine: Any, step: int) -> None:
    weight = engine.module.blocks[2].down.weight
    gradient = dsrun.zero.safe_get_full_grad(weight)
    dsrun.zero.safe_set_full_grad(weight, gradient * 0.25)


def _another_backward(engine: Any, step: int) -> None:
    inputs, targets = batches(step + 50, samples=2)
    engine.backward(loss_of(engine(inputs), targets))


def _a_backward_that_fails(engine: Any, step: int) -> None:
    inputs, targets = batches(step, samples=2)
    engine.zero_grad()
    found = engine(inputs)
    handle = engine.module.blocks[1].down.weight.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        engine.backward(loss_of(found, targets))
    handle.remove()
    engine.backward(loss_of(engine(inputs), targets))


def _fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError("no such gradient")


def _forgotten(engine: Any, step: int) -> None:
    engine.zero_grad()


def _saved(engine: Any, step: int) -> None:
    engine.optimizer.state_dict()
    engine.module_state_dict()


#: What is done, why steps are taken again for it, and the stage where it is done by default.
CHANGES: list[tuple[Between, str | None, int]] = [
    (_other_rate, "options changed", 2),
    (_other_state, None, 3),
    (_other_state_in_place, None, 2),
    (_other_master, None, 3),
    (_other_gradient, None, 3),
    (_another_backward, None, 2),
    (_a_backward_that_fails, "interrupted", 3),
    (_forgotten, None, 2),
    (_saved, "interrupted", 3),
]


@pytest.mark.parametrize(
    ("between", "reason", "stage"),
    [
        *CHANGES,
        *(
            pytest.param(between, reason, 5 - stage, marks=pytest.mark.soak("the same change at the other stage"))
            for between, reason, stage in CHANGES
        ),
    ],
)
def test_what_a_script_changes_before_the_step_counts(between: Between, reason: str | None, stage: int) -> None:
    more: dict[str, Any] = {"micro": 2, "bf16": True, "gradient_clipping": 0.0}
    reference = make_engine(plain(stage, **more))
    losses = train(reference, range(3), between)
    engine = make_engine(ahead(stage, **more))
    assert train(engine, range(3), between) == losses
    assert_same(full_parameters(engine), full_parameters(reference))
    for one, other in zip(states_of(engine), states_of(reference), strict=True):
        assert torch.equal(one, other)
    if reason is not None:
        assert counts_of(engine).redone.keys() >= {reason}


@pytest.mark.parametrize("stage", [2, 3])
def test_units_that_stay_on_the_device_are_stepped_there_when_the_norm_is_known(stage: int) -> None:
    case = {**CASES["bf16"], "gradient_clipping": clipping_of(CASES["bf16"])}
    reference = make_engine(plain(stage, **case))
    losses = train(reference, range(STEPS))
    settings = ahead(stage, **case)
    settings["zero_optimization"]["offload_optimizer"]["ratio"] = 0.5
    engine = make_engine(settings)
    assert train(engine, range(STEPS)) == losses
    assert_same(full_parameters(engine), full_parameters(reference))
    counts, parts = counts_of(engine), step_of(engine)
    leaving = sum(unit.layout.shard_numel for unit in parts.units if unit.steps_on_host)
    assert 0 < leaving < sum(unit.layout.shard_numel for unit in parts.units)
    assert counts.accepted > 0
    assert counts.elements_ahead == counts.accepted * leaving
    assert engine.memory_arenas().reserved_bytes == predicted_bytes(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_stay_behind_are_no_last_ones(stage: int) -> None:
    results: list[dict[str, Tensor]] = []
    for make in (plain, ahead):
        engine = make_engine(make(stage, micro=2, accumulation=2, gradient_clipping=0.0))
        for step in range(3):
            inputs, targets = batches(step, samples=4)
            with engine.no_sync():
                engine.backward(loss_of(engine(inputs[:2]), targets[:2]))
            engine.step()
            engine.backward(loss_of(engine(inputs[2:]), targets[2:]))
            let_it_step_ahead(engine)
            engine.step()
        results.append(full_parameters(engine))
    assert counts_of(engine).accepted == 3
    assert_same(results[1], results[0])


def test_evaluation_between_backward_and_step_reads_the_parameters_of_before() -> None:
    results: list[Tensor] = []
    for make in (plain, ahead):
        engine = make_engine(make(2, micro=2, gradient_clipping=0.0))
        train(engine, range(2))
        inputs, targets = batches(7, samples=2)
        engine.backward(loss_of(engine(inputs), targets))
        let_it_step_ahead(engine)
        with torch.no_grad():
            results.append(engine(inputs).clone())
        engine.step()
    assert torch.equal(results[0], results[1])
    assert counts_of(engine).accepted == 3, "a forward sets nothing"


def _dropped() -> None:
    model: Any = TinyGPT()
    engine = make_engine(ahead(1, micro=2), model=model)
    train(engine, range(2))
    inputs, targets = batches(7, samples=2)
    engine.backward(loss_of(engine(inputs), targets))
    expected = {name: value.clone() for name, value in engine.module.state_dict().items()}
    del engine
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("host-opt")]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_an_engine_that_is_dropped_before_its_step_leaves_no_thread_and_no_half_a_step() -> None:
    run_ranks(1, _dropped)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_have_the_set_that_counts(tmp_path: Any, asynchronous: bool) -> None:
    straight = make_engine(plain(1, micro=2, bf16=True))
    losses = train(straight, range(6))
    engine = make_engine(ahead(2, micro=2, bf16=True, checkpoint={"asynchronous": asynchronous}))
    assert train(engine, range(3)) == losses[:3]
    engine.save_checkpoint(str(tmp_path))
    assert train(engine, range(3, 6)) == losses[3:]
    engine.wait_for_checkpoint()
    for settings in (plain(3, micro=2, bf16=True), ahead(3, micro=2, bf16=True)):
        engine = make_engine(settings)
        train(engine, range(1))  # in some set or other
        engine.load_checkpoint(str(tmp_path))
        assert train(engine, range(3, 6)) == losses[3:]


# What is refused, and said --------------------------------------------------------------------------------------------


def test_states_on_a_drive_are_not_stepped_ahead(tmp_path: Any) -> None:
    settings = ahead(2, micro=2)
    settings["zero_optimization"]["offload_optimizer"] |= {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"super_offload` is true and `device` beside it is \"nvme\""):
        make_engine(settings)


class Locking(Halving):
    """Keeps in its state what nobody can copy."""

    _lock = threading.Lock()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["lock"] = self._lock


def test_an_optimizer_whose_state_cannot_be_copied_is_refused_by_name() -> None:
    settings = ahead(1, micro=2, gradient_clipping=0.0, zero_allow_untested_optimizer=True)
    del settings["optimizer"]
    with pytest.raises(OffloadError, match=r"Locking keeps `lock`"):
        train(make_engine(settings, optimizer=Locking), range(3))


def _told() -> list[str]:
    engine = make_engine(ahead(1, micro=2, gradient_clipping=1e-9))
    told: list[str] = []
    deferred_update_of(engine)._host._speculation._say = told.append
    for _ in range(52):
        train(engine, range(1))
    assert counts_of(engine).redone == {"clipped": 52}
    return told


def test_steps_ahead_that_are_mostly_for_nothing_are_told_of_with_their_number() -> None:
    (told,) = _told()
    assert "50 of the last 50 steps" in told
    assert "clipped: 50" in told
