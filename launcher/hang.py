"""Whether a job still makes progress: from what its ranks say and print. Pure: the clock is handed in.

[Note: progress of a rank] A rank that has beaten (see `dsrun.heartbeats`) is judged by its own beats, and is expected
to go on beating; the runtime beats in every step and while it saves. One that never has is judged by the job: in most
scripts only rank 0 prints, so the silence of the others says nothing as long as anybody prints or beats. Without an
explicit time-out only ranks that beat are judged, for a script that prints nothing for half an hour may be well.
While a rank waits for a person nobody is judged: the others wait for that rank, and a person takes the time they take.
Afterwards all ranks have the whole time again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsrun.contract import DEFAULT_HANG_TIMEOUT_S

from .lifeline import Lifeline
from .protocol import RankPulse, RankStack

#: What becomes of a job that hangs: it is told, ended, or started again.
OnHang = Literal["report", "stop", "restart"]
#: For all hosts to say where their ranks are; each takes 16 s at most.
STACKS_PATIENCE_S = 20.0


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


class StackRound:
    """One question to all hosts where their ranks are.

    Args:
        hosts: those that were asked.
        silent_s: for how long there was no progress.
        now_s: monotonic seconds.
    """

    def __init__(self, hosts: Iterable[str], *, silent_s: float, now_s: float) -> None:
        self.silent_s = silent_s
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
