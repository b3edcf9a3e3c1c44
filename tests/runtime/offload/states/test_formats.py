"""States in fewer bits: an update in fp32 all the same, the same bits everywhere, checkpoints that go on exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import dsrun
from dsrun.errors import ModelError
from dsrun.estimate.run.settings import RunSettings
from dsrun.runtime.offload.step.ways import RangeWork, block_step_for
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.states.coded import coded
from dsrun.runtime.optim.states.format import STATE_FORMATS
from support.inside_engine import deferred_update_of, predicted_bytes, units_of
from support.models import TinyGPT, loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

NARROW = ("bf16", "int8")
State = dict[str, Tensor]

# One range ------------------------------------------------------------------------------------------------------------


def values(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head", [0, 64])
def test_codes_are_those_of_whole_blocks_wherever_the_run_begins(head: int) -> None:
    numel = 3 * 256 - head - 64
    state = coded("exp_avg", torch.zeros(numel, dtype=torch.uint8), torch.zeros(3), head=head).clear()
    assert not state.decode(0, numel).any()
    given = values(0, numel)
    state.encode(0, given.clone())
    around = torch.zeros(3 * 256)
    around[head : head + numel] = given
    whole = coded("exp_avg", torch.zeros(3 * 256, dtype=torch.uint8), torch.zeros(3), head=0)
    whole.encode(0, around.clone())
    assert torch.equal(state.scales_B, whole.scales_B)
    assert torch.equal(state.decode(0, numel), whole.decode(0, 3 * 256)[head : head + numel])
    cut = 256 - head
    assert torch.equal(state.decode(cut, numel), state.decode(0, numel)[cut:])
    largest = around.view(3, 256).abs().amax(1, keepdim=True).expand(3, 256).reshape(-1)[head : head + numel]
    assert bool(((state.decode(0, numel) - given).abs() <= largest / 64).all()), "as near as codes are to each other"


MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda leaves: optim.AdamW(leaves, lr=1e-2, amsgrad=True, fused=True),
    "Lion": lambda leaves: Lion(leaves, lr=1e-2, weight_decay=0.1),
    "SGD": lambda leaves: optim.SGD(leaves, lr=1e-2, momentum=0.9),
}


def _rounded(name: str, state: Tensor, form: str) -> Tensor:
    """What is left of a state between two steps."""
    if form == "bf16":
        return state.bfloat16().float()
    codes = coded(name, torch.zeros(state.numel(), dtype=torch.uint8), torch.zeros(-(-state.numel() // 256)), head=0)
    codes.encode(0, state.clone())
    return codes.decode(0, state.numel())


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("name", MAKE)
def test_a_step_is_the_optimizers_own_in_fp32_and_states_are_rounded_behind_it(name: str, form: str) -> None:
    numel, master = 5 * 256 + 64, values(0, 5 * 256 + 64)
    leaf = nn.Parameter(master.clone())
    whole: optim.Optimizer = MAKE[name]([leaf])
    states: State = {}
    scalars: dict[str, Any] = {}
    step = block_step_for(MAKE[name]([nn.Parameter(master)]), block_numel=512, threads=2)
    for count in range(3):
        leaf.grad = values(count + 1, numel)
        whole.step()
        for key, value in whole.state[leaf].items():
            if isinstance(value, Tensor) and value.ndim:
                value.copy_(_rounded(key, value, form))
        options = whole.param_groups[0]
        step.step(RangeWork(master, leaf.grad, states, scalars, options, form=STATE_FORMATS[form]))
        assert torch.equal(master, leaf.detach())
    assert {value.dtype for value in states.values()} == (
        {torch.bfloat16} if form == "bf16" else {torch.uint8, torch.float32}
    )


def test_lanes_and_blocks_do_not_change_codes() -> None:
    numel, head = (1 << 15) + 192, 64
    found: list[State] = []
    for block, threads in ((256, 1), (1 << 19, 3)):
        master, states = values(0, numel), State()
        optimizer = MAKE["AdamW"]([nn.Parameter(master)])
        step = block_step_for(optimizer, block_numel=block, threads=threads)
        work = RangeWork(
            master, values(1, numel), states, {}, optimizer.param_groups[0], form=STATE_FORMATS["int8"], head=head
        )
        step.step(work)
        found.append({"master": master, **states})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# Engines --------------------------------------------------------------------------------------------------------------


def away(stage: int, form: str | None, path: str | None = None, **more: Any) -> dict[str, Any]:
    """A config with states off the device; on a disk below `path`."""
    settings = config(stage, micro=2, bf16=True, **more)
    if form is not None:
        where: dict[str, Any] = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": path}
        settings["zero_optimization"]["offload_optimizer"] = {**where, "state_format": form}
    return settings


def made(settings: dict[str, Any], seed: int = 7) -> Any:
    """An engine with two optimizer groups, so that runs begin inside of blocks."""
    torch.manual_seed(seed)
    model = TinyGPT()
    plain = [param for param in model.parameters() if param.ndim == 1]
    decayed = [param for param in model.parameters() if param.ndim > 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return dsrun.initialize(model=model, config=settings, model_parameters=groups)[0]


def same_on_all(engine: Any, steps: range) -> None:
    """Trains every rank on the same samples: a mean of equal gradients has the bits of each."""
    for step in steps:
        inputs, targets = batches(step, samples=2)
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()


def state_of(engine: Any) -> State:
    """Masters and states, whole."""
    found = full_parameters(engine)
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            whole = dsrun.utils.safe_get_full_optimizer_state(param, key)
            assert whole is not None
            found[f"{name}:{key}"] = whole.float()
    return found


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _trained(form: str, stage: int, path: str | None) -> State:
    engine = made(away(stage, form, path))
    same_on_all(engine, range(3))
    found = state_of(engine)
    engine.destroy()
    return found


def _on_two_ranks(path: str) -> dict[str, State]:
    """Trains in every format; saves half way, and goes on from there elsewhere."""
    found: dict[str, State] = {}
    for form in NARROW:
        folder = f"{path}/{form}"
        engine = made(away(1, form))
        same_on_all(engine, range(2))
        engine.save_checkpoint(folder, tag="t")
        same_on_all(engine, range(2, 3))
        found[form] = state_of(engine)
        engine.destroy()
        again = made(away(3, form, path), seed=11)
        again.load_checkpoint(folder, tag="t")
        same_on_all(again, range(2, 3))
        assert_same(state_of(again), found[form])
        again.destroy()
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, State]]:
    """What two ranks have after three steps, and where their checkpoints of the second are."""
    path = tmp_path_factory.mktemp("ranks")
    one, other = run_ranks(2, _on_two_ranks, str(path))
    for form in NARROW:
        assert_same(one[form], other[form])
    return path, one


@pytest.mark.parametrize("form", NARROW)
def test_bits_are_those_of_every_stage_number_of_ranks_and_tier(
    form: str, tmp_path: Path, on_two_ranks: tuple[Path, dict[str, State]]
) -> None:
    expected = on_two_ranks[1][form]
    assert_same(_trained(form, 2, None), expected)
    assert_same(_trained(form, 3, str(tmp_path)), expected)


@pytest.mark.parametrize("form", NARROW)
def test_training_goes_on_from_a_checkpoint_of_other_ranks_to_the_bit(
    form: str, on_two_ranks: tuple[Path, dict[str, State]]
) -> None:
    engine = made(away(2, form), seed=11)
    engine.load_checkpoint(str(on_two_ranks[0] / form), tag="t")
    same_on_all(engine, range(2, 3))
    assert_same(state_of(engine), on_two_ranks[1][form])
    engine.destroy()


@pytest.mark.parametrize("form", NARROW)
def test_training_stays_near_that_with_fp32_states(form: str) -> None:
    losses = [train(make_engine(away(2, one)), range(8), samples=2) for one in ("fp32", form)]
    assert losses[0] != losses[1], "states were rounded"
    assert losses[1][-1] < losses[1][0]
    assert abs(losses[1][-1] - losses[0][-1]) < 0.05 * losses[0][0]


@pytest.mark.parametrize("form", ["fp32", *NARROW])
def test_a_plan_counts_the_bytes_of_a_format_as_the_runtime_lays_them_out(form: Any) -> None:
    for numel in (256, 16640, 1 << 20):
        assert RunSettings(state_format=form).away_states_of(numel) == 2 * STATE_FORMATS[form].place_bytes(numel)


def _counts(path: str, form: str) -> None:
    for where in (None, path):
        engine = made(away(3, form, where))
        same_on_all(engine, range(2))
        deferred_update_of(engine).settle()
        numels = [unit.layout.shard_numel for unit in units_of(engine)]
        states = 2 * sum(STATE_FORMATS[form].place_bytes(numel) for numel in numels)
        uses = {use.name: use for use in engine.memory_arenas().arenas}
        if where is None:
            here = [use.reserved_bytes for name, use in uses.items() if name.endswith("optimizer states")]
            assert sum(here) == states
            assert (
                states
                < {"bf16": 4, "int8": 2}[form] * sum(numels) + 2 * 4 * (sum(numels) // 256 + 320 * len(numels)) + 1
            )
        else:
            before = engine.counters()
            same_on_all(engine, range(2, 4))
            deferred_update_of(engine).settle()
            moved = engine.counters().since(before).drives
            whole = 4 * sum(numels) + states
            assert moved.read_bytes == moved.written_bytes
            assert 2 * whole <= moved.read_bytes <= 2 * (whole + 5 * 4096 * len(numels))
        counts = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values() if t.ndim == 0)
        assert engine.model_state_bytes() == predicted_bytes(engine) + counts
        engine.destroy()


@pytest.mark.parametrize("form", NARROW)
def test_memory_and_bytes_to_the_disk_are_those_of_the_format(form: str, tmp_path: Path) -> None:
    run_ranks(1, _counts, str(tmp_path), form)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NARROW)
def test_a_save_has_the_states_of_its_moment_whatever_is_loaded_behind_it(form: str, tmp_path: Path) -> None:
    settings = config(3, micro=2, bf16=True)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "state_format": form}
    settings["checkpoint"] = {"when_copied": "behind"}
    engine = make_engine(settings)
    train(engine, range(1), samples=2)
    earlier = copy.deepcopy(engine.optimizer.state_dict())
    train(engine, range(1, 3), samples=2)

    def states(engine: Any) -> list[Tensor | None]:
        return [dsrun.utils.safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]

    expected = states(engine)
    engine.save_checkpoint(str(tmp_path), tag="t")
    engine.optimizer.load_state_dict(earlier)
    train(engine, range(3, 4), samples=2)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(str(tmp_path), tag="t")
    for found, value in zip(states(engine), expected, strict=True):
        assert found is not None
        assert value is not None
        assert torch.equal(found, value)
    engine.destroy()


@pytest.mark.parametrize("saved", [None, *NARROW])
def test_a_checkpoint_loads_into_every_other_format(saved: str | None, tmp_path: Path) -> None:
    engine = made(away(2, saved, str(tmp_path) if saved == "int8" else None))
    same_on_all(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "c"), tag="t")
    there = state_of(engine)
    largest = {key: max(v.abs().max() for n, v in there.items() if n.endswith(key)) for key in (":exp_avg", "_sq")}
    for form in {None, "fp32", *NARROW} - {saved}:
        other = made(away(1, form, None if form != "bf16" else str(tmp_path)), seed=11)
        other.load_checkpoint(str(tmp_path / "c"), tag="t")
        for name, here in state_of(other).items():
            value = there[name]
            if ":" in name and form == "bf16":
                value = value.bfloat16().float()
            if ":" in name and form == "int8":
                assert bool(((here - value).abs() <= largest["_sq" if name.endswith("_sq") else ":exp_avg"] / 64).all())
            else:
                assert torch.equal(here, value), (form, name)
        same_on_all(other, range(2, 3))
        other.destroy()


# What reads and sets states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NARROW)
def test_states_are_set_and_read_as_values(form: str) -> None:
    engine = made(away(2, form))
    same_on_all(engine, range(2))
    before = state_of(engine)
    (name, param), *_ = [item for item in engine.module.named_parameters() if item[1].ndim == 2]
    wanted = torch.full_like(before[f"{name}:exp_avg"], 0.5)
    dsrun.utils.safe_set_full_optimizer_state(param, wanted, "exp_avg")
    after = state_of(engine)
    assert torch.equal(after[f"{name}:exp_avg"], wanted)
    assert torch.equal(after[f"{name}:exp_avg_sq"], before[f"{name}:exp_avg_sq"])
    assert dsrun.utils.safe_get_full_optimizer_state(param, "nothing") is None


@pytest.mark.parametrize("form", NARROW)
def test_the_optimizers_own_state_dict_comes_back_as_it_was(form: str) -> None:
    engine = made(away(2, form))
    same_on_all(engine, range(2))
    saved = {"optimizer": engine.optimizer.state_dict(), "weights": full_parameters(engine)}
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)  # pyright: ignore
    kept = state_of(engine)
    same_on_all(engine, range(2, 3))
    engine.optimizer.load_state_dict(saved["optimizer"])
    for name, value in state_of(engine).items():
        if ":" in name:
            assert torch.equal(value, kept[name]), name


def test_an_optimizer_whose_sums_only_grow_is_refused() -> None:
    settings = away(2, "int8")
    del settings["optimizer"]
    with pytest.raises(ModelError, match=r"Adagrad is not known to do with states in int8 \(.*state_format"):
        make_engine(settings, optimizer=_adagrad)


def _adagrad(groups: Any) -> optim.Optimizer:
    return optim.Adagrad(groups, lr=1e-2)
