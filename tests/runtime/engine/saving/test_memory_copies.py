"""A job that is started again goes on from memory, bit for bit, without a disk; also where a host came back empty."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dsrun
from dsrun.contract.environment import MEMORY_COPY_ENV, MEMORY_COPY_EVENT, RESTART_COUNT_ENV, RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.runtime.observe.records import RecordWriter
from support.inside_engine import components_of
from support.models import TinyGPT
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine, train

STEPS, EVERY = 8, 3
SECTION = {"asynchronous": False, "memory_copy": {"every": EVERY}}


def make(folder: str, stage: int, *, hosts: int, attempt: int) -> Any:
    """An engine on one of some hosts, each with a rank and a folder of its own, or all ranks on one."""
    rank = int(os.environ["RANK"])
    node = rank if hosts > 1 else 0
    os.environ.update({"NODE_RANK": str(node), "GROUP_RANK": str(node), "LOCAL_RANK": str(rank if hosts == 1 else 0)})
    os.environ.update({MEMORY_COPY_ENV: f"{folder}/host{node}", RESTART_COUNT_ENV: str(attempt)})
    dsrun.init_distributed()
    model = TinyGPT(tied=True)
    model.blocks[0].requires_grad_(False)
    settings = config(stage, micro=3, checkpoint=SECTION)
    return make_engine(settings, model=model, seed=7 + attempt)


def facts(engine: Any) -> dict[str, Any]:
    return {
        "weights": full_parameters(engine),
        "frozen": [param.detach().clone() for param in engine.module.blocks[0].parameters()],
        "counters": (engine.global_steps, engine.global_samples),
        "draws": torch.rand(3),
    }


def _train(folder: str, stage: int, hosts: int) -> tuple[list[float], dict[str, Any], str]:
    engine = make(folder, stage, hosts=hosts, attempt=0)
    torch.manual_seed(5 + engine.global_rank)
    assert engine.load_checkpoint(f"{folder}/none", missing_ok=True) == (None, None)
    engine.set_memory_copy_client_state(
        lambda: {"step": engine.global_steps, "of": torch.tensor([engine.global_steps])}
    )
    losses = train(engine, range(EVERY), samples=6)
    engine.wait_for_checkpoint()  # on a slow machine the next one would be left out
    losses += train(engine, range(EVERY, STEPS), samples=6)
    engine.wait_for_checkpoint()
    return losses, facts(engine), ""


def _go_on(folder: str, stage: int, hosts: int) -> tuple[list[float], dict[str, Any], str]:
    engine = make(folder, stage, hosts=hosts, attempt=1)
    path, state = engine.load_checkpoint(f"{folder}/none", missing_ok=True)
    assert path is not None
    assert state is not None
    assert engine.global_steps == state["step"] == int(state["of"]) == STEPS // EVERY * EVERY
    losses = train(engine, range(engine.global_steps, STEPS), samples=6)
    return losses, facts(engine), path


@pytest.mark.parametrize(("stage", "hosts", "lost"), [(0, 2, 1), (1, 1, None), (3, 2, 0)])
def test_a_run_goes_on_from_memory_as_if_it_had_not_stopped(
    tmp_path: Path, stage: int, hosts: int, lost: int | None
) -> None:
    before = run_ranks(2, _train, str(tmp_path), stage, hosts)
    if lost is not None:
        shutil.rmtree(tmp_path / f"host{lost}")
    after = run_ranks(2, _go_on, str(tmp_path), stage, hosts)
    for rank, ((losses, expected, _), (found_losses, found, path)) in enumerate(zip(before, after, strict=True)):
        assert path == str(tmp_path / f"host{rank if hosts > 1 else 0}")
        assert found_losses == losses[STEPS // EVERY * EVERY :]
        assert found["counters"] == expected["counters"]
        assert torch.equal(found["draws"], expected["draws"])
        assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())
        assert all(torch.equal(a, b) for a, b in zip(found["frozen"], expected["frozen"], strict=True))


def _choose(folder: str) -> list[int]:
    """Which step each call goes on from: a newer checkpoint on the disk, a tag, the disk once training goes on."""
    engine = make(folder, 1, hosts=1, attempt=0)
    train(engine, range(3), samples=6)
    engine.save_checkpoint(f"{folder}/run", tag="three")
    engine.wait_for_checkpoint()
    train(engine, range(3, 6), samples=6)
    engine.destroy()
    os.environ[RESTART_COUNT_ENV] = "1"
    again = make_engine(config(1, micro=3, checkpoint=SECTION), model=engine_model(), seed=9)
    steps: list[int] = []
    for words in ({}, {"tag": "three"}, {"load_module_only": True}):
        again.load_checkpoint(f"{folder}/run", **words)
        steps.append(again.global_steps)
    again.load_checkpoint(f"{folder}/run")
    train(again, range(6, 8), samples=6)
    again.load_checkpoint(f"{folder}/run")
    steps.append(again.global_steps)
    train(again, range(3, 6), samples=6)
    again.save_checkpoint(f"{folder}/run")
    again.destroy()
    last = make_engine(config(1, micro=3, checkpoint=SECTION), model=engine_model(), seed=11)
    path, _ = last.load_checkpoint(f"{folder}/run")
    assert path == f"{folder}/run/global_step6", "the disk is as new"
    steps.append(last.global_steps)
    return steps


def engine_model() -> TinyGPT:
    model = TinyGPT(tied=True)
    model.blocks[0].requires_grad_(False)
    return model


def test_memory_is_meant_where_it_is_newer_no_tag_is_asked_for_and_training_has_not_begun(tmp_path: Path) -> None:
    assert run_ranks(2, _choose, str(tmp_path)) == [[6, 3, 3, 3, 6]] * 2


def _goes_back(folder: str) -> tuple[int, list[bool]]:
    """A script goes back to a checkpoint, trains on another way from there, and is started again."""
    engine = make(folder, 1, hosts=1, attempt=0)
    train(engine, range(2), samples=6)
    engine.save_checkpoint(f"{folder}/run")
    train(engine, range(2, 7), samples=6)  # there are copies of steps 3 and 6
    engine.load_checkpoint(f"{folder}/run")
    train(engine, range(20, 22), samples=6)
    engine.wait_for_checkpoint()
    newest = full_parameters(engine)
    engine.destroy()
    os.environ[RESTART_COUNT_ENV] = "1"
    again = make_engine(config(1, micro=3, checkpoint=SECTION), model=engine_model(), seed=9)
    path, _ = again.load_checkpoint(f"{folder}/run")
    assert path == folder + "/host0", "the copy that was made on the way that the script went"
    train(again, range(21, 22), samples=6)
    return again.global_steps, [torch.equal(value, newest[name]) for name, value in full_parameters(again).items()]


def test_what_a_script_has_gone_back_from_is_not_gone_on_with(tmp_path: Path) -> None:
    steps, same = run_ranks(2, _goes_back, str(tmp_path))[0]
    assert steps == 4
    assert all(same)


def _two_engines(folder: str) -> list[bool]:
    """Two engines of one kind of model, each of which goes on from its own state."""
    settings = config(1, micro=3, checkpoint=SECTION)
    engines = [make(folder, 1, hosts=1, attempt=0), make_engine(settings, model=engine_model(), seed=9)]
    for number, engine in enumerate(engines):
        train(engine, range(number, EVERY + number), samples=6)
    for engine in engines:
        engine.wait_for_checkpoint()
    weights = [full_parameters(engine) for engine in engines]
    for engine in engines:
        engine.destroy()
    os.environ[RESTART_COUNT_ENV] = "1"
    again = [make_engine(settings, model=engine_model(), seed=seed) for seed in (11, 12)]
    for engine in again:
        engine.load_checkpoint(f"{folder}/none", missing_ok=True)
    return [
        engine.global_steps == EVERY
        and all(torch.equal(value, before[name]) for name, value in full_parameters(engine).items())
        for engine, before in zip(again, weights, strict=True)
    ]


def test_each_of_two_engines_goes_on_from_its_own_state(tmp_path: Path) -> None:
    assert run_ranks(2, _two_engines, str(tmp_path)) == [[True, True]] * 2


def _without_launcher(folder: str) -> bool:
    engine = make_engine(config(1, micro=6, checkpoint={"memory_copy": {"every": 1}}), model=engine_model(), seed=1)
    train(engine, range(2), samples=6)
    return not components_of(engine).copies.are_made


def test_nothing_is_copied_where_nobody_would_start_the_job_again(tmp_path: Path) -> None:
    assert run_ranks(1, _without_launcher, str(tmp_path)) == [True]


def _without_room(folder: str) -> list[str]:
    """The first record of a copy finds no room, the second does; the launcher removes copies by that record."""
    records = JobPaths(Path(folder) / "job").records
    records.parent.mkdir()
    records.symlink_to("/dev/full")
    os.environ[RUN_DIR_ENV] = str(records.parent)
    engine = make(folder, 1, hosts=1, attempt=0)
    train(engine, range(EVERY), samples=3)
    engine.wait_for_checkpoint()
    records.unlink()
    components_of(engine).copies._records = RecordWriter(records)
    train(engine, range(EVERY, 3 * EVERY), samples=3)
    engine.wait_for_checkpoint()
    return [
        record["event"] for line in records.read_text().splitlines() if "samples" not in (record := json.loads(line))
    ]


def test_a_copy_whose_record_found_no_room_is_recorded_with_the_next_one(tmp_path: Path) -> None:
    [events] = run_ranks(1, _without_room, str(tmp_path))
    assert events == [MEMORY_COPY_EVENT]
