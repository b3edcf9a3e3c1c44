"""A job over its attempts, against scripted agents: when it is started again, from where, and what is said."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.environment import CHECKPOINT_EVENT
from dsrun.contract.error_file import WorkerError
from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.protocol import (
    Exit,
    Finished,
    Hello,
    Output,
    Pulse,
    RankStack,
    RankStatus,
    Stacks,
    Start,
    Started,
    Stop,
    TakeStacks,
)
from dsrun.launcher.session.job_run import JobRun, Policies
from dsrun.launcher.session.rank_table import Outcome
from dsrun.launcher.transport.fake import NOTHING_LEFT, Await, Call, FakeChannel, Step, is_sweep
from support.jobs import RecordingSink

pytestmark = pytest.mark.timeout(60)

DONE = Finished(unkillable=[])


class AttemptsTransport:
    """One host; each attempt has a script of its own, and there may not be more attempts than scripts."""

    def __init__(self, attempts: Sequence[Sequence[Step]]) -> None:
        self.channels: list[FakeChannel] = []
        self._attempts = attempts

    def start(self, host: HostSpec, argv: Sequence[str]) -> FakeChannel:
        if is_sweep(argv):
            return FakeChannel([NOTHING_LEFT])
        self.channels.append(FakeChannel(self._attempts[len(self.channels)]))
        return self.channels[-1]

    def plans(self) -> list[LaunchPlan]:
        starts = [message for channel in self.channels for message in channel.received if isinstance(message, Start)]
        return [LaunchPlan.from_json(start.plan) for start in starts]


def plan_for(folder: Path, *, ranks: int = 1) -> LaunchPlan:
    return make_plan(
        Allocation(hosts=(HostSpec(name="box", slots=ranks, source="test"),)),
        Program(kind="command", target="true", args=(), python="python3"),
        job_id="j1",
        start="exec",
        cwd="/",
        env={},
        run_dir=str(folder),
        grace_s=10,
        nonce="first-nonce",
    )


def job_for(
    folder: Path,
    transport: AttemptsTransport,
    sink: RecordingSink,
    *,
    ranks: int = 1,
    max_restarts: int = 0,
    first_wait_s: float = 0.01,
    **policies: Any,
) -> JobRun:
    plan = dataclasses.replace(plan_for(folder, ranks=ranks), max_restarts=max_restarts)
    wanted = Policies(max_restarts=max_restarts, first_wait_s=first_wait_s, **policies)
    return JobRun(plan, transport, JobOutput(plan, sink), python="python3", policies=wanted)


def run(
    folder: Path, attempts: Sequence[Sequence[Step]], **policies: Any
) -> tuple[Outcome, RecordingSink, AttemptsTransport]:
    transport, sink = AttemptsTransport(attempts), RecordingSink()
    outcome = job_for(folder, transport, sink, **policies).run()
    return outcome, sink, transport


def hello() -> Hello:
    return Hello(pid=1, time_s=time.time())


def attempt(status: int, *more: Step, error: WorkerError | None = None) -> list[Step]:
    return [hello(), Started(pids=[11]), *more, Exit(rank=0, status=status, time_s=time.time(), error=error), DONE]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_without_restarts_a_failure_is_the_end_and_no_word_is_lost_on_it(tmp_path: Path) -> None:
    outcome, sink, _ = run(tmp_path, [attempt(3)])
    assert (outcome.exit_code, outcome.attempts) == (3, 1)
    assert sink.notes == []
    (end,) = events(tmp_path, "end")
    assert (end["outcome"], end["exit_code"], end["attempts"]) == ("failed", 3, 1)


def test_a_script_that_fails_3_times_and_then_succeeds_is_done_with_3_restarts(tmp_path: Path) -> None:
    outcome, sink, transport = run(tmp_path, [attempt(3), attempt(3), attempt(3), attempt(0)], max_restarts=3)
    assert (outcome.exit_code, outcome.report, outcome.attempts) == (0, None, 4)
    told = [note for note in sink.notes if note.startswith("restart ")]
    assert [note.split(" in ")[0] for note in told] == [f"restart {number} of 3" for number in (1, 2, 3)]
    assert [plan.attempt for plan in transport.plans()] == [0, 1, 2, 3]
    assert len({plan.nonce for plan in transport.plans()}) == 4
    assert [event["attempt"] for event in events(tmp_path, "restart")] == [1, 2, 3]
    assert [event["attempt"] for event in events(tmp_path, "start")] == [0, 1, 2, 3]


def test_with_2_restarts_it_fails_with_its_own_code_and_says_so(tmp_path: Path) -> None:
    outcome, sink, _ = run(tmp_path, [attempt(3)] * 3, max_restarts=2)
    assert (outcome.exit_code, outcome.attempts) == (3, 3)
    assert sink.notes[-1] == "not started again: all 2 restarts are used"


def test_steps_that_only_the_end_of_a_rank_tells_are_progress(tmp_path: Path) -> None:
    further = [
        [hello(), Started(pids=[11]), Exit(rank=0, status=5, time_s=time.time(), step=step), DONE]
        for step in range(5, 10)
    ]
    outcome, _, _ = run(tmp_path, further, max_restarts=4)
    assert (outcome.exit_code, outcome.attempts) == (5, 5)


def test_a_crash_loop_is_given_up_after_3_restarts_with_the_ranks_own_code(tmp_path: Path) -> None:
    outcome, sink, _ = run(tmp_path, [attempt(5)] * 4, max_restarts=10)
    assert (outcome.exit_code, outcome.attempts) == (5, 4)
    assert sink.notes[-1] == "not started again: 3 restarts in a row made no progress"


def test_an_attempt_that_got_further_does_not_count_as_a_crash_loop(tmp_path: Path) -> None:
    attempts = [attempt(1, step_pulse(step)) for step in range(1, 7)]
    outcome, _, _ = run(tmp_path, [*attempts, attempt(0)], max_restarts=10)
    assert (outcome.exit_code, outcome.attempts) == (0, 7)


def test_each_failure_is_told_in_short_before_the_restart(tmp_path: Path) -> None:
    raised = WorkerError(message="ValueError: boom", traceback="", time_s=time.time())
    _, sink, _ = run(tmp_path, [attempt(1, error=raised), attempt(0)], max_restarts=1)
    assert sink.notes == [
        "attempt 1 failed: rank 0 on box (pid 11) exited with code 1",
        "  ValueError: boom",
        f"  full log: {tmp_path}/rank0.log",
        "restart 1 of 1 in 10 ms",
    ]


def test_a_restart_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step40"

    def save() -> None:
        checkpoint.mkdir(parents=True)
        (checkpoint / "index.json").write_text("{}")
        record = {"event": CHECKPOINT_EVENT, "time": 1.0, "path": str(checkpoint), "step": 40}
        JobPaths(tmp_path).records.write_text(json.dumps(record) + "\n")

    _, sink, transport = run(tmp_path, [attempt(1, Call(save)), attempt(0)], max_restarts=1)
    assert [plan.resume for plan in transport.plans()] == [None, str(checkpoint)]
    assert sink.notes[-1] == f"restart 1 of 1 in 10 ms from checkpoint {checkpoint}"


def test_a_checkpoint_on_a_host_with_folders_of_its_own_is_named_with_the_host(tmp_path: Path) -> None:
    record = {"event": CHECKPOINT_EVENT, "time": 1.0, "path": "/data/step40", "step": 40}
    JobPaths(tmp_path).records.write_text(json.dumps(record) + "\n")
    apart = Hello(pid=1, time_s=time.time(), own_folder=True)
    failed = [apart, Started(pids=[11]), Exit(rank=0, status=1, time_s=time.time()), DONE]
    # The second is asked whether the checkpoint is complete, and is gone.
    _, sink, _ = run(tmp_path, [failed, [], attempt(0)], max_restarts=1)
    assert sink.notes[-1] == "restart 1 of 1 in 10 ms from checkpoint box:/data/step40"
    assert any(note.startswith("checkpoint box:/data/step40: box could not be asked") for note in sink.notes)


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    mistake = WorkerError(message="error: config: wrong\nhint: mend it", traceback="", time_s=time.time())
    outcome, _, _ = run(tmp_path, [attempt(2, error=mistake)], max_restarts=3)
    assert (outcome.exit_code, outcome.attempts) == (2, 1)


def test_a_lost_host_is_tried_again(tmp_path: Path) -> None:
    outcome, _, _ = run(tmp_path, [[hello()], attempt(0)], max_restarts=1)
    assert (outcome.exit_code, outcome.attempts) == (0, 2)


def test_a_stop_by_the_user_is_no_failure_to_start_again_after(tmp_path: Path) -> None:
    jobs: list[JobRun] = []
    script = [
        hello(),
        Started(pids=[11]),
        Call(lambda: jobs[0].requests.request_stop(signal.SIGINT)),
        Await(Stop),
        Exit(rank=0, status=1, time_s=time.time() + 1),
        DONE,
    ]
    jobs.append(job_for(tmp_path, AttemptsTransport([script]), RecordingSink(), max_restarts=3))
    outcome = jobs[0].run()
    assert (outcome.exit_code, outcome.report, outcome.attempts) == (130, None, 1)


class StoppingSink(RecordingSink):
    """Asks for a stop as soon as a restart was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[JobRun] = []

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("restart "):
            self.jobs[0].requests.request_stop(signal.SIGTERM)


