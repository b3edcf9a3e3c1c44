"""The front end's decisions, against scripted agents: whom it stops, when, and what it makes of it."""

from __future__ import annotations

import dataclasses
import json
import signal
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from dsrun.contract.environment import CONFIG_ENV, GROUP_TIMEOUT_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError
from dsrun.launcher.failures.hang import HangPolicy
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.logs.job_output import JobOutput
from dsrun.launcher.logs.reader import read_log
from dsrun.launcher.plan.launch_plan import LaunchPlan, Program, make_plan
from dsrun.launcher.protocol import (
    VERSION,
    Exit,
    Failed,
    Finished,
    GpuFinding,
    GpuFindings,
    Hello,
    Kill,
    Lease,
    Listening,
    Meet,
    Message,
    Note,
    Output,
    Passed,
    Peers,
    RankStack,
    RankStatus,
    RankTraceBytes,
    Reading,
    Records,
    Signal,
    Stacks,
    Start,
    Started,
    Stop,
    TakeStacks,
)
from dsrun.launcher.session.agents import Session
from dsrun.launcher.session.rank_table import Outcome
from dsrun.launcher.transport.fake import (
    NOTHING_LEFT,
    Await,
    Call,
    Die,
    FakeChannel,
    FakeTransport,
    Step,
    is_sweep,
)
from support.core_speed import core_seconds
from support.jobs import RecordingSink

pytestmark = pytest.mark.timeout(20)


def plan_for(folder: Path, *, hosts: Sequence[str] = ("box",)) -> LaunchPlan:
    return make_plan(
        Allocation(hosts=tuple(HostSpec(name=name, slots=2, source="test") for name in hosts)),
        Program(kind="command", target="true", args=(), python="python3"),
        job_id="j1",
        start="exec",
        cwd="/",
        env={},
        run_dir=str(folder),
        grace_s=10,
        nonce="test-nonce",
    )


def session_for(plan: LaunchPlan, transport: FakeTransport, sink: RecordingSink) -> Session:
    return Session(plan, transport, JobOutput(plan, sink), python="python3")


def run(
    folder: Path, script: Sequence[Step], *, on_session: Callable[[Session], None] = lambda session: None
) -> tuple[Outcome, RecordingSink, list[Message]]:
    transport, sink = FakeTransport({"box": script}), RecordingSink()
    session = session_for(plan_for(folder), transport, sink)
    on_session(session)
    outcome = session.run()
    return outcome, sink, transport.channels["box"].received


def hello() -> Hello:
    return Hello(pid=1, time_s=time.time())


def out(text: str, *, rank: int = 0, stream: str = "stdout") -> Output:
    return Output(rank=rank, stream="stderr" if stream == "stderr" else "stdout", sequence=0, time_s=0, text=text)


def exited(rank: int, status: int) -> Exit:
    return Exit(rank=rank, status=status, time_s=time.time())


BEGIN: list[Step] = [hello(), Started(pids=[11, 12])]
DONE = Finished(unkillable=[])


def test_a_job_without_failure_is_left_alone_and_exits_0(tmp_path: Path) -> None:
    outcome, sink, received = run(tmp_path, [*BEGIN, out("a\nb\n"), exited(0, 0), exited(1, 0), DONE])
    assert (outcome.exit_code, outcome.report) == (0, None)
    assert [end.pid for end in outcome.ends] == [11, 12]
    assert sink.texts(0) == ["a", "b"]
    assert [type(message) for message in received] == [Start]


def test_what_a_hosts_clock_is_off_is_written_down(tmp_path: Path) -> None:
    greeting = Hello(pid=1, time_s=time.time() + 3600)
    run(tmp_path, [greeting, Started(pids=[11, 12]), exited(0, 0), exited(1, 0), DONE])
    events = [json.loads(line) for line in JobPaths(tmp_path).events.read_text().splitlines()]
    (clock,) = [event for event in events if event["event"] == "clock"]
    assert (clock["host"], round(clock["offset_s"])) == ("box", -3600)


