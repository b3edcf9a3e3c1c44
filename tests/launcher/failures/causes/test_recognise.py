"""What a rank said last, in the words of torch, NCCL, Python and the kernel, becomes a cause and a way out."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsrun.deepspeed_missing import missing_module
from dsrun.launcher.failures.causes.recognise import cause_of, signal_name
from dsrun.launcher.failures.causes.rules import Cause
from dsrun.launcher.protocol import OomKill

FOLDER = Path(__file__).parents[3] / "fixtures" / "failures"
TABLE: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "table.yaml").read_text())
HARMLESS = (FOLDER / "harmless_lines.txt").read_text().splitlines()


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text().rstrip("\n")


def error_of(text: str) -> tuple[str, str]:
    """Returns what the rank's error file says of an exception that ended it: message and traceback."""
    lines = [line.partition(": ")[2] if line.startswith("[rank") else line for line in text.split("\n")]
    start = max(number for number, line in enumerate(lines) if line == "Traceback (most recent call last):")
    own = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    # As `type(error).__name__` has it, without the module.
    kind, _, words = lines[own].partition(": ")
    message = "\n".join([f"{kind.rpartition('.')[2]}: {words}", *lines[own + 1 :]])
    return message, "\n".join(lines[start:])


def assert_told(cause: Cause | None, row: dict[str, Any]) -> None:
    if row["words"] is None:
        assert cause is None
        return
    assert cause is not None
    told = (cause.words, cause.follows, cause.timed_out)
    assert told == (row["words"], row.get("follows", False), row.get("timed_out", False))
    assert all(word in (cause.hint or "") for word in row["hint"]), cause.hint


def test_every_text_of_a_failure_has_a_row() -> None:
    texts = {path.stem for path in FOLDER.glob("*.txt")} - {"harmless_lines"}
    assert set(TABLE) == texts
    assert len(texts) >= 53
    assert all(len(text_of(name).split("\n")) <= 30 for name in texts)


@pytest.mark.parametrize("name", TABLE)
def test_the_last_lines_of_a_failure_are_told_as_what_they_are(name: str) -> None:
    row = TABLE[name]
    lines = text_of(name).split("\n")
    assert_told(cause_of(row.get("status", 1), "", "", lines), row)
    # What it printed while all was well says nothing.
    assert_told(cause_of(row.get("status", 1), "", "", [*HARMLESS, *lines]), row)


@pytest.mark.parametrize("name", [name for name in TABLE if "Traceback (most recent" in text_of(name)])
def test_the_error_file_of_a_failure_is_told_as_what_it_is(name: str) -> None:
    message, traceback = error_of(text_of(name))
    lines = ["torch.OutOfMemoryError: CUDA out of memory", *text_of(name).split("\n")]
    assert_told(cause_of(1, message, traceback, lines), TABLE[name])


def test_lines_of_a_job_that_is_well_are_no_cause() -> None:
    assert len(HARMLESS) >= 15
    told = [line for line in HARMLESS if cause_of(1, "", "", [line]) is not None]
    assert told == []
    assert cause_of(1, "", "", HARMLESS) is None


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 1.06 GiB is free. Process 3 has 78.18 GiB memory in use."
)
WATCHDOG = (
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466, NumelOut=466, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)
#: As torch 2.11 and later write it when they end the process, on one line with what calls it.
WATCHDOG_OF_A_GROUP = (
    "  what():  [PG ID 2 PG GUID 9(tensor) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=57, OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=32, "
    "Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
)
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote "
    "process exited or there was a network error, NCCL version 2.21.5"
)
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3475: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
GLOO_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31846"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (WATCHDOG, "a collective timed out: all_reduce 1580 was not done after 10m 0s"),
        (WATCHDOG_OF_A_GROUP, "a collective timed out: all_gather 57 of tensor was not done after 10m 0s"),
        ("OSError: [Errno 24] Too many open files: 'x.bin'", "too many open files"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "a DataLoader worker died"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permission denied"),
        ("RuntimeError: can't start new thread", "no more processes or threads are allowed"),
        ("[rank0]: MemoryError", "out of memory on the host"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out of memory on the host"),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/you/ckpt'", "the disk quota is used up"),
        ("OSError: [Errno 30] Read-only file system: '/data/x'", "a folder is read-only"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "no more processes or threads are allowed"),
        ("DistNetworkError: failed to recv, got 0 bytes", "lost the connection to another rank"),
        ("RuntimeError: NCCL communicator was aborted on rank 3.", "lost the connection to another rank"),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", "this rank sees no GPU"),
        (
            "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
            "the GPU driver is too old for this torch",
        ),
        ("RuntimeError: CUDA error: hardware stack error", "GPU fault"),
        ("RuntimeError: Unexpected error. Error 999: unknown error", "CUDA failed without a reason"),
        (
            "RuntimeError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            "GPU fault: NVLink error",
        ),
        ("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address", "the card cannot use GPU memory"),
        ("RuntimeError: CUDA error: operation not permitted", "a call of CUDA failed"),
    ],
)
@pytest.mark.parametrize("where", ["error file", "last lines"])
def test_what_a_rank_said_is_named_and_has_a_way_out(line: str, words: str, where: str) -> None:
    error, lines = (line, ()) if where == "error file" else ("", ("step 1", "Traceback ...", line, "more"))
    cause = cause_of(1, error, "", lines)
    assert cause is not None
    assert cause.words == words
    assert cause.hint