def test_a_stop_during_the_wait_ends_the_job_at_once(tmp_path: Path) -> None:
    sink = StoppingSink()
    sink.jobs.append(job_for(tmp_path, AttemptsTransport([attempt(1)]), sink, max_restarts=1, first_wait_s=1000))
    outcome = sink.jobs[0].run()
    assert (outcome.exit_code, outcome.report) == (143, None)
    (end,) = events(tmp_path, "end")
    assert (end["outcome"], end["attempts"]) == ("stopped", 1)


class AskingSink(RecordingSink):
    """Passes a signal on and remarks something as soon as a restart was announced."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[JobRun] = []

    def note(self, text: str) -> None:
        super().note(text)
        if text.startswith("restart "):
            self.jobs[0].requests.pass_signal(signal.SIGUSR1)
            self.jobs[0].requests.remark("no suspension")


def test_signals_during_the_wait_are_answered_though_no_rank_runs(tmp_path: Path) -> None:
    sink = AskingSink()
    sink.jobs.append(job_for(tmp_path, AttemptsTransport([attempt(1), attempt(0)]), sink, max_restarts=1))
    assert sink.jobs[0].run().exit_code == 0
    assert sink.notes[-2:] == ["SIGUSR1: passed to 0 ranks", "no suspension"]


def test_output_of_every_attempt_reaches_the_log(tmp_path: Path) -> None:
    def line(text: str) -> Output:
        return Output(rank=0, stream="stdout", sequence=0, time_s=0, text=text)

    _, sink, _ = run(tmp_path, [attempt(1, line("first\n")), attempt(0, line("second\n"))], max_restarts=1)
    assert sink.texts(0) == ["first", "second"]
    log = (tmp_path / "rank0.log").read_text()
    assert log.index("first") < log.index("second")


def step_pulse(step: int) -> Pulse:
    return Pulse(ranks=[rank_pulse(0, idle_s=0.1, step=step)], time_s=time.time())


def rank_pulse(rank: int, *, idle_s: float, step: int | None = None) -> RankStatus:
    return RankStatus(
        rank=rank,
        beats=1,
        step=step,
        idle_s=idle_s,
        waited_s=0.0,
        phase="forward",
        collective="",
        cpu_percent=0.0,
        rss_bytes=0,
    )


def hanging(*after: Step) -> list[Step]:
    """Two ranks: one is stopped, the other waits for it."""
    stopped = RankStack(rank=0, state="T", kernel="", text="", phase="forward", collective="", step=4, idle_s=99.0)
    waiting = dataclasses.replace(stopped, rank=1, state="S", collective="all_gather of unit 12")
    return [
        hello(),
        Started(pids=[11, 12]),
        Pulse(ranks=[rank_pulse(0, idle_s=99.0), rank_pulse(1, idle_s=98.0)], time_s=time.time()),
        Await(TakeStacks),
        Stacks(ranks=[stopped, waiting]),
        *after,
    ]


def test_ranks_are_asked_where_they_are_before_they_are_stopped_for_one_that_torch_ends(tmp_path: Path) -> None:
    caught = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2) ran for 600014 milliseconds\n"
    other = RankStack(rank=1, state="T", kernel="", text="", phase="", collective="", step=None, idle_s=None)
    script = [
        hello(),
        Started(pids=[11, 12]),
        Output(rank=0, stream="stderr", sequence=0, time_s=time.time(), text=caught),
        Await(TakeStacks),
        Exit(rank=0, status=-signal.SIGABRT, time_s=time.time()),
        Stacks(ranks=[other]),
        Await(Stop),
        Exit(rank=1, status=-signal.SIGTERM, time_s=time.time() + 3600),
        DONE,
    ]
    outcome, sink, _ = run(tmp_path, [script], ranks=2)
    assert outcome.exit_code == 128 + signal.SIGABRT
    assert sink.notes[0] == "torch's watchdog ends rank 0: rank 1 is stopped (SIGSTOP or a debugger)"
    assert "; stopping 1 other rank" in sink.notes[-1]


def ended(*statuses: int) -> list[Step]:
    exits = [Exit(rank=rank, status=status, time_s=time.time() + 3600) for rank, status in enumerate(statuses)]
    return [*exits, DONE]


VERDICT = (
    "no progress for 1m 39s: rank 0 is stopped (SIGSTOP or a debugger) during forward, "
    "rank 1 waits in all_gather of unit 12"
)


def test_a_hang_is_reported_and_the_job_left_alone(tmp_path: Path) -> None:
    outcome, sink, _ = run(tmp_path, [hanging(*ended(0, 0))], ranks=2, hang_timeout_s=30.0)
    assert outcome.exit_code == 0
    assert sink.notes[0] == VERDICT
    (hang,) = events(tmp_path, "hang")
    assert hang["lines"][0] == VERDICT


def test_ranks_that_have_all_ended_when_they_are_asked_were_no_hang(tmp_path: Path) -> None:
    gone = RankStack(rank=0, state="", kernel="", text="", phase="", collective="", step=None, idle_s=None)
    idle = Pulse(ranks=[rank_pulse(0, idle_s=99.0)], time_s=time.time())
    script = [hello(), Started(pids=[11]), idle, Await(TakeStacks), Stacks(ranks=[gone]), *ended(0)]
    outcome, sink, _ = run(tmp_path, [script], hang_timeout_s=30.0, on_hang="stop")
    assert (outcome.exit_code, sink.notes, events(tmp_path, "hang")) == (0, [], [])


def test_a_hang_ends_the_job_with_76_where_the_user_wants_it(tmp_path: Path) -> None:
    attempts = [hanging(Await(Stop), *ended(-9, -15))]
    outcome, _, _ = run(tmp_path, attempts, ranks=2, hang_timeout_s=30.0, on_hang="stop", max_restarts=3)
    assert (outcome.exit_code, outcome.attempts) == (76, 1)
    assert outcome.report is not None
    assert outcome.report.render()[0] == f"error: {VERDICT}"


def test_a_restart_after_a_hang_that_no_option_allows_is_refused_with_a_word(tmp_path: Path) -> None:
    attempts = [hanging(Await(Stop), *ended(-9, -15))]
    outcome, sink, _ = run(tmp_path, attempts, ranks=2, hang_timeout_s=30.0, on_hang="restart")
    assert (outcome.exit_code, outcome.attempts) == (76, 1)
    assert sink.notes[-1] == "not started again: `--on-hang restart` needs `--max-restarts N`"


def test_a_hang_counts_as_a_restart_where_the_user_wants_one(tmp_path: Path) -> None:
    attempts = [hanging(Await(Stop), *ended(-9, -15)), [hello(), Started(pids=[11, 12]), *ended(0, 0)]]
    outcome, sink, _ = run(tmp_path, attempts, ranks=2, hang_timeout_s=30.0, on_hang="restart", max_restarts=1)
    assert (outcome.exit_code, outcome.attempts) == (0, 2)
    assert f"attempt 1 failed: {VERDICT}" in sink.notes