def test_lines_of_a_host_whose_clock_is_an_hour_ahead_are_recorded_by_the_front_ends(tmp_path: Path) -> None:
    ahead_s = time.time() + 3600
    line = dataclasses.replace(out("a\n"), time_s=ahead_s)
    run(tmp_path, [Hello(pid=1, time_s=ahead_s), Started(pids=[11, 12]), line, exited(0, 0), exited(1, 0), DONE])
    (read,) = (line for line in read_log(tmp_path) if line.rank == 0)
    assert read.text == "a"
    assert abs(read.time_s - time.time()) < 60


def test_the_first_failing_rank_stops_the_others_once(tmp_path: Path) -> None:
    script = [*BEGIN, exited(1, 3), Await(Stop), exited(0, -15), DONE]
    outcome, sink, received = run(tmp_path, script)
    assert outcome.exit_code == 3
    assert outcome.report is not None
    assert outcome.report.stopped == 1
    assert received[1:] == [Stop(signal=signal.SIGTERM)]
    assert sink.notes == ["rank 1 on box exited with code 3; stopping 1 other rank (grace 10.0s)"]


def test_what_the_driver_says_of_a_hosts_gpus_is_in_the_report_of_its_ranks(tmp_path: Path) -> None:
    own = GpuFinding(index=0, uuid="GPU-0", address="0000:1b:00.0", ranks=[0, 1])
    lost = GpuFinding(address="0000:9d:00.0", faults=["GPU is lost"])
    lines = [
        "GPU 0 of box (GPU-0, 0000:1b:00.0): its driver knows of no fault",
        "a GPU of box (0000:9d:00.0): GPU is lost",
    ]
    for asked_for, told in ((1, lines), (0, lines[1:])):
        answer = GpuFindings(rank=asked_for, gpus=[own, lost])
        outcome, _, _ = run(tmp_path, [*BEGIN, exited(1, 3), answer, Await(Stop), exited(0, -15), DONE])
        assert outcome.report is not None
        assert [line for line in outcome.report.render() if "GPU" in line] == told


def test_a_rank_that_returns_0_early_stops_nobody(tmp_path: Path) -> None:
    _, _, received = run(tmp_path, [*BEGIN, exited(1, 0), out("more\n"), exited(0, 0), DONE])
    assert [type(message) for message in received] == [Start]


