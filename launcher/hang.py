"""Whether a job still makes progress: from what its ranks say and print. Pure: the clock is handed in.

[Note: progress of a rank] A rank that has beaten (see `dsrun.heartbeats`) is judged by its own beats, and is expected
to go on beating; the runtime beats in every step and while it saves. One that never has is judged by the job: in most
scripts only rank 0 prints, so the silence of the others says nothing as long as anybody prints or beats. Without an
explicit time-out only ranks that beat are judged, for a script that prints nothing for half an hour may be well.
While a rank waits for a person nobody is judged: the others wait for that rank, and a person takes the time they take.
Afterwards all ranks have the whole time again.

[Note: torch ends a rank] NCCL's watchdog, a thread of torch in each rank, ends it by SIGABRT once a collective takes
longer than its group allows: ten minutes, if a script has made the group by itself. It says so on stderr first, and
then has all ranks write down what they wait in, so there is time to ask them where they are. So does the thread that
watches the watchdog, when that one is stuck.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsrun.contract import DEFAULT_HANG_TIMEOUT_S
from dsrun.units import format_duration

from .cause_texts_groups import WATCHDOG_WORDS
from .lifeline import Lifeline
from .protocol import RankPulse, RankStack

#: What becomes of a job that hangs: it is told, ended, or started again.
OnHang = Literal["report", "stop", "restart"]
#: For all hosts to say where their ranks are; each takes 16 s at most.
STACKS_PATIENCE_S = 20.0
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
        on_hang: what becomes of a job that hangs.
    """

    timeout_s: float | None = None
    on_hang: OnHang = "report"


class HangTracker:
    """Follows all ranks of one attempt. See [Note: progress of a rank].

    Args:
        timeout_s: as in `HangPolicy`.
        now_s: monotonic seconds.
    """

    def __init__(self, timeout_s: float | None, *, now_s: float) -> None:
        self._judges_silence = timeout_s is not None
        self._timeout_s = DEFAULT_HANG_TIMEOUT_S if timeout_s is None else timeout_s
        self._job = Lifeline(self._timeout_s, now_s)
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

    def pulse(self, ranks: Iterable[RankPulse]) -> None:
        """How ranks fare."""
        for rank in ranks:
            if rank.idle_s is None:
                continue
            self._never_beat.discard(rank.rank)
            self._idle_s[rank.rank] = rank.idle_s
            if self._beats.get(rank.rank) != rank.beats:
                self._beats[rank.rank] = rank.beats
                self._job.renew()

    def printed(self) -> None:
        """A rank printed something."""
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
        self._job.renew()

    def look_again(self) -> None:
        """What `look` returned last was not told: it is news the next time too."""
        self._told = False

    def look(self, now_s: float) -> float | None:
        """Returns for how long there was no progress, once for each hang; to be asked every second or so."""
        # Asked at every look: what was not looked at would count at the first.
        has_run_out = self._job.has_run_out(now_s)
        if self._waiting:
            self._job.renew()
            return None
        is_silent = has_run_out and self._judges_silence and bool(self._never_beat)
        idle_s = min(max(self._idle_s.values(), default=0.0), now_s - self._resumed_at_s)
        hangs = is_silent or idle_s >= self._timeout_s
        is_news = hangs and not self._told
        self._told = hangs
        return max(idle_s, self._timeout_s) if is_news else None


@dataclass(frozen=True, slots=True)
class WatchdogEnd:
    """torch is about to end a rank. See [Note: torch ends a rank].

    Attributes:
        rank: which one.
        waited_s: how long it waited for the others.
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
            rank: whose.
            text: what follows what was looked at before; cut anywhere.
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
        timeout_s: as in `HangPolicy`.
        script: text of the script; without a group of its own, or with a time for it, nothing is certain.
        name: what messages call it.
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
        silent_s: for how long there was no progress.
        now_s: monotonic seconds.
        ends: why they were asked, where it is torch that ends a rank.
    """

    def __init__(self, hosts: Iterable[str], *, silent_s: float, now_s: float, ends: WatchdogEnd | None = None) -> None:
        self.silent_s = silent_s
        self.ends = ends
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
