"""Why a rank failed, in a few words, and a short way out: from its status, its error and its last lines. Pure.

What programs print and what it means stands in tables: `cuda.py`, `process_groups.py`, `host.py`. A
text that nobody here knows has no cause: the last lines are shown anyway. Does not decide which rank was first; but
says of whom it cannot be blamed:

[Note: followers] A rank whose peer is gone fails too, in the next collective and with an error of its own. It follows;
the peer is the cause. By time alone the two may be told apart wrongly: clocks of hosts differ, and a process that
frees a lot of memory is reaped long after its connections were closed. A rank whose network failed does not follow:
nobody ended before it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from dsrun.units import format_bytes

from ...protocol import OomKill
from . import cuda, host, process_groups
from .rules import Cause, Rule, cause_by

#: What cards and the driver say themselves is nearest to the root, whatever torch makes of it.
_HARDWARE: tuple[Rule, ...] = (*cuda.HARDWARE, *process_groups.HARDWARE)
_ROOTS: tuple[Rule, ...] = (*cuda.ROOTS, *process_groups.ROOTS, *host.ROOTS)
#: Of what kind an error is: what is left where no text names its root.
_CLASSES: tuple[Rule, ...] = (*process_groups.CLASSES, *host.CLASSES, *cuda.CLASSES)
#: NCCL's own last warning, which torch puts below the class of the error; up to torch's C++ frames or an empty line.
_LAST_ERROR = re.compile(r"^Last error:\n((?:(?!Exception raised from |frame #).+\n?)+)", re.MULTILINE)
#: What torch writes before each line of a traceback where a process group is.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: A traceback's frames with their lines of source, which may hold the very words of an error that did not occur.
_FRAMES = re.compile(r'^([ |]*)  File "[^"\n]*", line \d+, in [^\n]*\n(?:\1 {4}[^\n]*\n?)*', re.MULTILINE)
#: Lines of libraries that tried something and go on without: of NCCL's levels WARN alone is of errors.
_NOISE = re.compile(r"NCCL INFO |^libibverbs: Warning: |; dlerror: ")
#: An exception that says that a process of the rank's own was killed. A shell says so by its status.
_CHILD_KILLED = re.compile(
    r"is killed by signal: Killed|died with <Signals\.SIGKILL|process pool was terminated abruptly"
    r"|subprocesses has abruptly died"
)

_KILLED = Cause(
    "",
    "nothing in dsrun sent this signal, and the kernel counts no kill for want of memory here; systemd-oomd and "
    "earlyoom do it uncounted: see `dmesg`, `journalctl -u systemd-oomd -u earlyoom`",
)
_PLAN = "`dsrun plan` shows what the model needs"
_SIGNALS: dict[int, Cause] = {
    signal.SIGBUS: host.BUS_ERROR,
    signal.SIGSEGV: Cause("", "a crash in native code; the Python stack is in the rank's log"),
    signal.SIGABRT: Cause("", "native code gave up; what it said is in the rank's log"),
    signal.SIGILL: Cause("", "a library was built for another processor than this host's"),
    signal.SIGXCPU: Cause("", "the processor time that `ulimit -t` allows is used up"),
    signal.SIGXFSZ: Cause("", "a file grew beyond what `ulimit -f` allows"),
}


def signal_name(number: int) -> str:
    """`9` -> `SIGKILL`; `signal 40` for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(
    status: int, message: str, traceback: str, last_lines: Sequence[str], *, oom: OomKill | None = None
) -> Cause | None:
    """Finds out why a rank failed.

    Args:
        status: exit code, or minus the signal's number.
        message: message of the exception, as the rank's error file has it; empty if it left none.
        traceback: its traceback, with the exceptions that led to it; empty if there is none.
        last_lines: its last lines, oldest first.
        oom: kill for want of memory on the rank's host just before the rank ended; None if there was none.

    Returns:
        what is known; None if nothing is.
    """
    if status == -signal.SIGKILL:
        # Whatever it said before, it did not end by itself.
        return _KILLED if oom is None else _out_of_memory(oom)
    if oom is not None and (status == 128 + signal.SIGKILL or _CHILD_KILLED.search(f"{message}\n{traceback}")):
        return _out_of_memory(oom)
    # An exception says why the rank ended; lines that it printed before may be about anything.
    last_lines = [line for line in last_lines if not _NOISE.search(line)]
    texts = (message, traceback) if message or traceback else ("\n".join(last_lines),)
    for text in map(_what_was_said, texts):
        if cause := _root_in(text) or _class_in(text, last_lines):
            return cause
    return _SIGNALS.get(-status) if status < 0 else None


def _out_of_memory(kill: OomKill) -> Cause:
    """Says whose memory was at an end, for each has a way out of its own."""
    match kill.by:
        case "limit":
            limit = (
                "a memory limit below"
                if kill.limit_bytes is None
                else f"the limit of {format_bytes(kill.limit_bytes)} of"
            )
            whole = "; the kernel ends all of that group at once (memory.oom.group)" if kill.kills_whole_group else ""
            return Cause(
                f"out of memory: {limit} the control group {kill.group}",
                f"raise the limit (Slurm `--mem`, a pod's `limits`, `docker --memory`), or hold less: {_PLAN}{whole}",
            )
        case "machine":
            return Cause(
                "out of memory: the whole machine",
                f"no limit was reached, its memory was: fewer ranks, less offload or more swap; {_PLAN}",
            )
        case "above":
            return Cause(
                "out of memory: the machine, or a limit above this container",
                f"see the pod's or the machine's memory, and `dmesg` on the host; {_PLAN}",
            )
        case "systemd-oomd":
            return Cause(
                f"out of memory: systemd-oomd ended the control group {kill.group}",
                "it does so before the kernel must, for pressure or full swap: `journalctl -u systemd-oomd`, `oomctl`; "
                f"{_PLAN}",
            )


def _what_was_said(text: str) -> str:
    return _FRAMES.sub("", _RANK_PREFIX.sub("", text))


def _root_in(text: str) -> Cause | None:
    """Returns the root that a text names, NCCL's own last error before all else that torch says."""
    last_errors = [found[1] for found in _LAST_ERROR.finditer(text)]
    searches = ((_HARDWARE, text), *((_ROOTS, part) for part in (*last_errors, text)))
    return next((cause for rules, part in searches if (cause := cause_by(rules, part))), None)


def _class_in(text: str, last_lines: Sequence[str]) -> Cause | None:
    """Returns of what kind a text says its error is; what NCCL warned of before names the root of its kinds."""
    if cause_by(process_groups.CLASSES, text):
        warnings = "\n".join(line for line in last_lines if "NCCL WARN" in line)
        if root := cause_by((*_HARDWARE, *_ROOTS), warnings):
            return root
    return cause_by(_CLASSES, text)
