"""With masters and states on a disk a model trains as it does without: the same bits, and errors instead of numbers."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from dsrun.direct_io.settings import round_up
from dsrun.errors import OffloadError
from support.covering import with_all
from support.disks import FailingDisk, failure
from support.inside_engine import deferred_update_of, predicted_bytes, tiers_of, units_of
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine, train

STAGES = (1, 2, 3)


def on_disk(stage: int, path: str | list[str], *, keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config with masters and states on a disk."""
    settings = config(stage, **more)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": path, **(keys or {})}
    return settings


def kept_of(engine: Any) -> Any:
    return deferred_update_of(engine)._host._keeper


def numels_of(engine: Any) -> list[int]:
    return [unit.layout.shard_numel for unit in units_of(engine)]


def record_bytes(engine: Any, states: int = 2) -> int:
    """What one pass over all masters and states moves."""
    return sum((1 + states) * round_up(4 * numel) for numel in numels_of(engine))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# The same bits --------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"micro": 2},
    "bf16": {"micro": 2, "bf16": True},
    "accumulation": {"micro": 1, "accumulation": 2, "bf16": True},
    "momentum": {"micro": 2, "bf16": True, "optimizer": "SGD"},
}


def _compare(path: str, case: dict[str, Any], stages: tuple[int, ...], steps: int) -> None:
    plain = make_engine(config(1, **case))
    samples = case["micro"] * case.get("accumulation", 1) * plain.world_size
    losses = train(plain, range(steps), samples=samples)
    expected = full_parameters(plain)
    for stage in stages:
        engine = make_engine(on_disk(stage, path, **case))
        assert train(engine, range(steps), samples=samples) == losses, stage
        assert_same(full_parameters(engine), expected)
        engine.destroy()
    assert os.listdir(path) == []


@pytest.mark.parametrize(
    ("case", "stages"), with_all({case: STAGES if case == "bf16" else (1, 3) for case in CASES}, STAGES)
)
def test_one_rank_has_the_bits_of_a_step_on_the_device(case: str, stages: tuple[int, ...], tmp_path: Path) -> None:
    _compare(str(tmp_path), CASES[case], stages, 3)


@pytest.mark.parametrize("case", ["fp32", "accumulation"])
def test_two_ranks_have_the_bits_of_a_step_on_the_device(case: str, tmp_path: Path) -> None:
    run_ranks(2, _compare, str(tmp_path), CASES[case], (1, 3), 3)


