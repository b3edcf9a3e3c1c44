"""The engine says where it is: step and phase as it goes, and the collective in which it waits for the others."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsrun.contract.environment import HEARTBEAT_ENV
from dsrun.contract.heartbeats import Beat, HeartbeatTable
from dsrun.runtime.engine.model.schedules import training_schedule
from support.models import loss_of
from support.ranks import run_ranks
from support.training import batches, config, make_engine, train


@pytest.fixture
def table() -> Iterator[HeartbeatTable]:
    """What an agent of two ranks watches."""
    made = HeartbeatTable(2)
    yield made
    made.close()


def _wait_for(table: HeartbeatTable, slot: int, reached: Callable[[Beat], bool], *, timeout_s: float = 60) -> Beat:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        beat = table.read(slot)
        if beat is not None and reached(beat):
            return beat
        assert time.monotonic() < deadline_s, f"rank {slot} did not get there: {beat}"
        pause.wait(0.01)


def _train_until_one_rank_hangs(table_path: str, gate: str, stage: int) -> int:
    os.environ[HEARTBEAT_ENV] = table_path
    engine = make_engine(config(stage, micro=2))
    train(engine, range(2), samples=4)
    if engine.global_rank == 1:
        Path(gate).read_text()  # blocks until the test opens the other end
    train(engine, range(2, 3), samples=4)
    return engine.global_steps


@pytest.mark.parametrize(
    ("stage", "phase", "collective"), [(1, "backward", "reduce_scatter of unit"), (3, "forward", "all_gather of unit")]
)
def test_a_rank_that_waits_for_one_that_hangs_says_for_what(
    table: HeartbeatTable, tmp_path: Path, stage: int, phase: str, collective: str
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, 2, _train_until_one_rank_hangs, table.path, str(gate), stage)
        hung = _wait_for(table, 1, lambda beat: beat.step == 2 and beat.phase == "script")
        waiting = _wait_for(table, 0, lambda beat: beat.step == 2 and beat.collective.startswith(collective))
        gate.write_text("go on")
        assert ranks.result(timeout=60) == [3, 3]
    assert hung.collective == ""
    assert waiting.phase == phase
    for rank in range(2):
        end = table.read(rank)
        assert end is not None
        assert (end.step, end.phase, end.collective) == (3, "script", "")
        assert end.waited_s > 0
        assert end.collectives > 10


def _save_and_load(table_path: str, folder: str) -> tuple[int, int]:
    os.environ[HEARTBEAT_ENV] = table_path
    engine = make_engine(config(1, micro=2))
    train(engine, range(3), samples=2)
    reader = engine._heartbeat
    before = reader._beats
    engine.save_checkpoint(folder)
    saved = reader._beats
    make_engine(config(1, micro=2)).load_checkpoint(folder)
    return saved - before, reader._beats - saved


def test_saving_and_loading_beat_for_what_they_write_and_read(table: HeartbeatTable, tmp_path: Path) -> None:
    [(saving, loading)] = run_ranks(1, _save_and_load, table.path, str(tmp_path))
    # Beginning and end, and the pieces between.
    assert saving > 2
    assert loading > 2
    end = table.read(0)
    assert end is not None
    assert (end.step, end.phase, end.collective) == (3, "script", "")


def _forward_only(table_path: str) -> None:
    import torch

    os.environ[HEARTBEAT_ENV] = table_path
    engine = make_engine(config(0, micro=2))
    with torch.no_grad():
        engine(torch.zeros(2, 4, dtype=torch.int64))


def test_a_forward_without_gradients_is_evaluation(table: HeartbeatTable) -> None:
    run_ranks(1, _forward_only, table.path)
    end = table.read(0)
    assert end is not None
    assert (end.step, end.phase) == (0, "evaluate")


def _make_two_engines(table_path: str) -> list[bytes]:
    os.environ[HEARTBEAT_ENV] = table_path
    told: list[bytes] = []
    for stages in (2, 1):
        make_engine(config(1, micro=2, pipeline={"stages": stages}))
        told.append(Path(table_path).read_bytes())
    return told


def test_a_rank_says_its_coordinate_until_an_engine_whose_ranks_are_told_apart_by_number(table: HeartbeatTable) -> None:
    for rank, (in_stages, whole) in enumerate(run_ranks(2, _make_two_engines, table.path)):
        assert f"pipe {rank}\0".encode() in in_stages
        assert f"pipe {rank}".encode() not in whole


def _phases_of_chunks() -> list[str]:
    pipeline = {"stages": 2, "schedule": "zero_bubble"}
    engine = make_engine(config(1, micro=2, accumulation=2, pipeline=pipeline))
    told: list[str] = []
    writer = engine._heartbeat
    beat = writer.beat

    def listen(step: int | None = None, phase: str | None = None) -> None:
        if phase is not None and " of chunk " in phase:
            told.append(phase)
        beat(step, phase)

    writer.beat = listen
    engine.train_batch(itertools.repeat(batches(0, samples=2)), loss_fn=loss_of)
    return told


def test_a_rank_says_each_part_of_a_pipelines_batch_before_it_begins() -> None:
    """The first stage's backwards have nobody who waits for them, so the last one's alone are split."""
    words = {"F": "forward", "B": "backward", "I": "backward", "W": "weight grads"}
    kinds = [
        [(action.kind.value, action.micro, action.chunk) for action in actions if action.kind.value in words]
        for actions in training_schedule("zero_bubble", (0, 1), 2).actions
    ]
    assert [{kind for kind, _, _ in of_rank} for of_rank in kinds] == [{"F", "B"}, {"F", "I", "W"}]
    expected = [
        [f"{words[kind]} of micro batch {micro} of chunk {chunk}" for kind, micro, chunk in one] for one in kinds
    ]
    assert run_ranks(2, _phases_of_chunks) == expected
