"""Why a rank failed, in a few words, and a short way out: from its status, its error and its last lines. Pure.

Texts are those of Python 3.10 to 3.13, torch 2.10 to 2.13, NCCL 2.2x and the kernel. A text that nobody here knows has
no cause: the last lines are shown anyway. Does not decide which rank was first; but says of whom it cannot be blamed:

[Note: followers] A rank whose peer is gone fails too, in the next collective and with an error of its own. It follows;
the peer is the cause. By time alone the two may be told apart wrongly: clocks of hosts differ, and a process that
frees a lot of memory is reaped long after its connections were closed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsrun.units import format_duration


@dataclass(frozen=True, slots=True)
class Cause:
    """What is known of a failure.

    Attributes:
        words: what happened; empty where only the hint is known.
        hint: a way out; None where the words say it.
        follows: another rank's failure is behind it. See [Note: followers].
        timed_out: torch waited for another rank in vain, and does not say for which, nor in what.
    """

    words: str
    hint: str | None = None
    follows: bool = False
    timed_out: bool = False


def signal_name(number: int) -> str:
    """`9` -> `SIGKILL`; `signal 40` for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(status: int, error: str, last_lines: Sequence[str], *, oom_kills: int = 0) -> Cause | None:
    """Finds out why a rank failed.

    Args:
        status: exit code, or minus the signal's number.
        error: what it wrote into its error file: the exception in one line, and the traceback; empty if nothing.
        last_lines: its last lines, oldest first.
        oom_kills: processes that the kernel killed in its host's memory cgroup since the ranks started.

    Returns:
        what is known; None if nothing is.
    """
    if status == -signal.SIGKILL:
        # Whatever it said before, it did not end by itself.
        return _OUT_OF_MEMORY if oom_kills else _KILLED
    # An exception says why the rank ended; lines that it printed before may be about anything.
    # And what it says itself, in its first line, before the exceptions that led to it.
    message, _, traceback = error.partition("\n")
    texts = (message, traceback) if error else ("\n".join(last_lines),)
    for text in texts:
        for pattern, cause in _TEXTS:
            if re.search(pattern, text, re.MULTILINE):
                return _with_collective(cause, text)
    return _SIGNALS.get(-status) if status < 0 else None


def _with_collective(cause: Cause, text: str) -> Cause:
    """Returns the cause with the collective that timed out, where the text is NCCL's watchdog's."""
    found = _WATCHDOG.search(text) if cause.timed_out else None
    if found is None:
        return cause
    name = _OPERATIONS.get(found["operation"], found["operation"].lower().strip("_"))
    group = f" of {found['group']}" if found["group"] not in (None, "", "undefined") else ""
    waited = format_duration(int(found["milliseconds"]) / 1000)
    return replace(cause, words=f"{cause.words}: {name} {found['number']}{group} was not done after {waited}")


#: What stands in the line with which NCCL's watchdog ends a rank, wherever the line is in the rank's output.
WATCHDOG_WORDS = "Watchdog caught collective operation timeout"
_WATCHDOG = re.compile(
    r"(?:PG GUID [^(\s]*\((?P<group>[^)]*)\)[^\n]*?)?"
    + WATCHDOG_WORDS
    + r": WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+),[^)]*(?:\(ms\)[^)]*)?\)"
    + r" ran for (?P<milliseconds>\d+) milliseconds"
)
#: c10d's names of operations, and what one calls them; others are written small.
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}

_OUT_OF_MEMORY = Cause(
    "out of memory (cgroup limit)",
    "the kernel ended it because its control group's memory limit was reached; raise the limit, or lower what ranks "
    "hold: `dsrun plan` shows what the model needs",
)
_KILLED = Cause(
    "",
    "nothing in dsrun sent this signal; it is often the kernel's out-of-memory killer: see `dmesg`",
)
_BUS_ERROR = Cause(
    "bus error",
    "often a full /dev/shm (`df -h /dev/shm`; in a container raise `--shm-size`) or a file that shrank while mapped",
)
_SIGNALS: dict[int, Cause] = {
    signal.SIGBUS: _BUS_ERROR,
    signal.SIGSEGV: Cause("", "a crash in native code; the Python stack is in the rank's log"),
    signal.SIGABRT: Cause("", "native code gave up; what it said is in the rank's log"),
    signal.SIGILL: Cause("", "a library was built for another processor than this host's"),
    signal.SIGXCPU: Cause("", "the processor time that `ulimit -t` allows is used up"),
    signal.SIGXFSZ: Cause("", "a file grew beyond what `ulimit -f` allows"),
}