@pytest.mark.parametrize(
    "keys",
    [
        {"buffer_count": 1},
        {"buffer_count": 2, "pipeline_write": False},
        {"pipeline_read": False, "pipeline_write": False, "fast_init": False},
    ],
)
def test_how_records_stream_changes_no_bit(keys: dict[str, Any], tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for settings in (config(3, micro=2), on_disk(3, str(tmp_path), keys=keys, micro=2)):
        engine = make_engine(settings)
        train(engine, range(3), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    assert_same(found[1], found[0])


def test_several_paths_and_checksums_change_no_bit(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    aio = {"verify": True, "block_size": 4096, "queue_depth": 2, "thread_count": 2}
    found: list[dict[str, Tensor]] = []
    for settings in (config(2, micro=2), {**on_disk(2, paths, micro=2), "aio": aio}):
        engine = make_engine(settings)
        train(engine, range(2), samples=2)
        full_parameters(engine)  # reads what is shown
        train(engine, range(2, 4), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    assert_same(found[1], found[0])


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_reads_and_writes_masters_and_states_once(tmp_path: Path, fast: bool) -> None:
    engine = make_engine(on_disk(3, str(tmp_path), keys={"fast_init": fast}, micro=2, bf16=True))
    whole, masters = record_bytes(engine), record_bytes(engine, states=0)
    at_first = engine.counters().drives
    assert (at_first.read_bytes, at_first.written_bytes) == (0, masters if fast else whole)
    train(engine, range(1), samples=2)
    deferred_update_of(engine).settle()
    first = engine.counters().drives
    assert first.read_bytes == (masters if fast else whole)
    assert first.written_bytes - at_first.written_bytes == whole
    train(engine, range(1, 3), samples=2)
    deferred_update_of(engine).settle()
    later = engine.counters().drives.since(first)
    assert (later.read_bytes, later.written_bytes) == (2 * whole, 2 * whole)


def test_between_steps_reads_and_evaluation_move_nothing_past_the_cache(tmp_path: Path) -> None:
    engine = make_engine(on_disk(2, str(tmp_path), micro=2))
    train(engine, range(2), samples=2)
    deferred_update_of(engine).settle()
    before = engine.counters().drives
    full_parameters(engine)
    with torch.no_grad():
        engine(batches(0, samples=2)[0])
    assert engine.counters().drives == before


def test_memory_is_that_of_the_frames_and_predicted_to_the_byte(tmp_path: Path) -> None:
    run_ranks(1, _counts_memory, str(tmp_path))


def _counts_memory(path: str) -> None:
    for stage, bf16, accumulation in ((1, True, 1), (3, True, 2), (3, False, 1)):
        keys = {"buffer_count": 2}
        engine = make_engine(on_disk(stage, path, keys=keys, micro=2, bf16=bf16, accumulation=accumulation))
        train(engine, range(2), samples=2 * accumulation)
        deferred_update_of(engine).settle()
        report = engine.memory_arenas()
        uses = {use.name: use for use in report.arenas}
        assert uses["masters and states"].tier == "disk"
        assert 0 <= uses["masters and states"].reserved_bytes - record_bytes(engine) < 1 << 20
        largest = 3 * round_up(4 * max(numels_of(engine)))
        assert 2 * largest <= uses["disk frames"].reserved_bytes <= 2 * largest + (6 << 20)
        assert "masters" not in uses
        assert "optimizer states" not in uses
        assert sum(use.used_bytes for use in report.outside) <= 8 * 64  # counts of steps
        counts = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values() if t.ndim == 0)
        assert engine.model_state_bytes() == predicted_bytes(engine) + counts
        assert "all on the disk" in str(report)
        engine.destroy()


def test_states_that_the_optimizer_loads_go_to_the_disk(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for settings in (config(3, micro=2), on_disk(3, str(tmp_path), micro=2)):
        engine = make_engine(settings)
        train(engine, range(1), samples=2)
        earlier = copy.deepcopy(engine.optimizer.state_dict())
        train(engine, range(1, 3), samples=2)
        engine.optimizer.load_state_dict(earlier)
        states = [t for state in engine.optimizer.state.values() for t in state.values() if t.ndim]
        if len(found) == 1:
            assert not any(tiers_of(engine).memory.takes_memory(state) for state in states)
        train(engine, range(3, 5), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    assert_same(found[1], found[0])


def test_states_made_with_the_optimizer_lie_on_the_disk_too(tmp_path: Path) -> None:
    """Adagrad's are there before the first step."""
    found: list[dict[str, Tensor]] = []
    for settings in (config(3, micro=2), on_disk(3, str(tmp_path), micro=2)):
        settings["optimizer"] = {"type": "Adagrad", "params": {"lr": 1e-2}}
        engine = make_engine(settings)
        train(engine, range(3), samples=2)
        found.append(full_parameters(engine))
        if len(found) == 2:
            states = [t for state in engine.optimizer.state.values() for t in state.values() if t.ndim]
            assert states
            assert not any(tiers_of(engine).memory.takes_memory(state) for state in states)
        engine.destroy()
    assert_same(found[1], found[0])


# Between steps --------------------------------------------------------------------------------------------------------


def test_checkpoints_are_those_of_a_step_on_the_device(tmp_path: Path) -> None:
    plain = make_engine(config(3, micro=2))
    away = make_engine(on_disk(3, str(tmp_path), micro=2))
    for engine in (plain, away):
        train(engine, range(2), samples=2)
        engine.save_checkpoint(str(tmp_path / ("plain" if engine is plain else "away")), tag="t")
    for source in ("plain", "away"):
        for settings in (config(2, micro=2), on_disk(2, str(tmp_path), micro=2)):
            fresh = make_engine(settings, seed=11)
            fresh.load_checkpoint(str(tmp_path / source), tag="t")
            train(fresh, range(2, 4), samples=2)
            if source == "plain" and "offload_optimizer" not in settings["zero_optimization"]:
                expected = full_parameters(fresh)
            assert_same(full_parameters(fresh), expected)
            fresh.destroy()


def test_a_checkpoint_may_be_loaded_over_steps_that_were_taken(tmp_path: Path) -> None:
    engine = make_engine({**on_disk(1, str(tmp_path), micro=2), "aio": {"verify": True}})
    train(engine, range(2), samples=2)
    engine.save_checkpoint(str(tmp_path / "c"), tag="t")
    train(engine, range(2, 4), samples=2)
    expected = full_parameters(engine)
    train(engine, range(4, 5), samples=2)
    engine.load_checkpoint(str(tmp_path / "c"), tag="t")
    train(engine, range(2, 4), samples=2)
    assert_same(full_parameters(engine), expected)


def test_masters_and_states_are_read_and_set_in_place(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for settings in (config(2, micro=2), on_disk(2, str(tmp_path), micro=2)):
        engine = make_engine(settings)
        train(engine, range(2), samples=2)
        param: Any = next(p for p in engine.module.parameters() if p.ndim == 2)
        state = dsrun.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert state is not None
        dsrun.utils.safe_set_full_optimizer_state(param, state * 2, "exp_avg")
        master = dsrun.utils.safe_get_full_fp32_param(param)
        assert master is not None
        dsrun.utils.safe_set_full_fp32_param(param, master + 1)
        train(engine, range(2, 4), samples=2)
        found.append(full_parameters(engine))
        engine.destroy()
    assert_same(found[1], found[0])


def test_the_optimizers_state_dict_may_be_saved(tmp_path: Path) -> None:
    found: list[Any] = []
    for settings in (config(1, micro=2), on_disk(1, str(tmp_path), micro=2)):
        engine = make_engine(settings)
        train(engine, range(2), samples=2)
        torch.save(engine.optimizer.state_dict(), tmp_path / "optimizer.pt")
        found.append(torch.load(tmp_path / "optimizer.pt")["state"])
        engine.destroy()
    for number, state in found[0].items():
        assert_same(found[1][number], state)


# What goes wrong ------------------------------------------------------------------------------------------------------


def with_disk(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, disk: FailingDisk) -> Any:
    """Makes an engine whose files are on `disk`."""
    monkeypatch.setattr("dsrun.direct_io.extent_file.OsCalls", lambda: disk)
    return make_engine(copy.deepcopy(settings))


def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rf"{tmp_path}: optimizer states of rank 0 need 2\.[0-9] MiB there; 1\.0 MiB are free \(No space left"
    with pytest.raises(OffloadError, match=told):
        with_disk(on_disk(1, str(tmp_path), micro=2), monkeypatch, FailingDisk(free=1 << 20))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        OffloadError, match="no: no file can be made there for optimizer states of rank 0: No such file"
    ):
        make_engine(on_disk(1, str(tmp_path / "no"), micro=2))


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_ends_training_by_unit_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    disk = FailingDisk()
    engine = with_disk(on_disk(3, str(tmp_path), micro=2), monkeypatch, disk)
    train(engine, range(2), samples=2)
    deferred_update_of(engine).settle()
    setattr(disk, f"on_{what}", lambda at, nbytes: failure(errno.EIO))
    told = rf"{tmp_path}: masters of unit [0-9]+ `.*`, byte 0 \(byte [0-9]+ of the file\) cannot be {what[:4]}"
    with pytest.raises(OffloadError, match=told):
        train(engine, range(2, 4), samples=2)
    with pytest.raises(OffloadError, match=told):
        engine.destroy()


def test_a_changed_byte_is_an_error_where_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds: list[int] = []

    class Disk(FailingDisk):
        def open(self, path: str, flags: int, mode: int) -> int:
            fds.append(super().open(path, flags, mode))
            return fds[-1]

    settings = {**on_disk(2, str(tmp_path), micro=2), "aio": {"verify": True}}
    engine = with_disk(settings, monkeypatch, Disk())
    train(engine, range(2), samples=2)
    deferred_update_of(engine).settle()
    kept_of(engine)._reserved.hide()
    with open(f"/proc/self/fd/{fds[0]}", "r+b") as file:  # not by the descriptor itself, which moves whole blocks
        file.seek(100)
        file.write(b"\1\2\3")
    with pytest.raises(OffloadError, match=r"of unit [0-9]+ `.*`, byte 0 .* reads back otherwise than it was written"):
        train(engine, range(2, 4), samples=2)
    with pytest.raises(OffloadError):
        engine.destroy()


def test_what_is_written_is_told_a_step_and_at_the_end(tmp_path: Path) -> None:
    run_ranks(1, _tells_of_wear, str(tmp_path))


def _tells_of_wear(path: str) -> None:
    os.environ["DSRUN_RUN_DIR"], records = path, os.path.join(path, "records.jsonl")
    engine = make_engine(on_disk(1, path, micro=2))
    whole, masters = record_bytes(engine), record_bytes(engine, states=0)
    train(engine, range(3), samples=2)
    engine.destroy()
    with open(records) as file:
        told = [json.loads(line) for line in file]
    steps = [record for record in told if record["event"] == "step"]
    assert {record["memory"]["disk"] for record in steps} == {steps[0]["memory"]["disk"]}
    assert steps[0]["memory"]["disk"] >= whole
    # An update goes on behind its step: what it moves may be told with the next one.
    assert sum(record["disk_written_bytes"] for record in steps) <= 3 * whole
    (end,) = [record for record in told if record["event"] == "disk_wear"]
    assert (end["paths"], end["steps"], end["written_bytes"]) == ([path], 3, 3 * whole)
    assert (end["read_bytes"], end["written_bytes_a_step"]) == (masters + 2 * whole, whole)
    assert end["written_bytes_a_day"] > 0