def test_the_report_holds_the_last_lines_and_the_file_all_of_them(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    written = [out(text, rank=1), out("the end", rank=1, stream="stderr")]
    outcome, _, _ = run(tmp_path, [*BEGIN, *written, exited(1, 1), Await(Stop), exited(0, 0), DONE])
    assert outcome.report is not None
    lines = outcome.report.render()
    assert "  | line 99" in lines
    assert "  | the end" in lines
    assert "  | line 0" not in lines
    log = tmp_path / "rank1.log"
    assert f"full log: {log}" in lines
    assert log.read_text() == text + "the end"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_the_file_keeps_every_byte_while_the_console_gets_folded_lines(tmp_path: Path) -> None:
    raw = b"10%\r20%\r30%\nnul\0 bad\xff half \xc3\xa4 no end"
    chunks = [raw[at : at + 5].decode("utf-8", "surrogateescape") for at in range(0, len(raw), 5)]
    _, sink, _ = run(tmp_path, [*BEGIN, *map(out, chunks), exited(0, 0), exited(1, 0), DONE])
    assert (tmp_path / "rank0.log").read_bytes() == raw
    assert sink.texts(0) == ["30%", "nul\0 bad\udcff half ä no end"]


def test_the_users_stop_is_passed_on_and_named_in_the_exit_code(tmp_path: Path) -> None:
    script = [*BEGIN, Await(Stop), exited(0, -2), exited(1, 0), DONE]
    outcome, _, received = run(
        tmp_path, script, on_session=lambda session: session.requests.request_stop(signal.SIGINT)
    )
    assert (outcome.exit_code, outcome.report) == (130, None)
    assert received[1:] == [Stop(signal=signal.SIGINT)]


def test_an_interrupt_is_the_ranks_alone_that_waits_for_a_person(tmp_path: Path) -> None:
    waits = Reading(rank=1, state="waits")
    script = [*BEGIN, waits, out("x\n"), Await(Signal), exited(1, -2), Await(Stop), exited(0, -15), DONE]
    transport, sink = FakeTransport({"box": script}), RecordingSink()
    session = session_for(plan_for(tmp_path), transport, sink)
    sink.act_on_lines(lambda rank, text: session.requests.request_stop(signal.SIGINT))
    outcome = session.run()
    assert transport.channels["box"].received[1:] == [Signal(signal=signal.SIGINT, rank=1), Stop(signal=signal.SIGTERM)]
    assert (outcome.exit_code, outcome.report) == (130, None), "it is the user who ended the job"
    assert session.requests.interrupts_given == 1


def test_a_rank_without_stdin_that_reads_is_told_of_once(tmp_path: Path) -> None:
    script = [*BEGIN, *(Reading(rank=rank, state="has_none") for rank in (1, 0)), exited(0, 0), exited(1, 0), DONE]
    _, sink, _ = run(tmp_path, script)
    assert sink.notes == ["rank 1 reads stdin, which is empty: no rank was given dsrun's own"]


def test_a_second_request_kills(tmp_path: Path) -> None:
    def twice(session: Session) -> None:
        session.requests.request_stop(signal.SIGTERM)
        session.requests.request_stop(signal.SIGTERM)

    script = [*BEGIN, Await(Kill), exited(0, -9), exited(1, -9), DONE]
    outcome, _, received = run(tmp_path, script, on_session=twice)
    assert outcome.exit_code == 143
    assert received[1:] == [Stop(signal=signal.SIGTERM), Kill()]


def test_a_third_request_leaves_at_once_though_the_agent_never_ends(tmp_path: Path) -> None:
    def thrice(session: Session) -> None:
        for _ in range(3):
            session.requests.request_stop(signal.SIGINT)

    outcome, sink, _ = run(tmp_path, [*BEGIN, Await(Start), Await(Hello), DONE], on_session=thrice)
    assert outcome.exit_code == 130
    assert [end.status for end in outcome.ends] == [None, None]
    assert sink.notes[-1] == "SIGINT: leaving; agents go on killing"


def test_kill_now_asks_nobody(tmp_path: Path) -> None:
    script = [*BEGIN, Await(Kill), exited(0, -9), exited(1, -9), DONE]
    outcome, _, received = run(tmp_path, script, on_session=lambda session: session.requests.kill_now(signal.SIGHUP))
    assert outcome.exit_code == 129
    assert received[1:] == [Kill()]


def test_a_request_overtakes_output_that_waits_to_be_shown(tmp_path: Path) -> None:
    transport, sink = (
        FakeTransport({"box": [*BEGIN, *(out("y\n") for _ in range(30)), Await(Stop), DONE]}),
        RecordingSink(),
    )
    session = session_for(plan_for(tmp_path), transport, sink)
    shown_before: list[int] = []

    def stop_once(rank: int, text: str) -> None:
        if not shown_before:
            session.requests.request_stop(signal.SIGTERM)
        if not sink.notes:
            shown_before.append(len(sink.shown))

    sink.act_on_lines(stop_once)
    session.run()
    assert shown_before == [1]


def test_a_request_is_obeyed_while_the_sink_waits_for_its_reader(tmp_path: Path) -> None:
    stopped = threading.Event()
    script = [*BEGIN, out("y\n"), Await(Stop), Call(stopped.set), exited(0, -15), exited(1, -15), DONE]
    sink = RecordingSink()
    session = session_for(plan_for(tmp_path), FakeTransport({"box": script}), sink)

    def reader_does_not_read(rank: int, text: str) -> None:
        session.requests.request_stop(signal.SIGTERM)
        assert session.requests.handle_pending()
        assert stopped.wait(10)

    sink.act_on_lines(reader_does_not_read)
    assert session.run().exit_code == 143


def test_a_request_from_another_thread_while_the_session_waits_is_seen(tmp_path: Path) -> None:
    sessions: list[Session] = []
    stop = Call(lambda: threading.Thread(target=lambda: sessions[0].requests.request_stop(signal.SIGTERM)).start())
    script = [*BEGIN, stop, Await(Stop), exited(0, -15), exited(1, -15), DONE]
    assert run(tmp_path, script, on_session=sessions.append)[0].exit_code == 143


def test_a_stop_that_is_no_signal_says_why(tmp_path: Path) -> None:
    def nobody_reads(session: Session) -> None:
        session.requests.request_stop(signal.SIGTERM, "nobody reads the output")

    script = [*BEGIN, Await(Stop), exited(0, -15), exited(1, -15), DONE]
    _, sink, _ = run(tmp_path, script, on_session=nobody_reads)
    assert sink.notes[0].startswith("nobody reads the output: stopping 2 ranks")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([Die(1)], "the agent exited with code 1 unexpectedly"),
        ([*BEGIN, Die(-9)], "the agent was killed by SIGKILL unexpectedly"),
        ([*BEGIN, exited(0, 0), exited(1, 0)], "the agent exited with code 0 unexpectedly"),
        ([b"Welcome to box!\n"], f"protocol: expected a message of version {VERSION}, got 'Welcome to box!'"),
        ([Hello(pid=1, time_s=0, version=1)], f"its agent speaks protocol 1, this dsrun speaks {VERSION}"),
        ([hello(), Failed(reason="cannot import torch: no", time_s=0), DONE], "cannot import torch: no"),
        ([hello(), Stop(signal=1)], "its agent sent an unexpected Stop"),
    ],
    ids=["at once", "killed", "without last word", "noise", "version", "failed", "nonsense"],
)
def test_a_lost_host_ends_the_job_with_its_own_code_and_reason(tmp_path: Path, script: list[Step], reason: str) -> None:
    outcome, _, _ = run(tmp_path, script)
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.render()[0] == f"error: host box: {reason}"


