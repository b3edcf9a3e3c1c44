"""What is known of a job's ranks and hosts so far, and what that makes of the job. Sends nothing and stops nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..failures.coordinates import named_rank
from ..failures.first_failure import DOUBT_S, judge
from ..failures.report import FailureReport, Hang, HostLoss, RankEnd, UserStop
from ..plan.launch_plan import LaunchPlan, NodePlan
from ..protocol import Exit, GpuFinding, GpuFindings, RankStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: exit code of the job; see `failures` for what each means.
        report: report of why the job failed; None if it did not, or if the user stopped it.
        ends: every rank's end, by rank.
        attempts: number of times that the job was started.
        uptime_s: seconds from the first rank's start to the end, in the last attempt; 0 if none was started.
        step: highest step that a rank said it had finished; None if none did.
    """

    exit_code: int
    report: FailureReport | None
    ends: tuple[RankEnd, ...]
    attempts: int
    uptime_s: float = 0.0
    step: int | None = None


class RankTable:
    """Facts about one job, in the order they come.

    Args:
        plan: the launch.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._hosts = {worker.rank: node.host.name for node in plan.nodes for worker in node.workers}
        #: The user's first request to end the job.
        self.user_stop: UserStop | None = None
        #: What the job is ended for, if it hangs.
        self.hang: Hang | None = None
        #: When the ranks were first asked to end.
        self.stopped_at_s: float | None = None
        self._started_at_s: float | None = None
        self._step: int | None = None
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exit] = {}
        self._losses: list[HostLoss] = []
        self._gpus: dict[str, GpuFindings] = {}
        #: Place on the axes of the job of each rank that has said one, by its number; see `RankStatus`.
        self.coordinates: dict[int, str] = {}

    def started(self, node: NodePlan, pids: Sequence[int]) -> None:
        """Notes the processes of a host's ranks, in the order of its workers."""
        self._started_at_s = self._started_at_s or time.monotonic()
        self._pids |= {worker.rank: pid for worker, pid in zip(node.workers, pids, strict=True)}

    def pulse(self, ranks: Iterable[RankStatus]) -> None:
        """Notes how far ranks are, and where on the axes of the job."""
        for rank in ranks:
            self._reached(rank.step)
            self.coordinates[rank.rank] = rank.coordinate

    def exited(self, message: Exit) -> None:
        """Notes how a rank ended, by the front end's clock."""
        self._exits[message.rank] = message
        self._reached(message.step)
        self.coordinates[message.rank] = message.coordinate

    def asked_driver(self, host: str, message: GpuFindings) -> None:
        """Notes what a host's driver says of its GPUs."""
        self._gpus[host] = message

    def has_died_of(self, stop: UserStop) -> bool:
        """Whether a rank has just died of the very signal that the user stops the job with."""
        ends = self._exits.values()
        return any(end.status == -stop.signal and abs(end.time_s - stop.time_s) <= DOUBT_S for end in ends)

    def _reached(self, step: int | None) -> None:
        if step is not None:
            self._step = max(step, self._step or 0)

    def lost(self, loss: HostLoss) -> bool:
        """Notes why a host is lost; returns whether that is news: the first reason stays."""
        if any(known.host == loss.host for known in self._losses):
            return False
        self._losses.append(loss)
        return True

    def all_ended(self, node: NodePlan) -> bool:
        """Whether every rank of a host has ended."""
        return all(worker.rank in self._exits for worker in node.workers)

    def host_of(self, rank: int) -> str:
        """Names a rank's host."""
        return self._hosts[rank]

    def name_of(self, rank: int) -> str:
        """Names a rank: its number, and its place on the axes of the job if it has said one."""
        return named_rank(rank, self.coordinates.get(rank, ""))

    def ended_well(self) -> list[int]:
        """Lists the ranks that have returned 0."""
        return sorted(rank for rank, message in self._exits.items() if message.status == 0)

    def is_running(self, node: NodePlan) -> bool:
        """Whether ranks of a host were started and have not all ended."""
        return bool(node.workers) and node.workers[0].rank in self._pids and not self.all_ended(node)

    def running_ranks(self) -> int:
        """Counts the ranks that have not ended, on hosts that are not lost."""
        lost = {loss.host for loss in self._losses}
        nodes = [node for node in self._plan.nodes if node.host.name not in lost]
        return sum(worker.rank not in self._exits for node in nodes for worker in node.workers)

    def end_outputs(self, ended: Callable[[int, str | None], None]) -> None:
        """Tells that no rank writes any more.

        Args:
            ended: callback that gets each rank, and the text it left beside its streams, or None.
        """
        for rank in self._plan.ranks:
            error = self._exits[rank].error if rank in self._exits else None
            # It is in no stream, so that not every rank shows it; the log is to be complete without the report.
            ended(rank, error.message if error is not None and error.is_rendered else None)

    def outcome(self, *, tail: Callable[[int], tuple[str, ...]], log: Callable[[int], str]) -> Outcome:
        """Returns how the job ended.

        Args:
            tail: function that returns the last output lines of a rank, by its number.
            log: function that returns the path of a rank's complete output, by its number.
        """
        ends = tuple(
            self._end_of(node, worker.rank, tail(worker.rank), log(worker.rank))
            for node in self._plan.nodes
            for worker in node.workers
        )
        exit_code, report = judge(ends, self._losses, self.user_stop, hang=self.hang, stopped_at_s=self.stopped_at_s)
        return Outcome(
            exit_code=exit_code,
            report=report,
            ends=ends,
            attempts=self._plan.attempt + 1,
            uptime_s=0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s,
            step=self._step,
        )

    def _end_of(self, node: NodePlan, rank: int, last_lines: tuple[str, ...], log: str) -> RankEnd:
        message = self._exits.get(rank)
        return RankEnd(
            rank=rank,
            host=node.host.name,
            pid=self._pids.get(rank),
            status=None if message is None else message.status,
            time_s=None if message is None else message.time_s,
            error=None if message is None else message.error,
            last_lines=last_lines,
            log=log,
            oom=None if message is None else message.oom,
            groups=None if message is None else message.groups,
            gpus=self._gpus_of(rank, node.host.name),
            coordinate=self.coordinates.get(rank, ""),
            step=None if message is None else message.step,
            phase="" if message is None else message.phase,
            collective="" if message is None else message.collective,
        )

    def _gpus_of(self, rank: int, host: str) -> tuple[GpuFinding, ...]:
        """Returns the GPUs of a rank's host that have a fault, and the rank's own where it was asked for."""
        told = self._gpus.get(host)
        if told is None:
            return ()
        return tuple(gpu for gpu in told.gpus if gpu.faults or (rank == told.rank and rank in gpu.ranks))
