"""Silence becomes a question to the hosts, and their answers a verdict that is told once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.protocol import Exit, Output, Pulse, RankStack, RankStatus, StreamName
from dsrun.launcher.session.progress_watch import ProgressWatch
from dsrun.launcher.session.rank_table import RankTable
from support.jobs import RecordingSink, program_plan

TIMEOUT_S = 5.0


class Watched:
    """A watch over two hosts with a rank each, at a time of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.plan = program_plan(folder, "command", "true", ranks=1, hosts=2)
        self.table = RankTable(self.plan)
        self.sink = RecordingSink()
        self._output = JobOutput(self.plan, self.sink)
        self.watch = ProgressWatch(self.table, self._output, self.plan, timeout_s=TIMEOUT_S)
        self.watch.started([0, 1])
        self.now_s = time.monotonic()

    def look_for(self, seconds: float) -> bool:
        """Looks every second, as a session does; returns whether hosts were to be asked."""
        asked = False
        for _ in range(round(seconds)):
            self.now_s += 1
            asked |= self.watch.look(self.now_s, ["here", "here2"])
        return asked

    def events(self) -> list[str]:
        lines = Path(self.plan.run_dir, "events.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]


def stack(rank: int, state: str = "S") -> RankStack:
    text = 'Current thread 0x1 (most recent call first):\n  File "train.py", line 5 in wait\n' if state == "S" else ""
    return RankStack(rank=rank, state=state, kernel="", text=text, phase="", collective="", step=None, idle_s=None)


def printed(text: str, *, rank: int = 0, stream: StreamName = "stderr") -> Output:
    return Output(rank=rank, stream=stream, sequence=0, time_s=0.0, text=text)


ENDS = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2) ran for 600014 milliseconds before\n"


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_hosts_are_asked_once_after_the_time_out_and_not_before(watched: Watched) -> None:
    assert not watched.look_for(TIMEOUT_S - 1)
    assert not watched.watch.printed(printed("loss 0.5\n"))
    assert not watched.look_for(TIMEOUT_S - 1)
    assert watched.look_for(3)
    assert not watched.look_for(5), "one question is enough"


def test_the_verdict_waits_for_all_hosts_and_names_who_is_stopped(watched: Watched) -> None:
    watched.look_for(TIMEOUT_S + 2)
    watched.watch.answered("here", [stack(0)])
    assert watched.watch.verdict(watched.now_s) is None
    watched.watch.answered("here2", [stack(1, "T")])
    hang = watched.watch.verdict(watched.now_s)
    assert hang is not None
    assert "rank 1 is stopped" in hang.lines[0]
    assert watched.events() == ["hang"]
    assert watched.watch.verdict(watched.now_s) is None


def test_the_verdict_names_ranks_with_the_coordinates_that_they_have_told(watched: Watched) -> None:
    statuses = [
        RankStatus(
            rank=rank,
            beats=1,
            step=None,
            idle_s=0.0,
            waited_s=0.0,
            phase="",
            collective="",
            cpu_percent=0.0,
            rss_bytes=0,
            coordinate=f"pipe {rank}",
        )
        for rank in (0, 1)
    ]
    watched.watch.pulse(Pulse(ranks=statuses, time_s=0.0))
    assert watched.watch.printed(printed(ENDS))
    watched.watch.ask(watched.now_s, ["here", "here2"])
    watched.watch.answered("here", [stack(0, "")])
    watched.watch.answered("here2", [stack(1, "T")])
    assert watched.watch.verdict(watched.now_s) is None, "the job is ended by torch"
    begin, _, told = watched.sink.notes[0].partition(": ")
    assert begin == "torch's watchdog ends rank 0 (pipe 0)"
    assert told == "rank 1 (pipe 1) is stopped (SIGSTOP or a debugger)"


def test_a_host_that_is_gone_or_late_holds_up_no_verdict(watched: Watched) -> None:
    watched.look_for(TIMEOUT_S + 2)
    watched.watch.answered("here", [stack(0)])
    watched.watch.gone("here2")
    assert watched.watch.verdict(watched.now_s) is not None


def test_a_host_that_never_answers_is_named(watched: Watched) -> None:
    watched.look_for(TIMEOUT_S + 2)
    watched.watch.answered("here", [stack(0)])
    hang = watched.watch.verdict(watched.now_s + 60)
    assert hang is not None
    assert any("here2" in line for line in hang.lines)


def test_a_rank_that_has_returned_makes_no_hang_of_itself(watched: Watched) -> None:
    for rank in (0, 1):
        watched.table.exited(Exit(rank=rank, status=0, time_s=1.0))
        watched.watch.ended(rank)
    assert not watched.look_for(3 * TIMEOUT_S)


def test_hosts_are_asked_before_torch_ends_a_rank_and_what_they_say_is_told(watched: Watched) -> None:
    assert not watched.watch.printed(printed(ENDS, stream="stdout")), "torch writes to stderr"
    assert watched.watch.printed(printed(ENDS))
    watched.watch.ask(watched.now_s, ["here", "here2"])
    assert not watched.watch.printed(printed(ENDS, rank=1)), "one question is enough"
    watched.watch.answered("here", [stack(0, "")])
    assert watched.watch.is_asking_before_end
    watched.watch.answered("here2", [stack(1, "T")])
    assert watched.watch.verdict(watched.now_s) is None, "the job is ended by torch"
    assert not watched.watch.is_asking_before_end
    assert watched.sink.notes[0] == "torch's watchdog ends rank 0: rank 1 is stopped (SIGSTOP or a debugger)"
    assert watched.events()[0] == "hang"


def test_nothing_is_told_where_all_ranks_have_ended_before_they_were_asked(watched: Watched) -> None:
    assert watched.watch.printed(printed(ENDS))
    watched.watch.ask(watched.now_s, ["here", "here2"])
    watched.watch.answered("here", [stack(0, "")])
    watched.watch.gone("here2")
    assert watched.watch.verdict(watched.now_s) is None
    assert (watched.sink.notes, watched.watch.is_asking_before_end) == ([], False)


def test_ranks_that_never_start_are_the_verdict_though_there_is_no_stack(tmp_path: Path) -> None:
    plan = program_plan(tmp_path, "command", "true", ranks=2)
    output = JobOutput(plan, RecordingSink())
    watch = ProgressWatch(RankTable(plan), output, plan, timeout_s=TIMEOUT_S, start_limit_s=60.0)
    watch.pulse(Pulse(ranks=[], time_s=0.0, importing=[0, 1]))
    now_s = time.monotonic()
    asked = [second for second in range(100) if watch.look(now_s + second, [])]
    assert len(asked) == 1
    assert asked[0] >= 60
    hang = watch.verdict(now_s + 100)
    assert hang is not None
    assert hang.lines == ("ranks 0, 1 are still importing torch after 1m 0s",)