@pytest.mark.parametrize("line", [REMOTE, GLOO, GLOO_CLOSED])
def test_a_rank_whose_peer_is_gone_is_a_follower(line: str) -> None:
    cause = cause_of(1, line, "", ())
    assert cause is not None
    assert cause.follows


def test_the_error_file_counts_before_lines_that_were_printed_earlier() -> None:
    cause = cause_of(1, OOM, "", (GLOO,))
    assert cause is not None
    assert cause.words == "CUDA out of memory"


def test_what_an_exception_says_itself_counts_before_those_that_led_to_it() -> None:
    chain = "OSError: [Errno 28] No space left on device\n" + GLOO + "\n\nDuring handling of the above ..."
    for first in ("ModuleNotFoundError: No module named 'x'", "ImportError: libx.so: cannot open shared object file"):
        cause = cause_of(1, first, f"{chain}\n{first}", ())
        assert cause is not None
        assert (cause.words, cause.follows) == ("an import failed", False)


def test_a_name_of_deepspeeds_that_is_missing_is_nothing_to_install() -> None:
    cause = cause_of(1, f"ModuleNotFoundError: {missing_module('deepspeed.pipe')}", "", ())
    assert cause is not None
    assert cause.words == "a name of DeepSpeed's is not in dsrun"


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ProtocolError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    ],
)
def test_a_connection_of_python_is_not_taken_for_one_to_another_rank(line: str) -> None:
    cause = cause_of(1, line, "", ())
    assert cause is not None
    assert (cause.words, cause.follows) == ("the other end closed a connection", False)


@pytest.mark.parametrize(
    ("kill", "words", "hint"),
    [
        (
            OomKill(by="limit", group="/a/b", limit_bytes=1 << 30),
            "the limit of 1.0 GiB of the control group /a/b",
            "--mem",
        ),
        (OomKill(by="limit", group="/a"), "a memory limit below the control group /a", "raise the limit"),
        (OomKill(by="limit", group="/a", limit_bytes=1, kills_whole_group=True), "/a", "memory.oom.group"),
        (OomKill(by="machine"), "the whole machine", "swap"),
        (OomKill(by="above"), "above this container", "pod"),
        (
            OomKill(by="systemd-oomd", group="/user.slice"),
            "systemd-oomd ended the control group /user.slice",
            "journalctl",
        ),
    ],
)
def test_a_kill_for_want_of_memory_says_whose_it_was(kill: OomKill, words: str, hint: str) -> None:
    cause = cause_of(-signal.SIGKILL, "", "", (GLOO,), oom=kill)
    assert cause is not None
    assert cause.words.startswith("out of memory: ")
    assert cause.words.endswith(words)
    assert hint in (cause.hint or "")
    assert "dsrun plan" in (cause.hint or "")


LOADER = "RuntimeError: DataLoader worker (pid 418344) is killed by signal: Killed. "
MAP = "RuntimeError: One of the subprocesses has abruptly died during map operation."


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (137, ""),
        (1, LOADER),
        (1, MAP),
        (1, "CalledProcessError: Command '['make']' died with <Signals.SIGKILL: 9>."),
        (1, "BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running"),
    ],
)
def test_a_process_of_a_rank_that_was_killed_for_memory_is_told_as_such(status: int, message: str) -> None:
    kill = OomKill(by="limit", group="/job", limit_bytes=8 << 30)
    cause = cause_of(status, message, "", ("sh.sh: line 5: 13283 Killed  python3 train.py",), oom=kill)
    assert cause is not None
    assert cause.words == "out of memory: the limit of 8.0 GiB of the control group /job"
    # What failed of something else meanwhile did not end of that.
    other = cause_of(1, "PermissionError: [Errno 13] Permission denied: '/x'", "", (LOADER,), oom=kill)
    assert other is not None
    assert other.words == "permission denied"