def test_an_agent_without_a_first_word_is_given_up_with_the_way_out(tmp_path: Path) -> None:
    plan, transport, sink = plan_for(tmp_path), FakeTransport({"box": [Await(Stop)]}), RecordingSink()
    session = Session(plan, transport, JobOutput(plan, sink), python="python3", first_word_s=0.0)
    report = session.run().report
    assert report is not None
    assert report.render()[:2] == [
        "error: host box: its agent did not answer in time and was killed",
        "hint: `--start-timeout 2m` waits longer",
    ]


def test_a_host_that_lacks_what_the_user_named_ends_the_job_as_bad_input(tmp_path: Path) -> None:
    failed = Failed(reason="working folder '/w': no such folder there", time_s=0, hint="way out", is_mistake=True)
    first: list[Step] = [hello(), Await(Stop), DONE]
    outcome, _, _ = run_hosts(tmp_path, {"a": first, "b": [hello(), failed, DONE]})
    assert outcome.exit_code == 2
    assert outcome.report is not None
    assert outcome.report.is_mistake
    assert outcome.report.render()[:2] == ["error: host b: working folder '/w': no such folder there", "hint: way out"]


def test_records_and_notes_of_a_host_reach_the_sink(tmp_path: Path) -> None:
    told = [Records(text='{"a": "\udcff"}\n'), Records(text="{}\n"), Note(text="it says")]
    _, sink, _ = run(tmp_path, [*BEGIN, *told, exited(0, 0), exited(1, 0), DONE])
    assert JobPaths(tmp_path).records.read_bytes() == b'{"a": "\xff"}\n{}\n'
    assert stat.S_IMODE(JobPaths(tmp_path).records.stat().st_mode) == 0o600
    assert sink.notes == ["box: it says"]


