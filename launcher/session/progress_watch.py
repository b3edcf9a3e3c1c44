"""Watches how the ranks of one attempt get on: tells of stragglers, and gives a verdict on hangs. Stops nobody.

The trackers that judge are pure and stand below; this puts them together and speaks to the sink.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from ..agent.start.flight_recorder import dump_places
from ..failures.hang import START_LIMIT_S, HangTracker, StackRound, WatchdogEnd, WatchdogWords, start_words
from ..failures.hang_report import is_gone, verdict
from ..failures.report import Hang
from ..failures.stragglers import StragglerTracker
from ..plan.launch_plan import LaunchPlan
from ..protocol import Output, Pulse, RankStack, Reading
from .rank_table import RankTable
from .sink import Sink

#: Rounds, a second apart, in which no rank is left before that is told: ends are reported a moment after they happen.
_EMPTY_ROUNDS = 5


class ProgressWatch:
    """What pulses, output and stacks say about the progress of one attempt.

    Args:
        table: table of the ranks, which knows where they are and which have ended, and is told how far they are.
        sink: receiver of news.
        plan: the launch.
        timeout_s: longest time in seconds without progress, as in `HangPolicy`; None judges only ranks that beat, by
            the default.
        start_limit_s: longest time in seconds for a rank to start and import torch, as in `HangPolicy`.
    """

    def __init__(
        self,
        table: RankTable,
        sink: Sink,
        plan: LaunchPlan,
        *,
        timeout_s: float | None,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._table = table
        self._sink = sink
        self._stacks_folder = plan.run_dir
        self._job_id = plan.job_id
        self._hang = HangTracker(timeout_s, now_s=time.monotonic(), start_limit_s=start_limit_s)
        self._stragglers = StragglerTracker(len(plan.ranks))
        self._watchdog = WatchdogWords()
        self._ends: WatchdogEnd | None = None
        self._round: StackRound | None = None
        self._empty_rounds = 0

    def started(self, ranks: Iterable[int]) -> None:
        """Ranks run now."""
        self._hang.started(ranks)

    @property
    def is_asking_before_end(self) -> bool:
        """Torch ends a rank, and hosts have not said yet where the others are: they must not be stopped before."""
        return self._round is not None and self._round.ends is not None

    def printed(self, output: Output) -> bool:
        """Returns whether a rank prints that torch is about to end it, so that hosts are to be asked by `ask`."""
        self._hang.printed(output.rank)
        ends = self._watchdog.look(output.rank, output.text) if output.stream == "stderr" else None
        # Once an attempt: the others' watchdogs strike for the same reason a moment later.
        if ends is None or self._ends is not None:
            return False
        self._ends = ends
        return self._round is None

    def ask(self, now_s: float, hosts: Sequence[str]) -> None:
        """Awaits the answers of hosts that are asked where their ranks are, as torch is about to end one.

        Args:
            now_s: monotonic seconds.
            hosts: those with ranks that run.
        """
        assert self._ends is not None, "a rank has printed it"
        self._round = StackRound(hosts, silent_s=self._ends.waited_s, now_s=now_s, ends=self._ends)

    def reading(self, told: Reading) -> None:
        """A rank does this with its stdin."""
        if told.state == "waits":
            self._hang.waits_for_person(told.rank)
        else:
            self._hang.goes_on(told.rank, time.monotonic())

    def ended(self, rank: int) -> None:
        """A rank has ended."""
        self._hang.goes_on(rank, time.monotonic())
        self._hang.ended(rank)

    def pulse(self, pulse: Pulse) -> None:
        """The ranks of a host fare like this."""
        self._hang.pulse(pulse.ranks, pulse.importing)
        self._table.pulse(pulse.ranks)
        for straggler in self._stragglers.pulse(pulse.ranks, pulse.time_s):
            self._sink.event(
                "straggler",
                rank=straggler.rank,
                ratio=round(straggler.ratio, 2),
                own_s=round(straggler.own_s, 6),
                others_s=round(straggler.others_s, 6),
                others_wait_in=straggler.others_wait.collective,
                others_wait_s=straggler.others_wait.seconds,
                waits_in=straggler.waits.collective,
                waits_s=straggler.waits.seconds,
            )
            coordinate = self._table.coordinates.get(straggler.rank, "")
            self._sink.note(straggler.text(self._table.host_of(straggler.rank), coordinate=coordinate))

    def look(self, now_s: float, hosts: Sequence[str]) -> bool:
        """Returns whether these hosts are to be asked where their ranks are; to be called every second or so.

        Args:
            now_s: monotonic seconds.
            hosts: those with ranks that run.
        """
        silent_s = self._hang.look(now_s)
        if silent_s is None or self._round is not None:
            return False
        self._round = StackRound(hosts, silent_s=silent_s, now_s=now_s, late=start_words(self._hang.late, silent_s))
        return True

    def answered(self, host: str, ranks: Iterable[RankStack]) -> None:
        """A host says where its ranks are; too late, it is passed over."""
        if self._round is not None:
            self._round.answered(host, ranks)

    def gone(self, host: str) -> None:
        """A host will not say anything any more."""
        if self._round is not None:
            self._round.gone(host)

    def verdict(self, now_s: float) -> Hang | None:
        """Records who hangs where, and returns it, once all hosts have answered or time is up; None before.

        Where torch ends a rank this is told, and not returned: the job is ended by that.
        """
        stacks = self._round
        if stacks is None or not stacks.is_over(now_s):
            return None
        self._round = None
        nobody_is_left = not stacks.late and not stacks.waiting and all(is_gone(stack) for _, stack in stacks.stacks)
        if stacks.ends is not None:
            if not nobody_is_left:
                for line in self._lines_of(stacks):
                    self._sink.note(line)
            return None
        self._empty_rounds = self._empty_rounds + 1 if nobody_is_left else 0
        if 0 < self._empty_rounds < _EMPTY_ROUNDS:
            self._hang.look_again()
            return None
        return Hang(lines=self._lines_of(stacks), time_s=time.time())

    def _lines_of(self, stacks: StackRound) -> tuple[str, ...]:
        """Returns the verdict on a round, and records it."""
        lines = verdict(
            stacks.stacks,
            silent_s=stacks.silent_s,
            headline=None if stacks.ends is None else f"torch's watchdog ends {self._table.name_of(stacks.ends.rank)}",
            late=stacks.late,
            ended=self._table.ended_well(),
            unanswered=sorted(stacks.waiting),
            coordinates=self._table.coordinates,
            stacks_folder=self._stacks_folder,
            dumps=dump_places(
                stacks.stacks,
                run_dir=self._stacks_folder,
                job_id=self._job_id,
                own_names=("localhost", os.uname().nodename),
            ),
        )
        self._sink.event("hang", lines=lines)
        return lines
