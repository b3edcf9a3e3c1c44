"""Whether a job still makes progress: from what its ranks say and print. Pure: the clock is handed in.

[Note: progress of a rank] A rank that has beaten (see `dsrun.contract.heartbeats`) is judged by its own beats, and is
expected to go on beating; the runtime beats in every step and while it saves. One that never has is judged by the job:
in most scripts only rank 0 prints, so the silence of the others says nothing as long as anybody prints or beats.
Without an explicit time-out only ranks that beat are judged, for a script that prints nothing for half an hour may be
well. While a rank waits for a person nobody is judged: the others wait for that rank, and a person takes the time they
take. Afterwards all ranks have the whole time again.

[Note: start of a rank] An import of torch from a slow disk takes minutes and says nothing meanwhile, and the other
ranks wait for it. So nobody is judged while a rank's interpreter starts or torch is imported, as far as ranks tell
(`dsrun.contract.heartbeats.StartState`), and all have the whole time afterwards. That too has an end, the start limit;
then those that have not started are the verdict.

[Note: torch ends a rank] NCCL's watchdog, a thread of torch in each rank, ends it by SIGABRT once a collective takes
longer than its group allows: ten minutes, if a script has made the group by itself. It says so on stderr first, and
then has all ranks write down what they wait in, so there is time to ask them where they are. So does the thread that
watches the watchdog, when that one is stuck.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dsrun.contract.environment import DEFAULT_HANG_TIMEOUT_S
from dsrun.units import format_duration

from ..lifeline import Lifeline
from ..number_ranges import named_ranks
from ..protocol import RankStack, RankStatus, Starting
from .causes.process_groups import WATCHDOG_WORDS

#: What becomes of a job that hangs: it is told, ended, or started again.
OnHang = Literal["report", "stop", "restart"]
#: Longest time for a rank to start and import torch, where no longer one was named.
START_LIMIT_S = 600.0
#: For all hosts to say where their ranks are; each takes 41 s at most. Less than the minute that torch gives dumps
#: before its watchdog ends a rank.
STACKS_PATIENCE_S = 45.0
#: How long torch's own groups wait under NCCL.
NCCL_TIMEOUT_S = 600.0
_WATCHDOG = re.compile(
    WATCHDOG_WORDS + r"(?:[^\n]* ran for (?P<milliseconds>[0-9]{1,12}) milliseconds)?"
    r"|Heartbeat monitor timed out!|ProcessGroupNCCL's watchdog got stuck for (?P<seconds>[0-9]{1,9}) seconds"
)
#: Of a line that is not complete, as much as may hold the watchdog's words.
_MOST_TAIL = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """What the user wants.

    Attributes:
        timeout_s: longest time without progress; None judges only ranks that beat, by the default.
        on_hang: action for a job that hangs: `report`, `stop` or `restart`.
        start_timeout_s: `--start-timeout`; ranks have at least as long to start.
    """

    timeout_s: float | None = None
    on_hang: OnHang = "report"
    start_timeout_s: float | None = None

    @property
    def start_limit_s(self) -> float:
        """Longest time for a rank to start and import torch. See [Note: start of a rank]."""
        timeout_s = DEFAULT_HANG_TIMEOUT_S if self.timeout_s is None else self.timeout_s
        return max(START_LIMIT_S, timeout_s, self.start_timeout_s or 0.0)


class HangTracker:
    """Follows all ranks of one attempt. See [Note: progress of a rank].

    Args:
        timeout_s: seconds without progress that count as a hang; None judges only ranks that send heartbeats, by the
            default. See `HangPolicy`.
        now_s: monotonic seconds.
        start_limit_s: seconds that a rank may take to start and import torch; see `HangPolicy`.
    """

    def __init__(self, timeout_s: float | None, *, now_s: float, start_limit_s: float = START_LIMIT_S) -> None:
        self._judges_silence = timeout_s is not None
        self._timeout_s = DEFAULT_HANG_TIMEOUT_S if timeout_s is None else timeout_s
        self._job = Lifeline(self._timeout_s, now_s)
        self._start_limit_s = start_limit_s
        self._start = Lifeline(start_limit_s, now_s)
        self._starting: dict[int, Starting] = {}
        #: Ranks that have printed, so that their programs run, told or not.
        self._spoke: set[int] = set()
        #: Ranks that were found not to have started within the limit.
        self.late: Mapping[int, Starting] = {}
        self._beats: dict[int, int] = {}
        self._idle_s: dict[int, float] = {}
        self._never_beat: set[int] = set()
        self._told = False
        self._waiting: set[int] = set()
        self._resumed_at_s = float("-inf")

    def started(self, ranks: Iterable[int]) -> None:
        """Ranks run now."""
        self._never_beat.update(ranks)
        self._job.renew()

    def pulse(self, ranks: Iterable[RankStatus], importing: Iterable[int] = ()) -> None:
        """How ranks fare.

        Args:
            ranks: those of a host that run.
            importing: ranks that exist only once their host's spawner has imported torch for them; see `Pulse`.
        """
        self._starting.update(dict.fromkeys(importing, "torch"))
        for rank in ranks:
            self._note_start(rank)
            if rank.idle_s is None:
                continue
            self._never_beat.discard(rank.rank)
            self._idle_s[rank.rank] = rank.idle_s
            if self._beats.get(rank.rank) != rank.beats:
                self._beats[rank.rank] = rank.beats
                self._job.renew()

    def _note_start(self, rank: RankStatus) -> None:
        if rank.starting and not (rank.starting == "interpreter" and rank.rank in self._spoke):
            self._starting[rank.rank] = rank.starting
        else:
            self._starting.pop(rank.rank, None)

    def printed(self, rank: int) -> None:
        """This rank printed something."""
        self._spoke.add(rank)
        self._job.renew()

    def waits_for_person(self, rank: int) -> None:
        """A rank waits until somebody types."""
        self._waiting.add(rank)

    def goes_on(self, rank: int, now_s: float) -> None:
        """A rank waits for nobody any more, in monotonic seconds."""
        if rank in self._waiting:
            self._waiting.remove(rank)
            self._resumed_at_s = now_s
            self._job.renew()

    def ended(self, rank: int) -> None:
        """A rank makes no progress any more, and needs not."""
        self._never_beat.discard(rank)
        self._idle_s.pop(rank, None)
        self._starting.pop(rank, None)
        self._job.renew()

    def look_again(self) -> None:
        """What `look` returned last was not told: it is news the next time too."""
        self._told = False

    def look(self, now_s: float) -> float | None:
        """Returns for how long there was no progress, once for each hang; to be asked every second or so.

        Where that is because ranks have not started, they are in `late`.
        """
        # Asked at every look: what was not looked at would count at the first.
        has_run_out, start_is_over = self._job.has_run_out(now_s), self._start.has_run_out(now_s)
        if self._waiting or not self._starting:
            self._start.renew()
        if self._waiting:
            self._job.renew()
            return None
        self.late = dict(self._starting) if start_is_over else {}
        if self._starting:
            self._job.renew()
            self._resumed_at_s = now_s
            return self._news(self._start_limit_s if self.late else None)
        is_silent = has_run_out and self._judges_silence and bool(self._never_beat)
        idle_s = min(max(self._idle_s.values(), default=0.0), now_s - self._resumed_at_s)
        hangs = is_silent or idle_s >= self._timeout_s
        return self._news(max(idle_s, self._timeout_s) if hangs else None)

    def _news(self, hangs_s: float | None) -> float | None:
        is_news = hangs_s is not None and not self._told
        self._told = hangs_s is not None
        return hangs_s if is_news else None


def start_words(late: Mapping[int, Starting], limit_s: float) -> str:
    """Says which ranks have not started: `rank 1 is still importing torch after 10m 0s`.

    Args:
        late: state of the start, by rank, for the ranks that have not started.
        limit_s: seconds that the ranks have taken for their start so far.
    """
    for what, doing in (("torch", "importing torch"), ("interpreter", "starting Python")):
        ranks = sorted(rank for rank, starting in late.items() if starting == what)
        if ranks:
            verb = "is" if len(ranks) == 1 else "are"
            return f"{named_ranks(ranks)} {verb} still {doing} after {format_duration(limit_s)}"
    return ""


@dataclass(frozen=True, slots=True)
class WatchdogEnd:
    """torch is about to end a rank. See [Note: torch ends a rank].

    Attributes:
        rank: rank that torch ends.
        waited_s: seconds that the rank waited for the others.
    """

    rank: int
    waited_s: float


class WatchdogWords:
    """Looks in what ranks print for the words that torch ends them with."""

    def __init__(self) -> None:
        self._begun: dict[int, str] = {}

    def look(self, rank: int, text: str) -> WatchdogEnd | None:
        """Returns that torch ends the rank, where this part of its stderr says so.

        Args:
            rank: rank that wrote the text.
            text: part of the rank's stderr after the part looked at before; it may be cut anywhere.
        """
        text = self._begun.get(rank, "") + text
        self._begun[rank] = text[text.rfind("\n") + 1 :][-_MOST_TAIL:]
        found = _WATCHDOG.search(text)
        if found is None:
            return None
        milliseconds, seconds = found["milliseconds"], found["seconds"]
        waited_s = int(milliseconds) / 1000 if milliseconds else float(seconds or NCCL_TIMEOUT_S)
        return WatchdogEnd(rank, waited_s)


def watchdog_warning(timeout_s: float | None, script: bytes, *, name: str) -> tuple[str, ...]:
    """Says that NCCL ends ranks before the launcher looks at them, where a script's text shows it.

    Args:
        timeout_s: seconds without progress that count as a hang; None if the user named none. See `HangPolicy`.
        script: text of the script; without a group of its own, or with a time for it, nothing is certain.
        name: name of the script in messages.
    """
    is_plain = b"init_process_group" in script and not re.search(rb"\bdsrun\b|timeout|gloo", script)
    if timeout_s is None or timeout_s < NCCL_TIMEOUT_S or not is_plain:
        return ()
    return (
        f"warning: `--hang-timeout {format_duration(timeout_s)}`: the groups of {name} wait 10 minutes under NCCL, and "
        "torch ends its ranks then: name a shorter time, or a longer one in `init_process_group(timeout=...)`",
    )


class StackRound:
    """One question to all hosts where their ranks are.

    Args:
        hosts: those that were asked.
        silent_s: seconds without progress; where torch ends a rank, the seconds that this rank has waited.
        now_s: monotonic seconds.
        ends: end of a rank by torch, if that is why the hosts are asked; None if it is not.
        late: sentence about the ranks that have not started; empty where all have.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        silent_s: float,
        now_s: float,
        ends: WatchdogEnd | None = None,
        late: str = "",
    ) -> None:
        self.silent_s = silent_s
        self.ends = ends
        self.late = late
        self.stacks: list[tuple[str, RankStack]] = []
        #: Hosts that have not answered.
        self.waiting = set(hosts)
        self._until_s = now_s + STACKS_PATIENCE_S

    def answered(self, host: str, ranks: Iterable[RankStack]) -> None:
        """Notes a host's answer."""
        if host in self.waiting:
            self.waiting.remove(host)
            self.stacks += [(host, rank) for rank in ranks]

    def gone(self, host: str) -> None:
        """Notes that a host will not answer."""
        self.waiting.discard(host)

    def is_over(self, now_s: float) -> bool:
        """Whether all have answered, or time is up."""
        return not self.waiting or now_s >= self._until_s
