"""The first cause is named, once, with the exit code that the table in `failures` promises."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from dsrun.contract.error_file import WorkerError
from dsrun.launcher.failures.first_failure import judge
from dsrun.launcher.failures.report import (
    EXIT_CODES,
    EXIT_HANG,
    EXIT_HOST_LOST,
    Hang,
    HostLoss,
    RankEnd,
    UserStop,
    describe_status,
    exit_code_of,
)
from dsrun.launcher.protocol import Collective, GpuFinding, GroupProgress, OomKill

GLOO = WorkerError(message="RuntimeError: [pair.cc:547] Connection closed by peer [::1]:2", traceback="", time_s=9.99)
TIMED_OUT = WorkerError(
    message="RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
    traceback="Traceback ...",
    time_s=9.0,
)


def end(
    rank: int,
    status: int | None,
    time_s: float | None = 10.0,
    *,
    error: WorkerError | None = None,
    last_lines: tuple[str, ...] = (),
) -> RankEnd:
    return RankEnd(
        rank=rank,
        host="box",
        pid=100 + rank,
        status=status,
        time_s=time_s,
        error=error,
        last_lines=last_lines,
        log=f"/run/rank{rank}.log",
    )


def test_a_job_whose_ranks_all_return_0_exits_0_without_report() -> None:
    assert judge([end(0, 0), end(1, 0)], [], None) == (0, None)


def test_the_rank_that_ended_first_is_blamed_and_the_others_are_counted() -> None:
    ends = [end(0, -15, 11.0), end(1, 3, 10.0), end(2, 1, 10.5), end(3, -9, 12.0), end(4, 0, 5.0)]
    code, report = judge(ends, [], None)
    assert code == 3
    assert report is not None
    assert report.render() == [
        "error: rank 1 on box (pid 101) exited with code 3",
        "full log: /run/rank1.log",
        "2 other ranks were stopped after it",
        "1 other rank was seen to fail after it",
    ]


def test_the_time_in_the_error_file_decides_over_the_end_of_the_process() -> None:
    # Rank 1 raised first, but took seconds to tear down while rank 0 died of the broken connection.
    raised = WorkerError(message="ValueError: boom", traceback="Traceback ...", time_s=9.0)
    code, report = judge([end(0, 1, 10.0), end(1, 7, 12.0, error=raised)], [], None)
    assert code == 7
    assert report is not None
    assert report.render()[:2] == ["error: rank 1 on box (pid 101) exited with code 7", "  ValueError: boom"]


def test_sigkill_that_was_not_ours_hints_at_the_out_of_memory_killer() -> None:
    code, report = judge([end(0, -9, last_lines=("step 1", "step 2"))], [], None)
    assert code == 137
    assert report is not None
    assert report.render() == [
        "error: rank 0 on box (pid 100) was killed by SIGKILL",
        "last lines of rank 0:",
        "  | step 1",
        "  | step 2",
        "hint: nothing in dsrun sent this signal, and the kernel counts no kill for want of memory here; systemd-oomd "
        "and earlyoom do it uncounted: see `dmesg`, `journalctl -u systemd-oomd -u earlyoom`",
        "full log: /run/rank0.log",
    ]


def test_a_users_mistake_is_shown_once_as_it_is_and_not_as_a_crash() -> None:
    message = "error: model: no parameter requires a gradient\nhint: call requires_grad_()"
    ends = [end(rank, 2, error=WorkerError(message=message, traceback="", time_s=9.0 + rank)) for rank in range(4)]
    code, report = judge(ends, [], None)
    assert code == 2
    assert report is not None
    assert report.render() == message.split("\n")


def test_a_rank_that_had_raised_before_the_stop_keeps_its_own_code_though_the_stop_killed_it() -> None:
    # It raised first, but its peer was the first to be gone; the stop that followed met it on its way out.
    raised = WorkerError(message="ValueError: boom", traceback="Traceback ...", time_s=9.0)
    code, report = judge([end(0, 3, 10.0), end(1, -15, 10.2, error=raised)], [], None, stopped_at_s=10.1)
    assert code == 1
    assert report is not None
    assert report.render() == [
        "error: rank 1 on box (pid 101) failed",
        "  ValueError: boom",
        "full log: /run/rank1.log",
        "1 other rank was seen to fail after it",
    ]


@pytest.mark.parametrize(("message", "status"), [("error: ck: no checkpoint here", 1), ("error: config: wrong", 2)])
def test_a_stop_that_kills_a_rank_on_its_way_out_makes_neither_a_mistake_of_a_failure_nor_a_failure_of_a_mistake(
    message: str, status: int
) -> None:
    word = WorkerError(message=message, traceback="", time_s=9.0, exit_code=status)
    late = dataclasses.replace(GLOO, time_s=9.1)
    # Its peer was gone first, or it was itself.
    for ends in (
        [end(0, 1, 10.0, error=late), end(1, -15, 10.2, error=word)],
        [end(0, 1, 10.15, error=late), end(1, status, 10.0, error=word)],
    ):
        code, report = judge(ends, [], None, stopped_at_s=10.1)
        assert code == status
        assert report is not None
        assert report.is_mistake == (status == 2)
        if status == 2:
            assert report.render() == [
                message,
                "rank 1 on box (pid 101) was the first to say so",
                "full log: /run/rank1.log",
                "1 other rank failed after it, of the broken connection",
            ]


def test_a_mistake_on_one_rank_names_it_where_others_were_stopped_or_said_something_else() -> None:
    word = WorkerError(message="error: engine.step: no backward", traceback="", time_s=9.0, exit_code=2)
    other = dataclasses.replace(word, message="error: engine.step: twice", time_s=9.5)
    for ends, last in (
        ([end(0, -15, 11.0), end(1, 2, error=word)], "1 other rank was stopped after it"),
        ([end(0, 2, 11.0, error=other), end(1, 2, error=word)], "1 other rank was seen to fail after it"),
        ([end(0, 0, 8.0), end(1, 2, error=word)], "full log: /run/rank1.log"),
    ):
        _, report = judge(ends, [], None)
        assert report is not None
        lines = report.render()
        assert lines[:3] == [
            "error: engine.step: no backward",
            "rank 1 on box (pid 101) was the first to say so",
            "full log: /run/rank1.log",
        ]
        assert lines[-1] == last


def test_a_word_that_a_rank_left_after_the_stop_does_not_hide_the_signal() -> None:
    late = WorkerError(message="RuntimeError: interrupted", traceback="Traceback ...", time_s=10.15)
    code, report = judge([end(0, 3, 10.0), end(1, -15, 10.2, error=late)], [], None, stopped_at_s=10.1)
    assert code == 3
    assert report is not None
    assert report.render()[-1] == "1 other rank was stopped after it"


def test_our_own_failure_names_the_rank_that_met_it() -> None:
    word = WorkerError(message="error: checkpoint c1: disk full\nhint: make room", traceback="", time_s=9.0)
    code, report = judge([end(0, -15, 11.0), end(1, 1, error=word)], [], None)
    assert code == 1
    assert report is not None
    assert report.render() == [
        "error: rank 1 on box (pid 101) exited with code 1",
        "  error: checkpoint c1: disk full",
        "  hint: make room",
        "full log: /run/rank1.log",
        "1 other rank was stopped after it",
    ]


def test_ranks_that_never_ran_are_not_counted() -> None:
    never = [dataclasses.replace(end(rank, None, None), pid=None) for rank in range(3)]
    _, report = judge(never, [HostLoss(host="box", reason="cannot start: too many open files", time_s=9.0)], None)
    assert report is not None
    assert report.render() == ["error: host box: cannot start: too many open files"]


def test_a_rank_that_lost_its_peer_is_not_blamed_though_its_word_came_first() -> None:
    # Rank 1 was killed and rank 0 saw the closed connection, a moment before rank 1 was reaped.
    code, report = judge(
        [end(0, 1, 10.1, error=GLOO), end(1, -9, 10.0), end(2, -15, 11.0)], [], None, stopped_at_s=10.2
    )
    assert code == 137
    assert report is not None
    assert report.render()[0] == "error: rank 1 on box (pid 101) was killed by SIGKILL"
    assert report.render()[-2:] == [
        "1 other rank failed after it, of the broken connection",
        "1 other rank was stopped after it",
    ]


def test_a_follower_is_blamed_where_nobody_else_failed_by_itself() -> None:
    # Rank 1 exits with a code of its own when it is asked to end: that is no failure.
    code, report = judge([end(0, 1, 10.1, error=GLOO), end(1, 4, 10.5)], [], None, stopped_at_s=10.2)
    assert code == 1
    assert report is not None
    assert report.headline() == "rank 0 on box (pid 100) exited with code 1: lost the connection to another rank"


def test_a_rank_that_returned_0_early_is_named_where_another_lost_its_connection() -> None:
    ends = [end(0, 1, 10.1, error=GLOO), end(1, 0, 9.0), end(2, 0, 11.0), end(3, -15, 10.5)]
    code, report = judge(ends, [], None, stopped_at_s=10.2)
    assert code == 1
    assert report is not None
    assert report.render()[-2:] == ["rank 1 had ended with exit code 0 before it", "1 other rank was stopped after it"]
    # Who failed by itself needs no such explanation.
    _, report = judge([end(0, 3, 10.1), end(1, 0, 9.0)], [], None)
    assert report is not None
    assert report.render()[-1] == "full log: /run/rank0.log"


def test_a_rank_that_returned_0_is_named_though_its_peer_saw_the_closed_connection_before_it_was_reaped() -> None:
    for stopped_at_s, named in ((10.2, True), (10.0, False)):
        _, report = judge([end(0, 1, 10.1, error=GLOO), end(1, 0, 10.05)], [], None, stopped_at_s=stopped_at_s)
        assert report is not None
        assert ("rank 1 had ended with exit code 0 before it" in report.render()) == named


def test_a_peer_that_names_the_first_rank_and_the_collective_is_heard_where_torch_names_neither() -> None:
    alone = "error: rank 0 waited 6 s for rank 1 of this host in all_reduce at step 2"
    broken = "error: rank 0 waited in all_reduce at step 2: rank 1 says nothing (Connection closed by peer)"
    for torchs, theirs, last in (
        (TIMED_OUT, alone, "1 other rank was seen to fail after it"),
        (TIMED_OUT, broken, "1 other rank failed after it, of the broken connection"),
        (dataclasses.replace(GLOO, time_s=9.0), broken, "1 other rank failed after it, of the broken connection"),
    ):
        word = WorkerError(message=f"{theirs}\nhint: the same calls", traceback="", time_s=9.4, exit_code=1)
        _, report = judge([end(0, -15, 10.3, error=word), end(1, 1, 10.0, error=torchs)], [], None, stopped_at_s=10.2)
        assert report is not None
        assert report.headline().startswith("rank 1 on box")
        assert report.render()[-6:] == [
            "full log: /run/rank1.log",
            "rank 0 says of it:",
            f"  {theirs}",
            "  hint: the same calls",
            "full log: /run/rank0.log",
            last,
        ]


def test_a_peer_is_not_heard_that_names_another_rank_or_failed_much_later_or_where_the_first_tells_enough() -> None:
    def witnesses(message: str, time_s: float, first: WorkerError) -> bool:
        word = WorkerError(message=message, traceback="", time_s=time_s, exit_code=1)
        _, report = judge([end(0, 1, 20.0, error=word), end(1, 1, 10.0, error=first)], [], None)
        assert report is not None
        return report.witness is not None

    assert witnesses("error: rank 0 waited for rank 1", 9.4, TIMED_OUT)
    assert not witnesses("error: rank 0 waited for rank 12", 9.4, TIMED_OUT)
    assert not witnesses("error: rank 0 waited for rank 1", 12.0, TIMED_OUT)
    assert not witnesses("error: rank 0 waited for rank 1", 9.4, dataclasses.replace(TIMED_OUT, message="KeyError: 3"))


def test_many_ranks_that_returned_early_are_counted() -> None:
    _, report = judge([end(0, 1, 10.1, error=GLOO), *(end(rank, 0, 9.0) for rank in range(1, 6))], [], None)
    assert report is not None
    assert report.render()[-1] == "5 ranks had ended with exit code 0 before it"


def test_a_lost_host_is_the_cause_of_broken_connections_to_it() -> None:
    loss = HostLoss(host="n2", reason="the agent closed its channel unexpectedly", time_s=11.0)
    code, report = judge([end(0, 1, 10.1, error=GLOO), end(1, None, None)], [loss], None, stopped_at_s=10.2)
    assert code == EXIT_HOST_LOST
    assert report is not None
    assert report.cause is loss


def test_63_followers_are_one_line() -> None:
    followers = [end(rank, 1, 10.5, error=GLOO) for rank in range(1, 64)]
    _, report = judge([end(0, -11, 9.0), *followers], [], None, stopped_at_s=9.1)
    assert report is not None
    assert report.render()[-1] == "63 other ranks failed after it, of the broken connection"


def test_a_rank_that_was_stopped_while_it_lost_its_peer_is_counted_once() -> None:
    _, report = judge([end(0, -15, 10.5, last_lines=(GLOO.message,)), end(1, -9, 10.0)], [], None)
    assert report is not None
    assert report.render()[-1] == "1 other rank was stopped after it"


def test_the_cause_stands_in_the_first_line_and_the_way_out_below() -> None:
    last = ("step 7", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    _, report = judge([end(0, 1, last_lines=last)], [], None)
    assert report is not None
    lines = report.render()
    assert lines[0] == "error: rank 0 on box (pid 100) exited with code 1: CUDA out of memory"
    assert lines[-2].startswith("hint: lower the micro batch")


def test_a_kill_for_want_of_memory_is_told_from_one_that_somebody_sent() -> None:
    killed = dataclasses.replace(end(0, -9), oom=OomKill(by="limit", group="/slurm/job_7", limit_bytes=64 << 30))
    _, report = judge([killed], [], None)
    assert report is not None
    told = "out of memory: the limit of 64.0 GiB of the control group /slurm/job_7"
    assert report.headline() == f"rank 0 on box (pid 100) was killed by SIGKILL: {told}"


def test_a_rank_whose_network_failed_is_the_cause_and_those_that_lost_it_follow() -> None:
    head = "DistBackendError: NCCL error\nncclRemoteError: A call failed\nLast error:\n"
    said = "NET/IB: Got completion from peer 10.40.7.12<40554> with status=12 opcode=0 len=0 vendor err 129 (Send)"
    link = WorkerError(message=f"{head}{said}", traceback="Traceback ...", time_s=9.5)
    closed = f"{head}socketProgress: Connection closed by remote peer b<1>"
    lost = WorkerError(message=closed, traceback="Traceback ...", time_s=9.0)
    _, report = judge([end(0, 1, 10.0, error=lost), end(1, 1, 10.5, error=link), end(2, 1, 10.0, error=lost)], [], None)
    assert report is not None
    assert report.headline() == (
        "rank 1 on box (pid 101) exited with code 1: the InfiniBand or RoCE path to 10.40.7.12 failed: "
        "no answer after all retries (status 12)"
    )
    assert (report.followed, report.also_failed) == (2, 0)


def test_the_card_that_a_rank_died_of_is_named_for_a_ticket() -> None:
    error = WorkerError(message="AcceleratorError: CUDA error: unknown error", traceback="Traceback ...", time_s=9.0)
    gpus = (
        GpuFinding(index=3, uuid="GPU-3a", address="0000:3b:00.0", ranks=[0]),
        GpuFinding(address="0000:9d:00.0", ranks=[1], faults=["GPU is lost", "Xid 79"]),
    )
    _, report = judge([dataclasses.replace(end(0, 1, error=error), gpus=gpus)], [], None)
    assert report is not None
    told = [
        "GPU 3 of box (GPU-3a, 0000:3b:00.0): its driver knows of no fault",
        "a GPU of box (0000:9d:00.0): GPU is lost; Xid 79",
    ]
    assert report.render()[2:4] == told
    assert report.short()[2:4] == told


def test_a_hang_that_ended_the_job_is_its_cause_and_has_a_code_of_its_own() -> None:
    hang = Hang(lines=("no progress for 5 s: rank 1 is stopped", "  rank 1 on box: ..."), time_s=10.0)
    code, report = judge([end(0, -15, 11.0), end(1, -9, 20.0)], [], None, hang=hang)
    assert code == EXIT_HANG == 76
    assert report is not None
    assert report.render() == ["error: no progress for 5 s: rank 1 is stopped", "  rank 1 on box: ..."]


def test_hosts_that_were_lost_later_are_named_too() -> None:
    losses = [HostLoss(host=f"n{n}", reason="no route", time_s=n) for n in (1, 2)]
    _, report = judge([end(0, None, None)], losses, None)
    assert report is not None
    assert report.render() == [
        "error: host n1: no route",
        "host n2 was lost after it: no route",
        "1 rank was stopped after it",
    ]


def test_a_code_whose_last_eight_bits_are_0_does_not_look_like_success() -> None:
    assert [exit_code_of(status) for status in (256, 512, 257, 3)] == [1, 1, 1, 3]


def test_the_reference_page_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "exit-codes.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| ") and line != "| code | meaning |"]
    assert rows == [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stop_by_the_user_exits_with_128_plus_its_signal_and_has_no_report(signum: int, code: int) -> None:
    ends = [end(0, -signum, 11.0), end(1, 1, 11.0), end(2, 0, 11.0)]
    assert judge(ends, [], UserStop(signal=signum, time_s=10.0)) == (code, None)


def test_a_failure_before_the_users_stop_keeps_its_code() -> None:
    code, report = judge([end(0, 5, 9.0), end(1, -2, 11.0)], [], UserStop(signal=2, time_s=10.0))
    assert code == 5
    assert report is not None


@pytest.mark.parametrize("time_s", [9.8, 10.2])
def test_ranks_that_die_of_the_signal_that_stops_the_job_are_no_failure_whoever_was_told_first(time_s: float) -> None:
    assert judge([end(0, -15, time_s), end(1, 0, 12.0)], [], UserStop(signal=15, time_s=10.0)) == (143, None)
    # Another's end, or long before, is.
    for status, ended_s in ((-9, 9.8), (-15, 5.0)):
        code, report = judge([end(0, status, ended_s), end(1, 0, 12.0)], [], UserStop(signal=15, time_s=10.0))
        assert code == 128 - status
        assert report is not None


def test_a_lost_host_has_its_own_code_and_its_agents_last_words() -> None:
    loss = HostLoss(host="box", reason="the agent was killed by SIGKILL unexpectedly", time_s=9.0)
    code, report = judge([end(0, None, None), end(1, None, None)], [loss], None)
    assert code == EXIT_HOST_LOST == 74
    assert report is not None
    assert report.render() == [
        "error: host box: the agent was killed by SIGKILL unexpectedly",
        "2 ranks were stopped after it",
    ]


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (3, "exited with code 3", 3),
        (-11, "was killed by SIGSEGV", 139),
        (-6, "was killed by SIGABRT", 134),
        (-40, "was killed by signal 40", 168),
    ],
)
def test_a_status_is_decoded(status: int, words: str, code: int) -> None:
    assert describe_status(status) == words
    assert exit_code_of(status) == code


def test_a_time_out_of_nccl_is_told_with_who_waited_for_whom_as_far_as_ranks_left_dumps() -> None:
    said = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=57, "
        "OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
    )
    call = Collective(number=57, name="all_reduce", data="", state="scheduled", line="train.py:3")
    waits = GroupProgress(name="0", label="default_pg", members="0-2", queued=call, waits=call)
    ends = [
        dataclasses.replace(end(0, -6, 10.0, last_lines=(said,)), groups=[waits]),
        dataclasses.replace(end(1, -15, 11.0), groups=[]),
        end(2, -15, 11.0),
    ]
    code, report = judge(ends, [], None, stopped_at_s=10.5)
    assert code == 134
    assert report is not None
    told = "default_pg: rank 0 waits in all_reduce 57 (train.py:3), rank 1 has not called it, rank 2 left no dump"
    head = (
        "rank 0 on box (pid 100) was killed by SIGABRT: "
        "a collective timed out: all_reduce 57 of default_pg was not done after 10m 0s"
    )
    assert report.render()[:2] == [f"error: {head}", f"  {told}"]
    assert report.short()[:2] == [head, told]
    # A dump may be of an earlier hang that went by: only a time-out is told with it.
    ends[0] = dataclasses.replace(ends[0], last_lines=("boom",))
    _, report = judge(ends, [], None, stopped_at_s=10.5)
    assert report is not None
    assert report.collectives == ()


def test_the_first_failure_and_its_witness_are_named_with_their_coordinates() -> None:
    killed = dataclasses.replace(end(3, -9), coordinate="data 1, tensor 1")
    _, report = judge([end(0, 0), killed], [], None)
    assert report is not None
    assert report.render()[0] == "error: rank 3 (data 1, tensor 1) on box (pid 103) was killed by SIGKILL"
    word = WorkerError(message="error: rank 1 says nothing in all_reduce", traceback="", time_s=9.4, exit_code=1)
    tells = dataclasses.replace(end(0, -15, 10.3, error=word), coordinate="data 0, tensor 0")
    _, report = judge([tells, end(1, 1, error=TIMED_OUT)], [], None, stopped_at_s=10.2)
    assert report is not None
    assert "rank 0 (data 0, tensor 0) says of it:" in report.render()


def test_a_mistake_that_one_rank_met_is_said_with_its_coordinate() -> None:
    word = WorkerError(message="error: no such layer", traceback="", time_s=9.0, exit_code=2)
    met = dataclasses.replace(end(1, 2, error=word), coordinate="pipe 1, data 0")
    _, report = judge([end(0, -15, 11.0), met], [], None)
    assert report is not None
    assert "rank 1 (pipe 1, data 0) on box (pid 101) was the first to say so" in report.render()


def test_what_the_first_failure_was_doing_is_told_and_who_waited_in_what() -> None:
    grid = {rank: f"pipe {rank // 2}, tensor {rank % 2}" for rank in range(4)}
    receive = "receive of activations of micro batch 3 for chunk 1"
    waits = {0: "all_reduce of outputs", 2: f"{receive} from rank 0", 3: f"{receive} from rank 1"}
    ends = [
        dataclasses.replace(
            end(rank, -9 if rank == 1 else -15, 10.0 if rank == 1 else 10.2),
            coordinate=grid[rank],
            step=7,
            phase="stage 0 forward" if rank == 1 else "script",
            collective=waits.get(rank, ""),
        )
        for rank in range(4)
    ]
    _, report = judge(ends, [], None, stopped_at_s=10.1)
    assert report is not None
    assert report.render()[:3] == [
        "error: rank 1 (pipe 0, tensor 1) on box (pid 101) was killed by SIGKILL",
        "  it was in stage 0 forward, after step 7",
        "  rank 0 (pipe 0, tensor 0) waited in all_reduce of outputs, "
        f"ranks 2, 3 (pipe 1) waited in {receive} from ranks 0, 1 (pipe 0)",
    ]
    # In its own code the script's last lines tell more.
    alone = dataclasses.replace(ends[1], phase="script")
    _, report = judge([alone], [], None)
    assert report is not None
    assert report.render()[1].startswith("hint: ")


def test_of_many_waits_those_of_the_fewest_ranks_are_told_and_the_rest_counted() -> None:
    ends = [dataclasses.replace(end(rank, -15, 10.2), collective=f"all_reduce of {rank}") for rank in range(1, 11)]
    _, report = judge([end(0, -9), *ends], [], None, stopped_at_s=10.1)
    assert report is not None
    assert report.waited.startswith("rank 1 waited in all_reduce of 1, rank 2 waited in ")
    assert report.waited.endswith(", rank 8 waited in all_reduce of 8, others in 2 more waits")


def test_one_that_has_ended_well_waited_for_nobody() -> None:
    returned = dataclasses.replace(end(1, 0, 9.0), collective="all_reduce of norm")
    _, report = judge([end(0, -9), returned], [], None)
    assert report is not None
    assert report.waited == ""


def test_of_ranks_that_agree_to_fail_the_one_with_an_error_of_its_own_is_blamed() -> None:
    words = "error: /checkpoints: rank 2 could not save its part, nothing was published: ValueError: no more data"
    agreed = WorkerError(message=words, traceback="", time_s=9.0, exit_code=1)
    own = WorkerError(message="ValueError: no more data", traceback="Traceback ...", time_s=9.1, exit_code=1)
    ends = [end(0, 1, 9.5, error=agreed), end(1, 1, 9.6, error=agreed), end(2, -15, 9.9, error=own)]
    code, report = judge(ends, [], None, stopped_at_s=9.6)
    assert code == 1
    assert report is not None
    assert report.render()[:2] == ["error: rank 2 on box (pid 102) failed", "  ValueError: no more data"]
    # One that failed much later had another reason, and so had one that is not named.
    for other in (dataclasses.replace(own, time_s=12.0), None):
        late = end(2, 1, 12.5, error=other) if other else end(3, 1, 9.9, error=own)
        _, report = judge([*ends[:2], late], [], None)
        assert report is not None
        assert report.headline() == "rank 0 on box (pid 100) exited with code 1"