def test_sigkill_without_a_count_is_not_put_down_to_what_the_rank_said_before() -> None:
    cause = cause_of(-signal.SIGKILL, "", "", (GLOO,))
    assert cause is not None
    assert (cause.words, cause.follows) == ("", False)
    assert "dmesg" in (cause.hint or "")
    assert "systemd-oomd and earlyoom" in (cause.hint or "")


@pytest.mark.parametrize(
    ("signum", "part"),
    [(signal.SIGBUS, "/dev/shm"), (signal.SIGSEGV, "native code"), (signal.SIGABRT, "gave up")],
)
def test_a_signal_has_its_usual_meaning(signum: signal.Signals, part: str) -> None:
    cause = cause_of(-signum, "", "", ())
    assert cause is not None
    assert part in (cause.hint or "")


def test_what_an_abort_said_counts_more_than_the_signal() -> None:
    cause = cause_of(-signal.SIGABRT, "", "", (WATCHDOG,))
    assert cause is not None
    assert cause.words.startswith("a collective timed out: all_reduce 1580")
    assert cause.timed_out


def test_a_rank_that_torch_ended_for_anothers_failure_is_a_follower_whatever_that_was() -> None:
    signalled = "Received a dump signal due to a collective timeout from  rank 3 and we will try our best to dump the"
    cause = cause_of(-signal.SIGABRT, "", "", (signalled,))
    assert cause is not None
    assert (cause.follows, cause.timed_out) == (True, False)
    assert "rank 3" in cause.words
    # torch says so of errors as well, and the rank may lose its connection on top: whom to look at stands above.
    cause = cause_of(-signal.SIGABRT, "", "", (signalled, REMOTE))
    assert cause is not None
    assert (cause.words, cause.follows) == ("a collective failed on rank 3", True)
    # What this rank itself met is nearer.
    cause = cause_of(-signal.SIGABRT, "", "", (signalled, "CUDA error: an illegal memory access was encountered"))
    assert cause is not None
    assert (cause.words, cause.follows) == ("illegal memory access on the GPU", False)


def test_an_unknown_failure_has_no_cause() -> None:
    assert cause_of(3, "", "", ("loss 1.5",)) is None
    assert cause_of(3, "ValueError: boom", "", ("warning: cache: Permission denied", "loss 1.5")) is None


def test_signals_have_names() -> None:
    assert (signal_name(9), signal_name(40)) == ("SIGKILL", "signal 40")


def test_the_number_of_an_xid_is_not_looked_for_in_its_address() -> None:
    for address, number, words in (
        ("0000:95:00", 31, "illegal memory"),
        ("0000:48:00", 79, "bus"),
        ("0008:01:00", 95, "ECC"),
    ):
        cause = cause_of(1, "", "", [f"NVRM: Xid (PCI:{address}): {number}, pid=1, name=python"])
        assert cause is not None
        assert words in cause.words
        assert f"Xid {number} of {address}" in cause.words


def test_ends_of_other_errors_are_no_xid_of_their_own() -> None:
    assert cause_of(1, "", "", ["NVRM: Xid (PCI:0000:95:00): 45, pid=1, Ch 00000010"]) is None


def test_what_nccl_warned_of_names_the_root_of_an_error_that_has_only_a_class() -> None:
    message = (
        "DistBackendError: NCCL error in: x:1, unhandled system error\nncclSystemError: System call\nLast error:\n"
    )
    warning = "box:1:2 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"
    for lines, words in (((warning,), "InfiniBand may not lock memory"), ((), "NCCL met a system error")):
        cause = cause_of(1, message, "", lines)
        assert cause is not None
        assert cause.words == words


def test_what_nccl_said_last_is_nearer_than_what_was_printed_before() -> None:
    lines = [
        "GPU is lost in thought",
        "ncclRemoteError: A call failed",
        "Last error:",
        "Duplicate GPU detected : rank 1 and rank 0",
    ]
    cause = cause_of(1, "", "", lines)
    assert cause is not None
    assert cause.words == "two ranks use one GPU"