@pytest.mark.parametrize("apart", [True, False])
def test_stacks_are_kept_for_a_host_that_cannot_leave_them_in_the_jobs_folder(tmp_path: Path, apart: bool) -> None:
    told = Stacks(ranks=[stack(0, "here\n"), stack(1, "")])
    greeting = Hello(pid=1, time_s=time.time(), own_folder=apart)
    run(tmp_path, [greeting, Started(pids=[11, 12]), told, told, exited(0, 0), exited(1, 0), DONE])
    kept = {path.name: path.read_text() for path in tmp_path.glob("*.stacks.txt")}
    assert kept == ({"rank0.stacks.txt": "here\nhere\n"} if apart else {})


def stack(rank: int, text: str) -> RankStack:
    return RankStack(rank=rank, state="S", kernel="", text=text, phase="", collective="", step=None, idle_s=None)


def test_the_front_ends_folder_is_marked_while_an_attempt_runs(tmp_path: Path) -> None:
    seen: list[Path] = []
    look = Call(lambda: seen.extend(tmp_path.glob(".shared-*")))
    _, _, received = run(tmp_path, [*BEGIN, look, exited(0, 0), exited(1, 0), DONE])
    assert isinstance(received[0], Start)
    assert [path.name for path in seen] == [received[0].mark]
    assert list(tmp_path.glob(".shared-*")) == []


def test_the_config_travels_as_it_is_now_and_a_missing_one_is_left_to_its_readers(tmp_path: Path) -> None:
    sent: list[str | None] = []
    for path in (tmp_path / "ds.json", tmp_path / "gone"):
        (tmp_path / "ds.json").write_bytes(b'{"a": "\xff"}')
        plan = dataclasses.replace(plan_for(tmp_path), env={CONFIG_ENV: str(path)})
        transport = FakeTransport({"box": [*BEGIN, exited(0, 0), exited(1, 0), DONE]})
        assert session_for(plan, transport, RecordingSink()).run().exit_code == 0
        start = transport.channels["box"].received[0]
        assert isinstance(start, Start)
        sent.append(start.config)
    assert sent == ['{"a": "\udcff"}', None]


def test_a_host_whose_agent_cannot_be_started_is_lost_and_says_why(tmp_path: Path) -> None:
    outcome = session_for(plan_for(tmp_path), FakeTransport({}), RecordingSink()).run()
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.render() == ["error: host box: cannot run 'python3': no script"]


def run_hosts(
    folder: Path, scripts: Mapping[str, Sequence[Step]], *, lease_s: float = 15.0
) -> tuple[Outcome, RecordingSink, FakeTransport]:
    plan = dataclasses.replace(plan_for(folder, hosts=list(scripts)), lease_s=lease_s)
    transport, sink = FakeTransport(scripts), RecordingSink()
    return session_for(plan, transport, sink).run(), sink, transport


def test_the_other_hosts_meet_where_the_first_listens(tmp_path: Path) -> None:
    first = [hello(), Listening(address="10.0.0.1", port=4711), Await(Stop), DONE]
    met = dataclasses.replace(hello(), addresses=["10.0.0.2"])
    second = [met, Await(Meet), Started(pids=[21, 22]), exited(2, 3), DONE]
    outcome, _, transport = run_hosts(tmp_path, {"a": first, "b": second})
    assert outcome.exit_code == 3
    assert Peers(addresses=[["10.0.0.2"]]) in transport.channels["a"].received
    assert not any(isinstance(message, Peers) for message in transport.channels["b"].received)
    assert Meet(address="10.0.0.1", port=4711) in transport.channels["b"].received
    assert not any(isinstance(message, Meet) for message in transport.channels["a"].received)


