"""A part of the optimizer stays on the device: the bits of all of it there, its bytes where they are said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from support.covering import with_all
from support.inside_engine import deferred_update_of, predicted_bytes, predicted_host_bytes, store_of, units_of
from support.models import loss_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (1, 2, 3)
Weights = dict[str, Tensor]

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"micro": 2},
    "bf16": {"micro": 2, "bf16": True},
    "accumulation": {"micro": 1, "accumulation": 2, "bf16": True},
    "accumulation-fp32": {"micro": 1, "accumulation": 2},
    "fp16": {"micro": 2, "fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
    "lion": {"micro": 2, "bf16": True, "optimizer": "Lion"},
    "rmsprop": {"micro": 2, "optimizer": "RMSprop"},
}


def mixed(stage: int, ratio: float, *, params: bool = False, path: Any = None, **more: Any) -> dict[str, Any]:
    """A config with a share of the optimizer in host memory, or on a disk."""
    settings = config(stage, **more)
    where = {"device": "cpu"} if path is None else {"device": "nvme", "nvme_path": str(path)}
    settings["zero_optimization"]["offload_optimizer"] = {**where, "ratio": ratio}
    if params:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return settings


def samples_of(case: dict[str, Any], engine: Any) -> int:
    return case["micro"] * case.get("accumulation", 1) * engine.world_size


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def away_of(engine: Any) -> list[int]:
    return [unit.index for unit in units_of(engine) if unit.steps_on_host]


def _compare(case: dict[str, Any], stages: tuple[int, ...], steps: int, path: Any = None) -> None:
    plain = make_engine(config(1, **case))
    samples = samples_of(case, plain)
    losses = train(plain, range(steps), samples=samples)
    expected = full_parameters(plain)
    for stage in stages:
        for params in (False, True) if stage == 3 else (False,):
            engine = make_engine(mixed(stage, 0.5, params=params, path=path, **case))
            assert 0 < len(away_of(engine)) < len(units_of(engine))
            if stage == 3:
                store_of(engine).poison = True
            assert train(engine, range(steps), samples=samples) == losses, (stage, params)
            assert_same(full_parameters(engine), expected)
            _check_bytes(engine, case)
            engine.destroy()


def _check_bytes(engine: Any, case: dict[str, Any]) -> None:
    """Held, reported and predicted are one number, in host memory and in all."""
    report = engine.memory_arenas()
    apart = ("wire staging", "parameters leaving")
    state = [use for use in report.arenas if use.name not in apart and use.tier != "disk"]
    assert sum(use.reserved_bytes for use in state) == predicted_bytes(engine)
    in_host = sum(use.reserved_bytes for use in state if use.tier == "host")
    assert in_host == predicted_host_bytes(engine)
    counts = sum(t.nbytes for s in engine.optimizer.state.values() for t in s.values() if t.ndim == 0)
    assert engine.model_state_bytes() == predicted_bytes(engine) + counts


#: Memory is looked at in the first three, which waits for updates.
STEPS = 4


@pytest.mark.parametrize(
    ("case", "stages"),
    with_all(
        {
            "fp32": (1,),
            "bf16": (2,),
            "accumulation": (3,),
            "accumulation-fp32": (3,),
            "fp16": (2,),
            "lion": (1,),
            "rmsprop": (2,),
        },
        STAGES,
    ),
)
def test_one_rank_has_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...]) -> None:
    _compare(CASES[case], stages, STEPS)


@pytest.mark.parametrize(("case", "stages"), with_all({"fp32": (3,), "bf16": (1, 3), "accumulation": (2,)}, STAGES))
def test_two_ranks_have_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...]) -> None:
    run_ranks(2, _compare, CASES[case], stages, STEPS)


@pytest.mark.parametrize(("case", "stages"), with_all({"bf16": (2,)}, (2, 3)))
def test_three_ranks_have_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...]) -> None:
    run_ranks(3, _compare, CASES[case], stages, 3)


@pytest.mark.parametrize(("case", "stages"), with_all({"bf16": (3,), "fp32": (1,)}, (1, 3)))
def test_the_others_may_be_on_a_disk(case: str, stages: tuple[int, ...], tmp_path: Any) -> None:
    _compare(CASES[case], stages, STEPS, tmp_path)


# State that others read and write -------------------------------------------------------------------------------------


def test_checkpoints_pass_between_shares(tmp_path: Any) -> None:
    straight = make_engine(config(1, micro=2, bf16=True))
    losses = train(straight, range(5), samples=2)
    makes = (mixed(3, 0.5, micro=2, bf16=True), mixed(1, 0.8, micro=2, bf16=True), mixed(2, 1.0, micro=2, bf16=True))
    for before, after in ((makes[0], makes[1]), (makes[1], makes[2]), (makes[2], makes[0])):
        first = make_engine(before)
        train(first, range(3), samples=2)
        first.save_checkpoint(tmp_path, "here")
        first.destroy()
        second = make_engine(after, seed=11)
        second.load_checkpoint(tmp_path, "here")
        assert train(second, range(3, 5), samples=2) == losses[3:]
        assert_same(full_parameters(second), full_parameters(straight))
        second.destroy()


def _fragments(engine: Any) -> list[Tensor]:
    """Reads and writes parts of a unit that stays, and of one that leaves."""
    found: list[Any] = []
    inputs, targets = batches(0, samples=2)
    for param in (engine.module.blocks[0].qkv.weight, engine.module.blocks[2].down.weight):
        engine.backward(loss_of(engine(inputs), targets))
        gradient: Any = dsrun.utils.safe_get_full_grad(param)
        dsrun.utils.safe_set_full_grad(param, gradient * 0.5)
        engine.step()
        found += [gradient, dsrun.utils.safe_get_full_fp32_param(param)]
        found.append(dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg"))
        dsrun.utils.safe_set_full_fp32_param(param, found[-2] + 0.125)
        dsrun.utils.safe_set_full_optimizer_state(param, found[-1] * 2, "exp_avg")
    engine.backward(loss_of(engine(inputs), targets))
    engine.step()
    found += [value.clone() for value in engine.optimizer.state_dict()["state"][0].values()]
    with dsrun.zero.GatheredParameters(list(engine.module.parameters())):
        found += [param.detach().clone() for param in engine.module.parameters()]
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_fragments_are_read_and_written_as_on_the_device(stage: int) -> None:
    plain = _fragments(make_engine(config(stage, micro=2, bf16=True)))
    engine = make_engine(mixed(stage, 0.5, micro=2, bf16=True))
    stay = {name for unit in units_of(engine) if not unit.steps_on_host for name in [unit.name]}
    assert "blocks.0" in stay
    assert "blocks.2" not in stay
    for one, other in zip(_fragments(engine), plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_stays_leaves_for_a_generation_phase_and_comes_back(accumulation: int) -> None:
    case: dict[str, Any] = {"micro": 2, "bf16": True, "accumulation": accumulation}
    plain = make_engine(config(2, **case))
    losses = train(plain, range(4), samples=2 * accumulation)
    engine = make_engine(mixed(2, 0.5, **case))
    assert train(engine, range(2), samples=2 * accumulation) == losses[:2]
    staying = sum(unit.master.numel() for unit in units_of(engine) if not unit.steps_on_host)
    leaving = sum(unit.master.numel() for unit in units_of(engine) if unit.steps_on_host)
    assert engine.offload_states() == 16 * staying + (4 * leaving if accumulation > 1 else 0)
    engine.reload_states()
    assert train(engine, range(2, 4), samples=2 * accumulation) == losses[2:]
    assert_same(full_parameters(engine), full_parameters(plain))


# Which units ----------------------------------------------------------------------------------------------------------


def test_a_share_of_none_is_an_optimizer_on_the_device() -> None:
    engine = make_engine(mixed(2, 0.0, micro=2))
    assert away_of(engine) == []
    assert deferred_update_of(engine) is None
    assert engine.memory_arenas().bytes_in("host") == 0


def test_nothing_crosses_the_bus_of_what_stays() -> None:
    engine = make_engine(mixed(2, 0.5, micro=2, bf16=True))
    train(engine, range(3), samples=2)
    full_parameters(engine)
    leaving = sum(unit.layout.shard_numel for unit in units_of(engine) if unit.steps_on_host)
    counts = engine.counters().bus
    assert counts.out_bytes == 3 * 2 * leaving
    assert counts.back_bytes == 3 * 2 * leaving


# Room that decides ----------------------------------------------------------------------------------------------------


def roomy(stage: int, nbytes: int | None, *, params: bool = False, **more: Any) -> dict[str, Any]:
    """A config whose device has so many bytes for model state."""
    settings = mixed(stage, 1.0, params=params, **more)
    settings["zero_optimization"]["offload_optimizer"]["ratio"] = "auto"
    settings["zero_optimization"]["offload_placement"] = {"device_memory": nbytes}
    return settings


def _filled(case: dict[str, Any], stages: tuple[int, ...], rooms: tuple[int, ...]) -> None:
    plain = make_engine(config(1, **case))
    samples = samples_of(case, plain)
    losses = train(plain, range(2), samples=samples)
    for stage in stages:
        for params in (False, True) if stage == 3 else (False,):
            counts: list[int] = []
            for nbytes in (0, *rooms, 1 << 40):
                engine = make_engine(roomy(stage, nbytes, params=params, **case))
                on_device = [use for use in engine.memory_arenas().arenas if use.tier == "device"]
                held = sum(use.reserved_bytes for use in on_device)
                counts.append(len(away_of(engine)))
                if nbytes and counts[-1] < counts[0]:
                    assert held <= nbytes, "what stays fits"
                if counts[-1] not in counts[:-1]:
                    assert train(engine, range(2), samples=samples) == losses
                engine.destroy()
            assert counts == sorted(counts, reverse=True)
            assert counts[0] == len(units_of(plain))
            assert counts[-1] == 0


@pytest.mark.parametrize(("case", "stages"), with_all({"bf16": (3,), "accumulation-fp32": (2,)}, (2, 3)))
def test_the_device_is_filled_as_far_as_it_has_room(case: str, stages: tuple[int, ...]) -> None:
    _filled(CASES[case], stages, (900_000, 1_300_000))


def test_two_ranks_fill_their_devices_alike() -> None:
    run_ranks(2, _filled, CASES["bf16"], (3,), (900_000,))


def test_the_placement_and_what_was_measured_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(roomy(2, 2_000_000, micro=2, bf16=True)).destroy()
    told = capsys.readouterr().out
    assert "of masters and optimizer states leave the device" in told
    assert "blocks.1 .. blocks.2 (2)" in told
    assert "measured: to the host" in told
    make_engine(roomy(2, None, micro=2, bf16=True)).destroy()
    assert "ranks on the CPU have no memory of their own to fill" in capsys.readouterr().out
    make_engine(mixed(2, 1.0, micro=2, bf16=True)).destroy()
    assert "leave the device" not in capsys.readouterr().out


# Coming back ----------------------------------------------------------------------------------------------------------


def looking_again(stage: int, nbytes: int, **more: Any) -> dict[str, Any]:
    """A config that looks again after two updates."""
    settings = roomy(stage, nbytes, **more)
    settings["zero_optimization"]["offload_placement"]["remeasure_after"] = 2
    return settings


#: For some of the units, and for all.
ROOMS = (1_000_000, 1 << 40)


def _coming(case: dict[str, Any], stages: tuple[int, ...], folder: str, rooms: tuple[int, ...] = ROOMS) -> None:
    plain = make_engine(config(1, **case))
    samples = samples_of(case, plain)
    losses = train(plain, range(8), samples=samples)
    for stage in stages:
        for free in rooms:
            engine = make_engine(looking_again(stage, 700_000, **case))
            if stage == 3:
                store_of(engine).poison = True
            update = deferred_update_of(engine)
            before = away_of(engine)
            assert train(engine, range(4), samples=samples) == losses[:4]
            assert away_of(engine) == before, "there was no room that the first look had not seen"
            update.settle()
            in_host = engine.memory_arenas().bytes_in("host")
            update.look_again(held_bytes=700_000 - free)
            after = away_of(engine)
            assert len(after) < len(before)
            assert (after == []) == (free == 1 << 40)
            assert engine.memory_arenas().bytes_in("host") < in_host, "host memory is given back"
            _check_bytes(engine, case)
            assert train(engine, range(4, 6), samples=samples) == losses[4:6]
            engine.offload_states()
            engine.reload_states()
            engine.save_checkpoint(folder, "here")
            assert train(engine, range(6, 8), samples=samples) == losses[6:]
            assert_same(full_parameters(engine), full_parameters(plain))
            engine.destroy()
        other = make_engine(config(stage, **case), seed=11)
        other.load_checkpoint(folder, "here")
        assert train(other, range(6, 8), samples=samples) == losses[6:]
        other.destroy()


@pytest.mark.parametrize(
    ("case", "stages", "rooms"),
    [
        pytest.param("bf16", (3,), ROOMS, id="bf16"),
        pytest.param("fp32", (3,), ROOMS[:1], id="fp32"),
        pytest.param("accumulation", (2,), ROOMS[:1], id="accumulation"),
        pytest.param("lion", (2,), ROOMS[1:], id="lion"),
        *(
            pytest.param(
                case, (2, 3), ROOMS, id=f"{case}-all", marks=pytest.mark.soak("each case at one stage with one room")
            )
            for case in ("bf16", "fp32", "accumulation", "lion")
        ),
    ],
)
def test_units_come_to_the_device_with_their_bits(
    case: str, stages: tuple[int, ...], rooms: tuple[int, ...], tmp_path: Any
) -> None:
    _coming(CASES[case], stages, str(tmp_path), rooms)


@pytest.mark.parametrize("rooms", [ROOMS[:1], pytest.param(ROOMS[1:], marks=pytest.mark.soak("room for some units"))])
def test_units_of_two_ranks_come_to_their_devices_alike(rooms: tuple[int, ...], tmp_path: Any) -> None:
    run_ranks(2, _coming, CASES["bf16"], (1,), str(tmp_path), rooms)


def test_what_was_observed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(looking_again(2, 1_100_000, micro=2, bf16=True))
    train(engine, range(5), samples=2)
    told = capsys.readouterr().out
    assert "dsrun: after 2 updates: " in told
    assert "dsrun: no unit comes to the device" in told
    deferred_update_of(engine).settle()
    deferred_update_of(engine).look_again(held_bytes=0)
    told = capsys.readouterr().out
    assert "come to the device, where" in told
    assert " predicted (computing " in told
    engine.destroy()


def test_a_step_ahead_of_the_norm_is_for_what_leaves() -> None:
    plain = make_engine(config(1, micro=2, bf16=True))
    losses = train(plain, range(5), samples=2)
    for stage in (1, 3):
        settings = mixed(stage, 0.5, micro=2, bf16=True)
        settings["zero_optimization"]["offload_optimizer"]["super_offload"] = True
        engine = make_engine(settings)
        assert train(engine, range(5), samples=2) == losses
        assert_same(full_parameters(engine), full_parameters(plain))
        _check_bytes(engine, {})
        engine.destroy()
