"""What a rank beats is what the agent reads, whoever dies, forks or stops in between."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.contract import heartbeats
from dsrun.contract.environment import HEARTBEAT_ENV
from dsrun.contract.heartbeats import (
    SLOT_BYTES,
    HeartbeatTable,
    HeartbeatWriter,
    StartState,
    heartbeat,
    process_writer,
    writer_from_env,
)
from support.core_speed import core_seconds
from support.processes import wait_for_end


@pytest.fixture
def table() -> Iterator[HeartbeatTable]:
    """A table of three ranks."""
    made = HeartbeatTable(3)
    yield made
    made.close()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's writer is made anew in the test, and the one of before comes back after it."""
    monkeypatch.setattr(heartbeats, "_process_writer", None)


def test_a_rank_that_has_not_beaten_says_nothing(table: HeartbeatTable) -> None:
    HeartbeatWriter(table.path, 0)
    assert [table.read(slot) for slot in range(3)] == [None, None, None]


def test_what_was_said_stays_until_something_else_is_said(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 1)
    before_s = time.monotonic()
    writer.beat(phase="build")
    first = table.read(1)
    assert first is not None
    assert (first.beats, first.step, first.phase, first.collective) == (1, None, "build", "")
    assert before_s <= first.time_s <= time.monotonic()
    writer.beat(step=4)
    writer.beat()
    last = table.read(1)
    assert last is not None
    assert (last.beats, last.step, last.phase) == (3, 4, "build")
    assert table.read(0) is None
    assert table.read(2) is None


def test_a_collective_is_named_while_it_is_waited_for_and_its_seconds_add_up(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 2)
    for waited_s in (0.25, 0.5):
        writer.enter("all_gather of unit 12")
        inside = table.read(2)
        assert inside is not None
        assert inside.collective == "all_gather of unit 12"
        writer.leave(waited_s)
    after = table.read(2)
    assert after is not None
    assert (after.collective, after.collectives, after.waited_s, after.beats) == ("", 2, 0.75, 4)


def test_the_longest_wait_is_told_with_the_next_beat_and_stays(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 1)
    writer.beat(step=1)
    writer.tell_longest_wait("reduce_scatter of unit 3", 0.25, 0.5)
    before = table.read(1)
    assert before is not None
    assert (before.longest_wait, before.longest_wait_s, before.step_s) == ("", 0.0, 0.0)
    for step in (2, 3):
        writer.beat(step=step)
        beat = table.read(1)
        assert beat is not None
        assert (beat.step, beat.longest_wait, beat.longest_wait_s) == (step, "reduce_scatter of unit 3", 0.25)
        assert beat.step_s == 0.5
    writer.tell_longest_wait("l" * 100, 1.0, 2.0)
    writer.beat()
    writer.tell_start(StartState.RUNS)
    last = table.read(1)
    assert last is not None
    assert (last.longest_wait, last.longest_wait_s, last.step_s) == ("l" * 48, 1.0, 2.0)
    assert table.read_start(1) is StartState.RUNS
    assert table.read(2) is None


def test_what_an_older_dsrun_beats_is_read_without_a_longest_wait(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 0)
    writer.beat(step=7, phase="forward")
    with mmap.mmap(table.descriptor, 0) as memory:
        # Two beats of 192 bytes behind the count: where ranks and agents of a version without it look.
        assert memory[8 + 192 : 8 + 192 + 8] == (7).to_bytes(8, "little")
        memory[8 + 2 * 192 : SLOT_BYTES - 8] = bytes(SLOT_BYTES - 16 - 2 * 192)
    beat = table.read(0)
    assert beat is not None
    assert (beat.step, beat.phase, beat.longest_wait) == (7, "forward", "")


def test_a_rank_says_its_stage_and_what_it_waits_for_others_of_them(table: HeartbeatTable) -> None:
    writers = [HeartbeatWriter(table.path, slot) for slot in range(3)]
    for writer in writers:
        writer.beat(step=1)
    silent = table.read(2)
    assert silent is not None
    assert (silent.stage, silent.stages, silent.schedule_wait, silent.stage_wait_s) == (0, 0, 0.0, 0.0)
    for stage, writer in enumerate(writers[:2]):
        writer.tell_stage(stage, 2, schedule_wait=0.125)
        writer.tell_stage_wait(0.25 * stage)
    said = [table.read(slot) for slot in range(3)]
    assert [(one.stage, one.stages, one.schedule_wait, one.stage_wait_s) for one in said if one is not None] == [
        (0, 2, 0.125, 0.0),
        (1, 2, 0.125, 0.25),
        (0, 0, 0.0, 0.0),
    ]
    assert [one.beats for one in said if one is not None] == [1, 1, 1]  # no beats of their own


def test_a_rank_says_its_coordinate_until_it_says_another(table: HeartbeatTable) -> None:
    writers = [HeartbeatWriter(table.path, slot) for slot in range(3)]
    for slot, writer in enumerate(writers):
        writer.tell_coordinate(f"data 0, tensor {slot}")
        writer.tell_stage(slot, 3, schedule_wait=0.5)
        writer.beat()

    def said() -> list[tuple[str, int, int]]:
        return [(beat.coordinate, beat.stage, beat.beats) for beat in map(table.read, range(3)) if beat is not None]

    assert said() == [("data 0, tensor 0", 0, 1), ("data 0, tensor 1", 1, 1), ("data 0, tensor 2", 2, 1)]
    writers[0].tell_coordinate("pipe 1")
    writers[1].tell_coordinate("")
    writers[2].tell_coordinate("c" * 100)
    assert said() == [("pipe 1", 0, 1), ("", 1, 1), ("c" * 64, 2, 1)]  # no beats of their own


