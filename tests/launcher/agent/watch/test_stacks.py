"""A host's answer where its ranks are: complete once those who can answer have, and never later than its patience."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsrun.contract.heartbeats import HeartbeatTable
from dsrun.launcher.agent.start.flight_recorder import RecorderFiles
from dsrun.launcher.agent.start.worker import RankProcess
from dsrun.launcher.agent.watch.stacks import StackTaking
from dsrun.launcher.protocol import RankStack
from support.dumps import dump, entry


class Rank:
    """A rank's recorder, played by this process, which catches no signal for stacks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.mkfifo(folder / "0.pipe")
        self.pipe = os.open(folder / "0.pipe", os.O_RDONLY | os.O_NONBLOCK)
        self._table = HeartbeatTable(1)
        self.taking = StackTaking(
            [RankProcess(0, 0, psutil.Process())],
            run_dir=str(folder),
            table=self._table,
            recorders={0: RecorderFiles(folder / "dump0", folder / "0.pipe")},
            now_s=0.0,
        )

    def writes(self, data: bytes) -> None:
        (self._folder / "dump0").write_bytes(data)

    def look(self, now_s: float) -> RankStack | None:
        answer = self.taking.look(now_s)
        return None if answer is None else answer.ranks[0]

    def close(self) -> None:
        os.close(self.pipe)
        self._table.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.close()


def test_the_answer_waits_for_the_dump_and_holds_what_it_says(rank: Rank) -> None:
    assert os.read(rank.pipe, 8) == b"1", "it is asked once"
    assert rank.look(1.0) is None
    whole = pickle.dumps(dump([entry(57, state="scheduled")]), protocol=2)
    for half, now_s in ((b"", 2.0), (whole[:100], 3.0)):
        rank.writes(half)
        assert rank.look(now_s) is None
        assert rank.look(now_s + 0.5) is None, "it is being written"
    rank.writes(whole)
    assert rank.look(4.0) is None, "it may be growing"
    answer = rank.look(4.2)
    assert answer is not None
    assert answer.groups is not None
    assert answer.groups[0].waits is not None
    assert (answer.groups[0].waits.number, answer.dump_error) == (57, "")


def test_a_dump_that_does_not_come_is_told(rank: Rank) -> None:
    assert rank.look(39.9) is None
    answer = rank.look(40.1)
    assert answer is not None
    assert (answer.groups, answer.dump_error) == (None, "was not written in time")


def test_a_broken_dump_is_told(rank: Rank) -> None:
    rank.writes(b"\x80\x02.")
    assert rank.look(1.0) is None
    answer = rank.look(1.2)
    assert answer is not None
    assert answer.groups is None
    assert "is damaged" in answer.dump_error


def test_half_of_a_dump_is_told_when_time_is_up(rank: Rank) -> None:
    rank.writes(b"\x80\x02(")
    assert rank.look(39.0) is None
    assert rank.look(39.2) is None
    answer = rank.look(40.1)
    assert answer is not None
    assert (answer.groups, answer.dump_error) == (None, "was not written in time")


#: A thread with the name that torch gives NCCL's watchdog, until stdin ends.
WATCHDOG = """
import ctypes, sys, threading
def watch():
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
    print("named", flush=True)
    sys.stdin.read()
threading.Thread(target=watch).start()
"""


@pytest.mark.parametrize(("thread", "uses_nccl"), [("pt_nccl_watchdg", True), ("pt_autograd_0", False)])
def test_a_rank_whose_nccl_groups_are_watched_is_told_from_others(tmp_path: Path, thread: str, uses_nccl: bool) -> None:
    words = [sys.executable, "-S", "-c", WATCHDOG, thread]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        table = HeartbeatTable(1)
        rank = RankProcess(0, 0, psutil.Process(process.pid))
        taking = StackTaking([rank], run_dir=str(tmp_path), table=table, recorders={}, now_s=0.0)
        answer = taking.look(0.2)
        table.close()
        process.communicate()
    assert answer is not None
    assert answer.ranks[0].uses_nccl is uses_nccl


def test_a_rank_that_ends_while_it_is_asked_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.pipe")
    listens = os.open(tmp_path / "0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    words = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        table = HeartbeatTable(1)
        taking = StackTaking(
            [RankProcess(0, 0, psutil.Process(process.pid))],
            run_dir=str(tmp_path),
            table=table,
            recorders={0: RecorderFiles(tmp_path / "dump0", tmp_path / "0.pipe")},
            now_s=0.0,
        )
        assert taking.look(1.0) is None
        process.communicate()
        answer = taking.look(1.2)
        table.close()
    os.close(listens)
    assert answer is not None
    assert (answer.ranks[0].groups, answer.ranks[0].dump_error) == (None, "")
    # It leaves one when its watchdog ends it.
    assert answer.ranks[0].dump == str(tmp_path / "dump0")


def test_a_rank_that_makes_no_pipe_is_not_waited_for(tmp_path: Path) -> None:
    table = HeartbeatTable(1)
    recorders = {0: RecorderFiles(tmp_path / "dump0", tmp_path / "0.pipe")}
    taking = StackTaking(
        [RankProcess(0, 0, psutil.Process())], run_dir=str(tmp_path), table=table, recorders=recorders, now_s=0.0
    )
    answer = taking.look(0.2)
    table.close()
    assert answer is not None
    assert (answer.ranks[0].groups, answer.ranks[0].dump_error) == (None, "")
