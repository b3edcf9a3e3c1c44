"""How a job can fail, how each failure is told, and what the exit codes mean. Pure: no I/O. Which failure came first
is judged in `first_failure.py`.

A failed job never exits 0. What each code means stands in EXIT_CODES, which docs/reference/exit-codes.md repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.contract.error_file import WorkerError
from dsrun.errors import DsrunError, PreflightError

from ..protocol import GpuFinding, GroupProgress, OomKill
from .causes.recognise import cause_of, signal_name
from .causes.rules import Cause
from .coordinates import named_rank
from .rank_actions import action_of

#: A host could not run its ranks, or its agent was lost.
EXIT_HOST_LOST = 74
#: Ranks made no progress for the hang time-out, and the job was ended for it.
EXIT_HANG = 76
#: Lines of the failing rank that a report repeats.
TAIL_LINES = 30

#: Exit code of `dsrun run` and what it means, in the order of the reference page.
EXIT_CODES = (
    ("0", "every rank returned 0"),
    ("1 to 127", "the first failing rank's own code (126 or 127 where a command could not be run)"),
    ("2", "wrong arguments, config, hostfile or model; where ranks met it, the first one's own code"),
    (str(EXIT_HOST_LOST), "a host was lost or could not run its ranks"),
    (str(PreflightError.exit_code), "hosts could not be reached or are not fit; nothing was started"),
    (str(EXIT_HANG), "ranks made no progress for `--hang-timeout`, and the job was ended for it"),
    ("128 + N", "the first failing rank was killed by signal N: 137 SIGKILL, 139 SIGSEGV, 134 SIGABRT"),
    ("129", "stopped by SIGHUP: its terminal was closed"),
    ("130", "stopped with Ctrl-C"),
    ("131", "killed with Ctrl-\\"),
    ("141", "stopped because nobody reads its output (`| head`)"),
    ("143", "stopped by SIGTERM"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: number of the rank.
        host: name of its host.
        pid: its process; None if it was never started.
        status: exit code, or minus the signal's number; None if nobody lived to see it.
        time_s: time when the rank ended, by the front end's clock; None where `status` is None.
        error: contents of the rank's error file, with the time on the front end's clock; None if there is none.
        last_lines: its last lines of output, both streams.
        log: path of its complete output on the front end's host.
        oom: kill for want of memory on the rank's host just before it ended; None if there was none. See `Exit`.
        groups: progress in each process group, from the dump that torch left when it ended the rank; None without a
            dump. See `Exit`.
        gpus: GPUs of its host that the driver has something to say of, and its own.
        cut_short: whether the rank had raised an exception and was stopped on its way out; `status` is then what the
            exception would have made it.
        coordinate: place of the rank on the axes of the job, like `data 1, tensor 0`; empty where its number says it.
        step: optimizer steps that it had finished; None where it did not say.
        phase: phase that it said it was in last; empty if it said none.
        collective: collective that it waited in last; empty if it was in none.
    """

    rank: int
    host: str
    pid: int | None
    status: int | None
    time_s: float | None
    error: WorkerError | None
    last_lines: tuple[str, ...]
    log: str
    oom: OomKill | None = None
    groups: Sequence[GroupProgress] | None = None
    gpus: Sequence[GpuFinding] = ()
    cut_short: bool = False
    coordinate: str = ""
    step: int | None = None
    phase: str = ""
    collective: str = ""

    @property
    def name(self) -> str:
        """What one calls the rank: its number, and its coordinate if it has one."""
        return named_rank(self.rank, self.coordinate)

    @property
    def cause(self) -> Cause | None:
        """What is known of why it failed; None if it did not, or nothing is."""
        if not self.status:
            return None
        message, traceback = ("", "") if self.error is None else (self.error.message, self.error.traceback)
        return cause_of(self.status, message, traceback, self.last_lines, oom=self.oom)

    @property
    def follows(self) -> bool:
        """Whether another rank's failure is behind this one's. See [Note: followers] in `recognise.py`."""
        cause = self.cause
        return cause is not None and cause.follows

    @property
    def knows_little(self) -> bool:
        """Whether all it can tell is that torch lost another rank, or waited for one in vain."""
        cause = self.cause
        told = self.error is not None and self.error.is_rendered
        return cause is not None and (cause.follows or cause.timed_out) and not told

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
        """Whether bad input ended the rank: its `error:` and `hint:` lines tell all but who met it."""
        return is_mistake(self.status, self.error)