def test_a_hang_over_two_hosts_names_files_by_the_machine_where_they_lie(tmp_path: Path) -> None:
    """Stacks come to the job's folder from all hosts; a dump stays on a host that does not share it."""
    words = "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 600000 milliseconds\n"
    asked = out(words, stream="stderr")
    here, there = (
        Stacks(ranks=[dataclasses.replace(stack(rank, "here\n"), dump=f"{folder}/nccl_trace_rank_{rank}")])
        for rank, folder in ((0, tmp_path), (2, "/tmp/dsrun-j1-x"))
    )
    both_run = threading.Event()
    begins = Call(lambda: require(both_run.wait(10)))
    first = [hello(), Started(pids=[11, 12]), begins, asked, Await(TakeStacks), here, exited(0, 0), exited(1, 0), DONE]
    apart = Hello(pid=1, time_s=time.time(), own_folder=True)
    second = [
        apart,
        Started(pids=[21, 22]),
        Call(both_run.set),
        Await(TakeStacks),
        there,
        exited(2, 0),
        exited(3, 0),
        DONE,
    ]
    _, sink, _ = run_hosts(tmp_path, {"a": first, "b": second})
    assert sink.notes[-2:] == [
        f"all collectives: {tmp_path}/nccl_trace_rank_<N>, "
        "b:/tmp/dsrun-j1-x/nccl_trace_rank_<N> (until the attempt ends)",
        f"all threads: {tmp_path}/rank<N>.stacks.txt",
    ]
    assert (tmp_path / "rank2.stacks.txt").read_text() == "here\n"


def test_a_failure_on_one_host_stops_the_ranks_of_all(tmp_path: Path) -> None:
    failed = Exit(rank=3, status=7, time_s=time.time() - 5)
    first = [hello(), Started(pids=[11, 12]), Await(Stop), exited(0, -15), exited(1, -15), DONE]
    second = [hello(), Started(pids=[21, 22]), failed, Await(Stop), exited(2, -15), DONE]
    outcome, sink, _ = run_hosts(tmp_path, {"a": first, "b": second})
    assert outcome.exit_code == 7
    assert outcome.report is not None
    assert outcome.report.stopped == 3
    assert [end.host for end in outcome.ends] == ["a", "a", "b", "b"]
    assert sink.notes[0].startswith("rank 3 on b exited with code 7; stopping ")


def test_of_64_hosts_the_dead_one_is_named_though_another_is_slow(tmp_path: Path) -> None:
    # The slow one says nothing until it is told to stop; nobody waits for it to be blamed.
    scripts: dict[str, list[Step]] = {f"n{n}": [hello(), Await(Stop), DONE] for n in range(64)}
    scripts["n17"] = [Await(Stop), DONE]
    scripts["n40"] = [Die(255)]
    outcome, _, _ = run_hosts(tmp_path, scripts)
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.render()[0] == "error: host n40: the connection to its agent was lost"


def test_a_host_that_falls_silent_is_lost_and_its_job_ends(tmp_path: Path) -> None:
    silent = [hello(), Started(pids=[11, 12]), Await(Finished)]
    without_ranks_yet: list[Step] = [hello(), Await(Stop), DONE]
    outcome, _, transport = run_hosts(tmp_path, {"a": silent, "b": without_ranks_yet}, lease_s=1.0)
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.render()[0] == "error: host a: no word from its agent for 1 s"
    assert transport.channels["a"].killed


def test_agents_get_leases_while_the_sink_waits_for_its_reader(tmp_path: Path) -> None:
    leased = threading.Event()
    script = [*BEGIN, out("y\n"), Await(Lease), Call(leased.set), exited(0, 0), exited(1, 0), DONE]
    sink = RecordingSink(lambda rank, text: require(leased.wait(10)))
    plan = dataclasses.replace(plan_for(tmp_path), lease_s=0.5)
    assert session_for(plan, FakeTransport({"box": script}), sink).run().exit_code == 0


class DeafChannel(FakeChannel):
    """Takes the plan, and hangs in the first send after it until it is killed."""

    def __init__(self, script: Sequence[Step]) -> None:
        super().__init__(script)
        self._released = threading.Event()

    def send(self, data: bytes) -> None:
        if b'"type":"lease"' in data:
            assert self._released.wait(15)
        super().send(data)

    def kill(self) -> None:
        super().kill()
        self._released.set()


class DeafTransport(FakeTransport):
    def start(self, host: HostSpec, argv: Sequence[str]) -> FakeChannel:
        return FakeChannel([NOTHING_LEFT]) if is_sweep(argv) else DeafChannel([*BEGIN, Await(Finished)])