#: The first that matches counts: what names the root stands before what it leads to.
_TEXTS: tuple[tuple[str, Cause], ...] = (
    (
        r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA|HIP out of memory",
        Cause(
            "CUDA out of memory",
            "lower the micro batch, recompute activations, raise the ZeRO stage or offload: see `dsrun plan`",
        ),
    ),
    (
        r"device-side assert triggered|Assertion `[^`]*` failed",
        Cause(
            "device-side assert",
            "an index or label is out of range on the GPU; CUDA_LAUNCH_BLOCKING=1 shows the line that does it",
        ),
    ),
    (
        r"uncorrectable ECC error|double bit ECC|\bXid\b.{0,40}\b(48|63|64|94|95)\b",
        Cause("GPU memory error (ECC)", "hardware: `nvidia-smi -q -d ECC,ROW_REMAPPER`, then reset or drain this GPU"),
    ),
    (
        r"fallen off the bus|GPU is lost|\bXid\b|unspecified launch failure|hardware stack error",
        Cause("GPU fault", "see `dmesg | grep -i xid` on this host; a GPU that is lost needs a reset or a reboot"),
    ),
    (
        r"an illegal memory access was encountered",
        Cause("illegal memory access on the GPU", "CUDA_LAUNCH_BLOCKING=1 shows the kernel that does it"),
    ),
    (
        WATCHDOG_WORDS + r"|ncclTimeout|NCCL timeout"
        r"|Timed out waiting \d+ms for (recv|send) operation",
        Cause(
            "a collective timed out",
            "another rank never joined it: `--hang-timeout 5m` shows where each rank is before this time is over",
            timed_out=True,
        ),
    ),
    (
        r"ProcessGroupNCCL's watchdog got stuck|[Ww]atchdog hang",
        Cause(
            "a call of CUDA or NCCL never returned, and torch ended the rank for it",
            "often a GPU or its driver: see `dmesg | grep -i xid` on this host; a thread that holds Python's lock for "
            "minutes does it too, and TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC gives it more time",
        ),
    ),
    (
        # Python's own sockets and pipes. Ranks are connected by torch's, which speak of no exception class or number.
        r"ConnectionResetError|BrokenPipeError|\[Errno (32|104)\]|RemoteDisconnected",
        Cause(
            "the other end closed a connection", "the traceback names it: a download, a database, a process of its own"
        ),
    ),
    (
        r"Connection closed by peer|Connection reset by peer|Broken pipe"
        r"|ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer"
        r"|NCCL communicator was aborted|recvValue failed|failed to recv, got 0 bytes",
        Cause("lost the connection to another rank", "look for the rank that ended first", follows=True),
    ),
    (
        r"unhandled cuda error|ncclUnhandledCudaError",
        Cause("NCCL met a CUDA error", "NCCL_DEBUG=WARN names it; often no GPU memory is left, or /dev/shm is full"),
    ),
    (
        r"unhandled system error|ncclSystemError",
        Cause("NCCL met a system error", "NCCL_DEBUG=WARN names it; often /dev/shm is full, or the network refuses"),
    ),
    (
        r"Duplicate GPU detected|ncclInvalidUsage",
        Cause("NCCL was used wrongly", "often two ranks on one GPU: use LOCAL_RANK for the device"),
    ),
    (
        r"ModuleNotFoundError|ImportError|cannot open shared object file|No module named",
        Cause("an import failed", "install it for the interpreter that runs the ranks, on every host"),
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        Cause(
            "a port is taken already",
            "dsrun gives each job its own port in MASTER_PORT; the script, or a server it starts, uses a fixed one",
        ),
    ),
    (
        r"No space left on device|\[Errno 28\]|ENOSPC",
        Cause("no space left on a disk", "`df -h` and `df -i` show which; checkpoints and /dev/shm count too"),
    ),
    (r"Disk quota exceeded|\[Errno 122\]", Cause("the disk quota is used up", "`quota -s` shows it")),
    (
        r"Too many open files|\[Errno 24\]",
        Cause(
            "too many open files",
            "raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')",
        ),
    ),
    (
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) is killed by signal: Killed",
        Cause("a DataLoader worker was killed", "often out of memory: fewer workers, or a smaller prefetch_factor"),
    ),
    (r"[Bb]us error|insufficient shared memory", _BUS_ERROR),
    (
        r"DataLoader worker \(pid",
        Cause(
            "a DataLoader worker died", "what it said stands above; num_workers=0 shows its error in the rank itself"
        ),
    ),
    (
        r"can't allocate memory|Cannot allocate memory|^MemoryError|\[Errno 12\]|std::bad_alloc",
        Cause(
            "out of memory on the host", "fewer DataLoader workers or less offload: `dsrun plan` shows what is needed"
        ),
    ),
    (
        r"[Rr]esource temporarily unavailable|can't start new thread|\[Errno 11\]",
        Cause("no more processes or threads are allowed", "raise `ulimit -u`, or the pids limit of the container"),
    ),
    (
        r"PermissionError|[Pp]ermission denied|\[Errno 13\]",
        Cause("permission denied", "the line above names what; ranks run as the user who started dsrun"),
    ),
    (
        r"Read-only file system|\[Errno 30\]",
        Cause("a folder is read-only", "write to another, or mount it for writing"),
    ),
    (
        r"no kernel image is available|CUDA driver version is insufficient|forward compatibility was attempted",
        Cause("torch and the GPU driver do not fit", "`dsrun probe` shows both; install a torch for this driver"),
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        Cause("CUDA was used before the fork", "start with `--start exec`, or touch CUDA inside the rank only"),
    ),
    (
        r"wait timeout after \d+ms, keys|client socket has timed out|DistStoreError|waiting for clients",
        Cause("the other ranks were not met in time", "a rank never got that far: its own lines say why"),
    ),
    (
        # Said of errors as well as of time-outs, so last.
        r"Received a dump signal due to a collective timeout from +rank",
        Cause("a collective failed on another rank", "look for the rank that says so first", follows=True),
    ),
)