def is_mistake(status: int | None, error: WorkerError | None) -> bool:
    """Tells bad input from failures in which the rank and host matter. See `RankEnd.is_mistake`."""
    return status not in (None, DsrunError.exit_code) and error is not None and error.is_rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoss:
    """A host that could not run its ranks, or whose agent was lost.

    Attributes:
        host: its name.
        reason: reason for the loss as far as it is known, in words.
        time_s: time of the loss by the front end's clock: when it noticed, or when the host said that it cannot run its
            ranks.
        last_lines: last lines of the agent's stderr.
        hint: a way out, where one is known.
        is_mistake: bad input is the reason, so that another try would fail as well.
    """

    host: str
    reason: str
    time_s: float
    last_lines: tuple[str, ...] = ()
    hint: str | None = None
    is_mistake: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserStop:
    """The user asked the job to end, with this signal at this time."""

    signal: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks made no progress, and the job was ended for it.

    Attributes:
        lines: lines that say which rank is where; the first one is the summary.
        time_s: time when the hang was found, seconds since the epoch.
    """

    lines: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why a job failed: the first cause, and how many ranks ended because of it.

    Attributes:
        cause: the first failing rank, the lost host, or the hang.
        exit_code: exit code of the job.
        stopped: other ranks that were stopped after it.
        followed: other ranks that failed after it, because their connection to it broke.
        also_failed: other ranks that failed by themselves after it.
        also_lost: hosts that were lost after it.
        returned_before: ranks that had returned 0 when the first cause lost its connection to one, so maybe to these.
        said_by_all: every other rank left the same words as the first.
        witness: a rank that names the first cause and tells more of it than this one itself; None if there is none.
        collectives: lines that say which rank waited for which in which process group, where a collective timed out and
            ranks left dumps.
        waited: words on which other ranks waited in what when they ended; empty where none did.
    """

    cause: RankEnd | HostLoss | Hang
    exit_code: int
    stopped: int
    followed: int
    also_failed: int
    also_lost: tuple[HostLoss, ...] = ()
    returned_before: tuple[int, ...] = ()
    said_by_all: bool = False
    witness: RankEnd | None = None
    collectives: tuple[str, ...] = ()
    waited: str = ""

    @property
    def is_mistake(self) -> bool:
        """Whether bad input ended the job, so that starting it again would not help."""
        return not isinstance(self.cause, Hang) and self.cause.is_mistake

    @property
    def is_hang(self) -> bool:
        """Whether the job was ended because it made no progress."""
        return isinstance(self.cause, Hang)

    def short(self) -> list[str]:
        """Returns what is enough between two attempts: who failed and how, and a way out."""
        cause = self.cause
        if not isinstance(cause, RankEnd):
            return [self.headline()]
        error = [] if cause.error is None else [cause.error.message.partition("\n")[0]]
        hint = [] if cause.cause is None or cause.cause.hint is None else [f"hint: {cause.cause.hint}"]
        return [self.headline(), *error, *self.collectives[:1], *_gpu_lines(cause), *hint, f"full log: {cause.log}"]

    def headline(self) -> str:
        """Returns who failed and how, as part of a sentence."""
        match self.cause:
            case HostLoss() as loss:
                return f"host {loss.host}: {loss.reason}"
            case Hang() as hang:
                return hang.lines[0]
            case RankEnd() as end:
                assert end.status is not None, "only a rank with a status can be the cause"
                words = "" if end.cause is None or not end.cause.words else f": {end.cause.words}"
                how = "failed" if end.cut_short else describe_status(end.status)
                return f"{end.name} on {end.host} (pid {end.pid}) {how}{words}"

    def render(self) -> list[str]:
        """Returns the report as lines without colour.

        A user's mistake is its own `error:` and `hint:` lines; who met it is said where not every rank did.
        """
        head = f"error: {self.headline()}"
        match self.cause:
            case HostLoss() as loss:
                hint = [] if loss.hint is None else [f"hint: {loss.hint}"]
                lines = _quote(f"last lines of the agent on {loss.host}:", loss.last_lines)
                return [head, *hint, *lines, *self._others()]
            case Hang() as hang:
                return [head, *hang.lines[1:]]
            case RankEnd() as end if end.is_mistake:
                assert end.error is not None, "a mistake is told by its error file"
                words = end.error.message.split("\n")
                if self.said_by_all:
                    return words
                first = f"{end.name} on {end.host} (pid {end.pid}) was the first to say so"
                return [*words, first, f"full log: {end.log}", *self._others()]
            case RankEnd() as end:
                return [head, *self._waits(), *_render_rank(end, self.waited), *self._testimony(), *self._others()]

    def _waits(self) -> list[str]:
        return [f"  {line}" for line in self.collectives]

    def _testimony(self) -> list[str]:
        if self.witness is None or self.witness.error is None:
            return []
        words = self.witness.error.message.split("\n")
        return [f"{self.witness.name} says of it:", *(f"  {line}" for line in words), f"full log: {self.witness.log}"]

    def _others(self) -> list[str]:
        other = "other " if isinstance(self.cause, RankEnd) else ""
        counted = (
            (self.followed, "failed after it, of the broken connection"),
            (self.stopped, "{was} stopped after it"),
            (self.also_failed, "{was} seen to fail after it"),
        )
        ranks = [
            f"{count} {other}rank{'' if count == 1 else 's'} {words.format(was='was' if count == 1 else 'were')}"
            for count, words in counted
            if count
        ]
        hosts = [f"host {loss.host} was lost after it: {loss.reason}" for loss in self.also_lost]
        returned = (
            [f"{_named(self.returned_before)} had ended with exit code 0 before it"] if self.returned_before else []
        )
        return [*returned, *hosts, *ranks]