def test_an_agent_that_takes_nothing_more_is_given_up_though_a_send_hangs_on_it(tmp_path: Path) -> None:
    plan = dataclasses.replace(plan_for(tmp_path), lease_s=1.0)
    outcome = session_for(plan, DeafTransport({}), RecordingSink()).run()
    assert outcome.exit_code == 74
    assert outcome.report is not None
    assert outcome.report.headline() == "host box: no word from its agent for 1 s"


def require(happened: bool) -> None:
    assert happened


def test_a_stop_before_a_host_has_the_plan_starts_nothing_there(tmp_path: Path) -> None:
    outcome, _, received = run(
        tmp_path, [Await(Start), *BEGIN], on_session=lambda s: s.requests.request_stop(signal.SIGINT)
    )
    assert outcome.exit_code == 130
    assert not any(isinstance(message, Kill) for message in received)


def test_a_signal_is_passed_on_and_the_ranks_that_would_have_died_are_named(tmp_path: Path) -> None:
    sessions: list[Session] = []
    usr1 = Call(lambda: sessions[0].requests.pass_signal(signal.SIGUSR1))
    answer = Passed(signal=signal.SIGUSR1, ranks=[0], spared=[1])
    script = [*BEGIN, usr1, Await(Signal), answer, exited(0, 0), exited(1, 0), DONE]
    outcome, sink, received = run(tmp_path, script, on_session=sessions.append)
    assert outcome.exit_code == 0
    assert Signal(signal=signal.SIGUSR1) in received
    assert sink.notes == ["SIGUSR1: passed to 1 rank; rank 1 would have died of it and did not get it"]


def test_events_tell_the_whole_story_in_order(tmp_path: Path) -> None:
    run(tmp_path, [*BEGIN, exited(1, 3), Await(Stop), exited(0, -15), DONE])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    named = [event for event in events if event["event"] != "note"]
    assert [event["event"] for event in named] == [
        "start",
        "clock",
        "rank_started",
        "rank_started",
        "rank_exit",
        "stop",
        "rank_exit",
    ]
    assert (named[4]["rank"], named[4]["status"], named[4]["host"]) == (1, 3, "box")


def test_a_host_whose_agent_was_lost_is_swept_and_what_was_left_there_is_told(tmp_path: Path) -> None:
    answer = b'{"agents": [], "ended": [{"pid": 77, "name": "python3"}], "left": [78]}'
    lost = [*BEGIN, Die(-9)]
    transport, sink = FakeTransport({"box": lost}, swept={"box": answer}), RecordingSink()
    assert session_for(plan_for(tmp_path), transport, sink).run().exit_code == 74
    assert transport.sweeps == ["box"]
    assert sink.notes[-2:] == [
        "box: ended what its lost agent left behind: python3 (77)",
        "box: processes 78 did not end after SIGKILL",
    ]


def test_a_host_that_finished_or_never_began_is_not_swept(tmp_path: Path) -> None:
    _, _, transport = run_hosts(
        tmp_path, {"a": [hello(), Failed(reason="no", time_s=0), DONE], "b": [Await(Stop), DONE]}
    )
    assert transport.sweeps == []


class ListeningTransport(FakeTransport):
    """Remembers with which interpreter each thing was run."""

    def __init__(self, scripts: Mapping[str, Sequence[Step]]) -> None:
        super().__init__(scripts)
        self.interpreters: list[str] = []

    def start(self, host: HostSpec, argv: Sequence[str]) -> FakeChannel:
        self.interpreters.append(argv[0])
        return super().start(host, argv)


@pytest.mark.parametrize(("named", "run"), [(None, "python3"), ("/opt/py/bin/python3", "/opt/py/bin/python3")])
def test_agent_and_sweep_run_with_the_interpreter_that_the_host_names(
    tmp_path: Path, named: str | None, run: str
) -> None:
    plan = plan_for(tmp_path)
    host = dataclasses.replace(plan.nodes[0].host, python=named)
    plan = dataclasses.replace(plan, nodes=(dataclasses.replace(plan.nodes[0], host=host),))
    transport = ListeningTransport({"box": [*BEGIN, Die(1)]})
    session_for(plan, transport, RecordingSink()).run()
    assert transport.interpreters == [run, run]
    assert transport.sweeps == ["box"]


