"""Which failure came first, what it means in words, and the exit code of the whole job. Pure: no I/O.

Exit codes of a job:

    0         every rank returned 0
    1..127    the first failing rank's own code (2 where it met bad input; 126 or 127 where a command could not be run)
    128 + n   the first failing rank was killed by signal n, or the user stopped the job with it:
              130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP
    74        EXIT_HOST_LOST: a host could not run its ranks, or its agent was lost

A failed job never exits 0.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.contract import WorkerError
from dsrun.errors import DsrunError

#: A host could not run its ranks, or its agent was lost.
EXIT_HOST_LOST = 74
#: Lines of the failing rank that a report repeats.
TAIL_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: which one.
        host: name of its host.
        pid: its process; None if it was never started.
        status: exit code, or minus the signal's number; None if nobody lived to see it.
        time_s: when it ended, by the front end's clock; None as `status`.
        error: what it wrote into its error file, with its time on the front end's clock.
        last_lines: its last lines of output, both streams.
        log: path of its complete output on the front end's host.
    """

    rank: int
    host: str
    pid: int | None
    status: int | None
    time_s: float | None
    error: WorkerError | None
    last_lines: tuple[str, ...]
    log: str

    @property
    def failed_at_s(self) -> float | None:
        """When the rank failed; None if it did not, or nobody knows.

        The error file's time counts before the end of the process: between raising and exiting a rank may take
        seconds to tear down, and its peers die of the broken connection meanwhile.
        """
        if not self.status or self.time_s is None:
            return None
        return self.time_s if self.error is None else min(self.error.time_s, self.time_s)

    @property
    def is_mistake(self) -> bool:
        """Whether bad input ended the rank: its `error:` and `hint:` lines tell all, whoever met it."""
        return is_mistake(self.status, self.error)


def is_mistake(status: int | None, error: WorkerError | None) -> bool:
    """Tells bad input from failures in which the rank and host matter. See `RankEnd.is_mistake`."""
    return status not in (None, DsrunError.exit_code) and error is not None and error.is_rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoss:
    """A host that could not run its ranks, or whose agent was lost.

    Attributes:
        host: its name.
        reason: what is known, in words.
        time_s: when the front end noticed.
        last_lines: what the agent's stderr said last.
        hint: a way out, where one is known.
    """

    host: str
    reason: str
    time_s: float
    last_lines: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserStop:
    """The user asked the job to end, with this signal at this time."""

    signal: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why a job failed: the first cause, and how many ranks ended because of it.

    Attributes:
        cause: the first failing rank or lost host.
        exit_code: what the job exits with.
        stopped: other ranks that were stopped after it.
        also_failed: other ranks that failed by themselves after it.
    """

    cause: RankEnd | HostLoss
    exit_code: int
    stopped: int
    also_failed: int

    def render(self) -> list[str]:
        """Returns the report as lines without colour; a user's mistake is its own `error:` and `hint:` lines."""
        match self.cause:
            case HostLoss() as loss:
                lines = [f"error: host {loss.host}: {loss.reason}"]
                lines += [] if loss.hint is None else [f"hint: {loss.hint}"]
                lines += _quote(f"last lines of the agent on {loss.host}:", loss.last_lines)
                return [*lines, *self._others()]
            case RankEnd() as end if end.is_mistake:
                assert end.error is not None, "a mistake is told by its error file"
                return end.error.message.split("\n")
            case RankEnd() as end:
                return [*_render_rank(end), *self._others()]

    def _others(self) -> list[str]:
        other = "other " if isinstance(self.cause, RankEnd) else ""
        counted = ((self.stopped, "stopped after it"), (self.also_failed, "seen to fail after it"))
        return [
            f"{count} {other}{'rank was' if count == 1 else 'ranks were'} {verb}" for count, verb in counted if count
        ]


def judge(
    ends: Sequence[RankEnd], losses: Sequence[HostLoss], user_stop: UserStop | None
) -> tuple[int, FailureReport | None]:
    """Finds what ended the job.

    Args:
        ends: every rank of the job.
        losses: hosts that were lost.
        user_stop: the user's first request, if there was one.

    Returns:
        the job's exit code, and the report where it failed by itself. A user's stop has no report: what ranks
        do after it is its consequence.
    """
    causes: list[tuple[float, RankEnd | HostLoss | UserStop]] = [(loss.time_s, loss) for loss in losses]
    causes += [(end.failed_at_s, end) for end in ends if end.failed_at_s is not None]
    if user_stop is not None:
        causes.append((user_stop.time_s, user_stop))
    if not causes:
        assert all(end.status == 0 for end in ends), "a rank without a status on a host that was not lost"
        return 0, None
    _, cause = min(causes, key=lambda timed: timed[0])
    match cause:
        case UserStop():
            return 128 + cause.signal, None
        case HostLoss():
            code = EXIT_HOST_LOST
        case RankEnd():
            assert cause.status, "a failing rank has a status"
            code = exit_code_of(cause.status)
    others = [end for end in ends if end is not cause and end.status != 0]
    never_ran = sum(end.status is None and end.pid is None for end in others)
    stopped = sum(end.status in (None, -signal.SIGTERM, -signal.SIGKILL) for end in others) - never_ran
    also_failed = len(others) - stopped - never_ran
    return code, FailureReport(cause=cause, exit_code=code, stopped=stopped, also_failed=also_failed)


def exit_code_of(status: int) -> int:
    """Returns the shell's code for a status: itself, or 128 + the signal's number."""
    return status if status >= 0 else 128 - status


def describe_status(status: int) -> str:
    """`-9` -> `was killed by SIGKILL`, `3` -> `exited with code 3`."""
    return f"exited with code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """`9` -> `SIGKILL`; `signal 40` for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: What a signal that dsrun did not send usually means.
_SIGNAL_HINTS = {
    signal.SIGKILL: "nothing in dsrun sent this signal; it is often the kernel's out-of-memory killer: see `dmesg`",
    signal.SIGBUS: "often a full /dev/shm or a file that shrank while it was mapped",
    signal.SIGSEGV: "a crash in native code; the Python stack is in the rank's log",
    signal.SIGABRT: "native code gave up; what it said is in the rank's log",
}


def _render_rank(end: RankEnd) -> list[str]:
    assert end.status is not None, "only a rank with a status can be the cause"
    lines = [f"error: rank {end.rank} on {end.host} (pid {end.pid}) {describe_status(end.status)}"]
    if end.error is not None:
        lines += [f"  {line}" for line in end.error.message.split("\n")]
    lines += _quote(f"last lines of rank {end.rank}:", end.last_lines)
    if end.status < 0 and -end.status in _SIGNAL_HINTS:
        lines.append(f"hint: {_SIGNAL_HINTS[signal.Signals(-end.status)]}")
    return [*lines, f"full log: {end.log}"]


def _quote(title: str, quoted: Sequence[str]) -> list[str]:
    return [title, *(f"  | {line}" for line in quoted)] if quoted else []