def test_a_table_of_an_older_dsrun_takes_beats_and_no_stages(table: HeartbeatTable) -> None:
    os.ftruncate(table.descriptor, 3 * SLOT_BYTES)  # ends with the last slot, as that version's does
    writer = HeartbeatWriter(table.path, 2)
    writer.tell_start(StartState.IMPORTS_TORCH)
    before = Path(table.path).read_bytes()
    writer.tell_stage(1, 2, schedule_wait=0.125)
    writer.tell_stage_wait(0.25)
    writer.tell_coordinate("data 1, tensor 0")
    assert Path(table.path).read_bytes() == before
    writer.beat(step=7)
    assert Path(table.path).read_bytes()[2 * SLOT_BYTES] == 1  # its first beat


def test_long_words_are_cut_and_stay_readable(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 2)
    writer.beat(phase="p" * 47 + "ä")  # the cut goes through the letter
    writer.enter("c" * 500)
    beat = table.read(2)
    assert beat is not None
    assert beat.phase == "p" * 47 + "\N{REPLACEMENT CHARACTER}"
    assert beat.collective == "c" * 112


def test_a_slot_outside_of_the_table_is_refused(table: HeartbeatTable) -> None:
    with pytest.raises(ValueError, match="no slot 3 in 1784 bytes"):
        HeartbeatWriter(table.path, 3)


def test_a_rank_that_beats_while_it_is_read_is_never_half_read(table: HeartbeatTable) -> None:
    child = os.fork()
    if child == 0:
        writer = HeartbeatWriter(table.path, 1)
        step = 0
        while True:
            step += 1
            writer.beat(step=step, phase=f"{step}")
    try:
        deadline_s = time.monotonic() + 30
        seen: set[int] = set()
        while len(seen) < 2000 and time.monotonic() < deadline_s:
            beat = table.read(1)
            if beat is not None:
                assert beat.phase == f"{beat.step}"
                assert beat.beats == beat.step
                seen.add(beat.beats)
        assert len(seen) >= 2
    finally:
        os.kill(child, signal.SIGKILL)
        assert wait_for_end(child, timeout_s=30)
        os.waitpid(child, 0)


def test_a_rank_stopped_in_the_middle_of_a_beat_leaves_the_one_before(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 0)
    writer.beat(step=6, phase="forward")
    writer.beat(step=7)
    with mmap.mmap(table.descriptor, 0) as memory:
        memory[8 + 192 : 8 + 192 + 100] = b"x" * 100  # the beginning of the third beat
    beat = table.read(0)
    assert beat is not None
    assert (beat.beats, beat.step, beat.phase) == (2, 7, "forward")


def test_a_rank_outlives_the_table() -> None:
    table = HeartbeatTable(1)
    writer = HeartbeatWriter(table.path, 0)
    table.close()
    writer.beat(step=1)
    writer.enter("barrier")
    writer.leave(0.0)


def test_the_environment_says_which_slot(table: HeartbeatTable) -> None:
    writer_from_env({HEARTBEAT_ENV: table.path, "LOCAL_RANK": "2"}).beat(step=9)
    beat = table.read(2)
    assert beat is not None
    assert beat.step == 9


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LOCAL_RANK": "0"},
        {HEARTBEAT_ENV: "/proc/self/fd/99999", "LOCAL_RANK": "0"},
        {HEARTBEAT_ENV: "/dev/null", "LOCAL_RANK": "0"},
        {HEARTBEAT_ENV: "TABLE", "LOCAL_RANK": "7"},
        {HEARTBEAT_ENV: "TABLE", "LOCAL_RANK": "x"},
    ],
)
def test_training_goes_on_unwatched_where_there_is_no_slot(table: HeartbeatTable, env: dict[str, str]) -> None:
    writer_from_env({name: table.path if value == "TABLE" else value for name, value in env.items()}).beat(step=1)
    assert [table.read(slot) for slot in range(3)] == [None, None, None]


@pytest.mark.usefixtures("fresh")
def test_a_script_beats_into_its_ranks_slot(table: HeartbeatTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, table.path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    heartbeat(step=3, phase="evaluate")
    heartbeat(step=4)
    beat = table.read(1)
    assert beat is not None
    assert (beat.beats, beat.step, beat.phase) == (2, 4, "evaluate")


@pytest.mark.usefixtures("fresh")
def test_a_fork_beats_into_the_slot_of_its_own_environment(
    table: HeartbeatTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_ENV, table.path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    heartbeat(step=1)
    mine = process_writer()
    assert process_writer() is mine
    child = os.fork()
    if child == 0:
        os.environ["LOCAL_RANK"] = "1"
        heartbeat(step=50)
        os._exit(0)
    assert wait_for_end(child, timeout_s=30)
    assert os.waitpid(child, 0)[1] == 0
    beats = [table.read(slot) for slot in range(2)]
    assert [beat.step for beat in beats if beat is not None] == [1, 50]


@pytest.mark.depends_on_speed("20 us a beat")
def test_a_beat_costs_microseconds(table: HeartbeatTable) -> None:
    writer = HeartbeatWriter(table.path, 0)

    def beat() -> None:
        for step in range(100):
            writer.beat(step=step, phase="forward")

    # About 1 us; the bound is for a machine that does much else.
    assert core_seconds(beat, tries=10) / 100 < 20e-6


def test_the_table_is_as_large_as_its_slots(table: HeartbeatTable) -> None:
    assert os.fstat(table.descriptor).st_size == 3 * (SLOT_BYTES + 16 + 64) + 8