def test_a_network_that_failed_follows_nobody_and_names_the_peer() -> None:
    status = {
        12: "no answer",
        5: "earlier error",
        4: "local protection",
        10: "remote access",
        13: "no room",
        1: "error of the card",
    }
    for number, words in status.items():
        line = (
            f"NET/IB: Got completion from peer gpu-a12<4055> with status={number} opcode=0 len=0 vendor err 129 (Send)"
        )
        cause = cause_of(
            1, "DistBackendError: NCCL error in: x:1, remote process exited or there was a network error", "", ()
        )
        assert cause is not None
        assert cause.follows
        cause = cause_of(
            1, f"DistBackendError: NCCL error\nncclRemoteError: A call failed\nLast error:\n{line}", "", ()
        )
        assert cause is not None
        assert ("gpu-a12" in cause.words, words in cause.words, f"status {number}" in cause.words, cause.follows) == (
            True,
            True,
            True,
            False,
        )


def test_what_the_guide_says_a_report_says_is_what_it_says() -> None:
    text = (Path(__file__).parents[4] / "docs" / "guides" / "debugging.md").read_text()
    section = text.partition("## When a job failed")[2].partition("## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = {row["words"] for row in TABLE.values() if row["words"]}
    for kill in (OomKill(by="limit", group="/a", limit_bytes=1), OomKill(by="machine"), OomKill(by="systemd-oomd")):
        cause = cause_of(-signal.SIGKILL, "", "", (), oom=kill)
        assert cause is not None
        told.add(cause.words)
    promised = [words for row in rows for words in row.strip().strip("`").split("`, `")]
    assert len(promised) > 15
    for words in promised:
        pattern = ".*".join(re.escape(part) for part in words.split("..."))
        assert any(re.fullmatch(pattern, said) for said in told), words


def test_a_port_that_came_back_is_not_what_ended_a_rank() -> None:
    down = "h:1:2 [0] transport/net_ib.cc:253 NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: port error(10)"
    other = down.replace("mlx5_3:1", "mlx5_4:1").replace("port error(10)", "port active(9)")
    up = down.replace("port error(10)", "port active(9)")
    fault = "RuntimeError: CUDA error: an illegal memory access was encountered"
    for lines, words in (
        ([down, fault], "the InfiniBand or RoCE port mlx5_3:1 of this host went down"),
        ([down, other, fault], "the InfiniBand or RoCE port mlx5_3:1 of this host went down"),
        ([down, up, fault], "illegal memory access on the GPU"),
        ([down, up, down, fault], "the InfiniBand or RoCE port mlx5_3:1 of this host went down"),
    ):
        cause = cause_of(1, "", "", lines)
        assert cause is not None
        assert cause.words == words


def test_a_card_without_an_address_names_none_of_the_peer() -> None:
    line = (
        "Call to ibv_modify_qp failed with 61 No data available, on dev rocep1s0f0:1, curr state INIT, next state RTR, "
        "local GID index 3, local GID ::, remote GID ::"
    )
    cause = cause_of(1, line, "", ())
    assert cause is not None
    assert cause.words == "InfiniBand or RoCE could not connect to another host: no data available"


def test_source_lines_of_a_traceback_are_not_what_was_said() -> None:
    frames = (
        "Traceback (most recent call last):\n"
        '  File "/home/you/train.py", line 12, in step\n'
        "    raise ValueError(batch)  # else: CUDA out of memory\n"
        "          ^^^^^^^^^^^^^^^^^\n"
    )
    assert cause_of(1, "ValueError: 3", frames + "ValueError: 3", ()) is None
    assert cause_of(1, "", "", [f"[rank0]: {line}" for line in (frames + "ValueError: 3").split("\n")]) is None
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    cause = cause_of(1, "ValueError: 3", frames + oom + "\n" + chain + frames + "ValueError: 3", ())
    assert cause is not None
    assert cause.words == "CUDA out of memory"
    group = "  + Exception Group Traceback (most recent call last):\n" + "".join(
        f"    | {line}\n" for line in (frames + oom).split("\n")
    )
    grouped = cause_of(1, "ExceptionGroup: two (1 sub-exception)", group, ())
    assert grouped is not None
    assert grouped.words == "CUDA out of memory"