@pytest.mark.parametrize("answer", [b"\n", b"Traceback ...", b"[]", b'{"ended": 3}'])
def test_a_sweep_that_makes_no_sense_changes_nothing(tmp_path: Path, answer: bytes) -> None:
    transport = FakeTransport({"box": [*BEGIN, Die(-9)]}, swept={"box": answer})
    assert session_for(plan_for(tmp_path), transport, RecordingSink()).run().exit_code == 74


def test_processes_that_survive_sigkill_are_named(tmp_path: Path) -> None:
    _, sink, _ = run(tmp_path, [*BEGIN, exited(0, 0), exited(1, 0), Finished(unkillable=[77])])
    assert sink.notes == ["box: processes 77 did not end after SIGKILL"]


def test_a_planted_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / "rank0.log").symlink_to(target)
    with pytest.raises(LaunchError, match=r"rank0\.log"):
        run(tmp_path, [])
    assert target.read_text() == "keep"


class CountingSink:
    """Keeps nothing, so that only the session is measured."""

    def __init__(self) -> None:
        self.events = 0

    def take(self, frame: Output) -> None:
        pass

    def ended(self, rank: int, last_word: str | None) -> None:
        pass

    def tail(self, rank: int) -> tuple[str, ...]:
        return ()

    def log(self, rank: int) -> str:
        return ""

    def note(self, text: str) -> None:
        pass

    def event(self, name: str, **fields: object) -> None:
        self.events += name != "clock"  # greetings of these hosts were made before they were asked

    def pulse(self, ranks: Sequence[RankStatus]) -> None:
        pass

    def records(self, text: str) -> None:
        pass

    def reading(self, told: Reading) -> None:
        pass

    def rank_trace(self, piece: RankTraceBytes) -> None:
        pass

    def stacks(self, ranks: Sequence[RankStack]) -> None:
        pass

    def tick(self, now_s: float) -> float | None:
        return None


@pytest.mark.depends_on_speed("20 ms of a core a host")
@pytest.mark.timeout(120)
def test_1024_hosts_cost_the_front_end_no_more_than_20_ms_of_processor_time_each(tmp_path: Path) -> None:
    hosts = [f"n{number}" for number in range(1024)]
    scripts: dict[str, list[Step]] = {}
    for number, host in enumerate(hosts):
        meets: Step = Await(Meet) if number else Listening(address="10.0.0.1", port=4711)
        ranks = (2 * number, 2 * number + 1)
        scripts[host] = [hello(), meets, Started(pids=[1, 2]), *(exited(rank, 0) for rank in ranks), DONE]
    sink = CountingSink()
    session = Session(plan_for(tmp_path, hosts=hosts), FakeTransport(scripts), sink, python="python3")
    codes: list[int] = []
    assert core_seconds(lambda: codes.append(session.run().exit_code), tries=1) < 0.020 * len(hosts)
    assert codes == [0]
    assert sink.events == 1 + 2 * 2 * len(hosts)


@pytest.mark.parametrize(
    ("hang", "waits_s"), [(None, 2400), (HangPolicy(timeout_s=60), 2400), (HangPolicy(timeout_s=7200), 9600)]
)
def test_ranks_are_told_to_wait_for_each_other_longer_than_a_hang_takes_to_be_found(
    tmp_path: Path, hang: HangPolicy | None, waits_s: float
) -> None:
    transport, sink = FakeTransport({"box": [*BEGIN, exited(0, 0), exited(1, 0), DONE]}), RecordingSink()
    plan = plan_for(tmp_path)
    assert Session(plan, transport, JobOutput(plan, sink), python="python3", hang=hang).run().exit_code == 0
    (start,) = transport.channels["box"].received
    assert isinstance(start, Start)
    assert float(start.plan["env"][GROUP_TIMEOUT_ENV]) == waits_s
