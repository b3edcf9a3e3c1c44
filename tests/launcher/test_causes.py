"""What a rank said last, in the words of torch, NCCL, Python and the kernel, becomes a cause and a way out."""

from __future__ import annotations

import signal

import pytest

from dsrun.launcher.causes import cause_of, signal_name

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 1.06 GiB is free. Process 3 has 78.18 GiB memory in use."
)
ASSERT = "torch.AcceleratorError: CUDA error: device-side assert triggered"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
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
STUCK = (
    "[rank0]:[F1122 ProcessGroupNCCL.cpp:1724] [PG ID 0 PG GUID 0(default_pg) Rank 0] ProcessGroupNCCL's watchdog got "
    "stuck for 480 seconds without making progress in monitoring enqueued collectives."
)
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote "
    "process exited or there was a network error, NCCL version 2.21.5"
)
UNHANDLED = "DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO)"
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3475: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
GLOO_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31846"
IN_USE = (
    "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, use"
    "Ipv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
LOADER_SHM = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."
)
LOADER_KILLED = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (OOM, "CUDA out of memory"),
        (ASSERT, "device-side assert"),
        ("/b/Loss.cu:242: nll_loss: block: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.", "device-side assert"),
        (ECC, "GPU memory error (ECC)"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "GPU fault"),
        (WATCHDOG, "a collective timed out: all_reduce 1580 was not done after 10m 0s"),
        (WATCHDOG_OF_A_GROUP, "a collective timed out: all_gather 57 of tensor was not done after 10m 0s"),
        (STUCK, "a call of CUDA or NCCL never returned, and torch ended the rank for it"),
        (
            "RuntimeError: [gloo/unbound_buffer.cc:83] Timed out waiting 30000ms for recv operation",
            "a collective timed out",
        ),
        (REMOTE, "lost the connection to another rank"),
        (GLOO, "lost the connection to another rank"),
        (GLOO_CLOSED, "lost the connection to another rank"),
        (UNHANDLED, "NCCL met a CUDA error"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "an import failed"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "an import failed"),
        (IN_USE, "a port is taken already"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/step10'", "no space left on a disk"),
        ("OSError: [Errno 24] Too many open files: 'x.bin'", "too many open files"),
        (LOADER_SHM, "bus error"),
        (LOADER_KILLED, "a DataLoader worker was killed"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "a DataLoader worker died"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permission denied"),
        ("RuntimeError: can't start new thread", "no more processes or threads are allowed"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.", "out of memory on the host"),
        (
            "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x",
            "the other ranks were not met in time",
        ),
    ],
)
@pytest.mark.parametrize("where", ["error file", "last lines"])
def test_what_a_rank_said_is_named_and_has_a_way_out(line: str, words: str, where: str) -> None:
    error, lines = (line, ()) if where == "error file" else ("", ("step 1", "Traceback ...", line, "more"))
    cause = cause_of(1, error, lines)
    assert cause is not None
    assert cause.words == words
    assert cause.hint


@pytest.mark.parametrize("line", [REMOTE, GLOO, GLOO_CLOSED])
def test_a_rank_whose_peer_is_gone_is_a_follower(line: str) -> None:
    cause = cause_of(1, line, ())
    assert cause is not None
    assert cause.follows


def test_the_error_file_counts_before_lines_that_were_printed_earlier() -> None:
    cause = cause_of(1, OOM, (GLOO,))
    assert cause is not None
    assert cause.words == "CUDA out of memory"


def test_what_an_exception_says_itself_counts_before_those_that_led_to_it() -> None:
    chain = "OSError: [Errno 28] No space left on device\n" + GLOO + "\n\nDuring handling of the above ..."
    for first in ("ModuleNotFoundError: No module named 'x'", "ImportError: libx.so: cannot open shared object file"):
        cause = cause_of(1, f"{first}\n{chain}\n{first}", ())
        assert cause is not None
        assert (cause.words, cause.follows) == ("an import failed", False)


@pytest.mark.parametrize(
    "line",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ProtocolError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
    ],
)
def test_a_connection_of_python_is_not_taken_for_one_to_another_rank(line: str) -> None:
    cause = cause_of(1, line, ())
    assert cause is not None
    assert (cause.words, cause.follows) == ("the other end closed a connection", False)


def test_sigkill_is_out_of_memory_where_the_control_group_counted_a_kill() -> None:
    cause = cause_of(-signal.SIGKILL, "", (), oom_kills=1)
    assert cause is not None
    assert cause.words == "out of memory (cgroup limit)"


def test_sigkill_without_a_count_is_not_put_down_to_what_the_rank_said_before() -> None:
    cause = cause_of(-signal.SIGKILL, "", (GLOO,))
    assert cause is not None
    assert (cause.words, cause.follows) == ("", False)
    assert "dmesg" in (cause.hint or "")


@pytest.mark.parametrize(
    ("signum", "part"),
    [(signal.SIGBUS, "/dev/shm"), (signal.SIGSEGV, "native code"), (signal.SIGABRT, "gave up")],
)
def test_a_signal_has_its_usual_meaning(signum: signal.Signals, part: str) -> None:
    cause = cause_of(-signum, "", ())
    assert cause is not None
    assert part in (cause.hint or "")


def test_what_an_abort_said_counts_more_than_the_signal() -> None:
    cause = cause_of(-signal.SIGABRT, "", (WATCHDOG,))
    assert cause is not None
    assert cause.words.startswith("a collective timed out: all_reduce 1580")
    assert cause.timed_out


def test_a_rank_that_torch_ended_for_anothers_failure_is_a_follower_whatever_that_was() -> None:
    signalled = "Received a dump signal due to a collective timeout from  rank 3 and we will try our best to dump the"
    cause = cause_of(-signal.SIGABRT, "", (signalled,))
    assert cause is not None
    assert (cause.follows, cause.timed_out) == (True, False)
    # torch says so of errors as well: what it was stands in the lines, too.
    cause = cause_of(-signal.SIGABRT, "", (signalled, REMOTE))
    assert cause is not None
    assert cause.words == "lost the connection to another rank"


def test_an_unknown_failure_has_no_cause() -> None:
    assert cause_of(3, "", ("loss 1.5",)) is None
    assert cause_of(3, "ValueError: boom", ("warning: cache: Permission denied", "loss 1.5")) is None


def test_signals_have_names() -> None:
    assert (signal_name(9), signal_name(40)) == ("SIGKILL", "signal 40")