def exit_code_of(status: int) -> int:
    """Returns the shell's code for a status that is not 0: itself, or 128 + the signal's number; never 0."""
    # A shell sees the last eight bits alone, and a failure must not look like success in them.
    return (status if status >= 0 else 128 - status) & 0xFF or 1


def describe_status(status: int) -> str:
    """`-9` -> `was killed by SIGKILL`, `3` -> `exited with code 3`."""
    return f"exited with code {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def _render_rank(end: RankEnd, waited: str) -> list[str]:
    lines = [] if end.error is None else [f"  {line}" for line in end.error.message.split("\n")]
    action = action_of(end.phase, end.collective)
    after = "" if end.step is None else f", after step {end.step}"
    lines += [f"  it was in {action}{after}"] if action else []
    lines += [f"  {waited}"] if waited else []
    lines += _quote(f"last lines of rank {end.rank}:", end.last_lines)
    lines += _gpu_lines(end)
    if end.cause is not None and end.cause.hint is not None:
        lines.append(f"hint: {end.cause.hint}")
    return [*lines, f"full log: {end.log}"]


def _gpu_lines(end: RankEnd) -> list[str]:
    """Names the GPUs for a ticket: whoever exchanges a card knows neither ranks nor CUDA's numbers."""
    lines: list[str] = []
    for gpu in end.gpus:
        names = ", ".join(name for name in (gpu.uuid, gpu.address) if name)
        number = "a GPU" if gpu.index is None else f"GPU {gpu.index}"
        faults = "; ".join(gpu.faults) or "its driver knows of no fault"
        lines.append(f"{number} of {end.host} ({names}): {faults}")
    return lines


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 3 else f"{len(ranks)} ranks"


def _quote(title: str, quoted: Sequence[str]) -> list[str]:
    return [title, *(f"  | {line}" for line in quoted)] if quoted else []
