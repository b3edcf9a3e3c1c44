"""One job from its plan to its outcome, over all its attempts: one session after the other, and the waits between.

What an attempt does stands in `session`, whether there is another in `restarts`. Decides nothing by itself.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dsrun.units import format_duration

from ..agent.leftovers import sweep_command
from ..failures.hang import HangPolicy, OnHang
from ..failures.report import FailureReport
from ..failures.restarts import AttemptEnd, GiveUp, Restart, Restarts
from ..plan.launch_plan import LaunchPlan
from ..transport.base import FIRST_WORD_PATIENCE_S, Transport
from .agents import Session
from .rank_table import Outcome
from .remote_leftovers import sweep_hosts
from .resume_point import ResumePoint, ResumeSearch, find_checkpoint, has_memory_copies, recorded_checkpoints
from .sink import Sink
from .user_requests import UserRequests

#: Between two looks at a search that goes on.
_LOOK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What the user wants done when a job fails or hangs.

    Attributes:
        max_restarts: number of times that the job may be started again.
        min_uptime_s: an attempt that lived this long was no crash at the start: waiting before restarts begins anew.
        first_wait_s: seconds before the first restart; each further wait is twice the one before, up to a minute.
        hang_timeout_s: a rank without progress for this long hangs; None looks only at ranks that beat, after 30 min.
        start_timeout_s: start time-out in seconds that the user named, which ranks have at least; None where none was
            named. See `HangPolicy`.
        first_word_s: longest time for a host to be reached and its agent to say its first word.
        on_hang: action for a job that hangs: `report`, `stop` or `restart`.
    """

    max_restarts: int = 0
    min_uptime_s: float = 60.0
    first_wait_s: float = 1.0
    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None
    first_word_s: float = FIRST_WORD_PATIENCE_S
    on_hang: OnHang = "report"


class JobRun:
    """One job.

    Args:
        plan: the first attempt's launch; its run_dir must exist here.
        transport: way to reach the hosts.
        sink: receiver of output and news of all attempts.
        python: interpreter for agents and ranks on hosts that name none; see `Session`.
        policies: policies for a job that fails or hangs.
        requests: requests of the user about the job; None makes a queue of its own.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        transport: Transport,
        sink: Sink,
        *,
        python: str,
        policies: Policies,
        requests: UserRequests | None = None,
    ) -> None:
        # Whoever started the other hosts starts them all again: one alone could not meet the others' next attempt.
        assert plan.outside is None or policies.max_restarts == 0, "a job with hosts outside is not started again"
        self._transport = transport
        self._sink = sink
        self._python = python
        self._policies = policies
        self._hang = HangPolicy(
            timeout_s=policies.hang_timeout_s, on_hang=policies.on_hang, start_timeout_s=policies.start_timeout_s
        )
        self._restarts = Restarts(
            policies.max_restarts, min_uptime_s=policies.min_uptime_s, first_wait_s=policies.first_wait_s
        )
        # SimpleQueue, because its put may run in a signal handler that interrupted its get.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: What the user wants of the job.
        self.requests = requests or UserRequests()
        self.requests.wake_job_by(lambda: self._woken.put(None))
        #: As the host of rank 0 said last; see `Session.first_host_is_apart`.
        self._first_host_is_apart = False
        self._session = self._new_session(plan)

    def run(self) -> Outcome:
        """Runs the job to its end, whatever the end is.

        Returns:
            the outcome of the last attempt.
        """
        while True:
            outcome = self._session.run()
            self.requests.forget_interrupts()
            resume = self._find_resume_point() if self._may_restart_after(outcome) else None
            restart = self._restart_after(outcome, resume)
            if restart is None:
                return self._ended(outcome)
            self._tell(restart, outcome.report, resume)
            if not self._wait(restart.wait_s):
                return self._ended(self._stopped(outcome))
            plan = replace(
                self._session.plan,
                attempt=restart.number,
                nonce=secrets.token_hex(16),
                resume=None if resume is None else resume.folder,
            )
            self._session = self._new_session(plan)
            if self.requests.stop is not None:
                # It came when no session could take it.
                return self._ended(self._stopped(outcome))

    def _new_session(self, plan: LaunchPlan) -> Session:
        return Session(
            plan,
            self._transport,
            self._sink,
            python=self._python,
            requests=self.requests,
            hang=self._hang,
            first_word_s=self._policies.first_word_s,
        )

    def _may_restart_after(self, outcome: Outcome) -> bool:
        report = outcome.report
        if report is None or report.is_mistake or self.requests.stop is not None:
            return False
        return not report.is_hang or self._hang.on_hang == "restart"

    def _find_resume_point(self) -> ResumePoint | None:
        """Finds where to go on; the host of rank 0 may have to be asked, and nobody who stops the job waits for it."""
        plan, apart = self._session.plan, self._session.first_host_is_apart
        if apart is not None:
            self._first_host_is_apart = apart
        points = recorded_checkpoints(plan.run_dir)
        if not points or self._policies.max_restarts == 0:
            return None
        found: list[ResumeSearch] = []

        def search() -> None:
            host = plan.nodes[0].host
            found.append(
                find_checkpoint(
                    points,
                    host,
                    self._transport,
                    python=self._python,
                    apart=self._first_host_is_apart,
                    first_word_s=self._policies.first_word_s,
                )
            )
            self._woken.put(None)

        threading.Thread(target=search, daemon=True).start()
        # It has time-outs of its own; only a stop ends the wait before.
        while not found and self._wait(_LOOK_S, until=lambda: bool(found)):
            pass
        if not found:
            return None
        if found[0].doubt is not None and found[0].point is not None:
            self._sink.note(f"checkpoint {self._place(found[0].point.folder)}: {found[0].doubt}")
        return found[0].point

    def _restart_after(self, outcome: Outcome, resume: ResumePoint | None) -> Restart | None:
        report = outcome.report
        if report is None or self.requests.stop is not None or not self._may_restart_after(outcome):
            return None
        checkpoint = None if resume is None else resume.identity
        end = AttemptEnd(uptime_s=outcome.uptime_s, step=outcome.step, checkpoint=checkpoint)
        match self._restarts.after(end):
            case Restart() as restart:
                return restart
            case GiveUp(reason):
                if reason is not None:
                    self._sink.note(f"not started again: {reason}")
                elif self._policies.max_restarts:
                    self._sink.note(f"not started again: {_restarts(self._policies.max_restarts)} used")
                elif report.is_hang:
                    self._sink.note("not started again: `--on-hang restart` needs `--max-restarts N`")
                return None

    def _tell(self, restart: Restart, report: FailureReport | None, resume: ResumePoint | None) -> None:
        assert report is not None, "only a failure is followed by a restart"
        folder = None if resume is None else resume.folder
        where = "" if folder is None else f" from checkpoint {self._place(folder)}"
        self._sink.event("restart", attempt=restart.number, wait_s=restart.wait_s, resume=folder, why=report.headline())
        first, *more = report.short()
        self._sink.note(f"attempt {restart.number} failed: {first}")
        for line in more:
            self._sink.note(f"  {line}")
        number = f"restart {restart.number} of {self._policies.max_restarts}"
        self._sink.note(f"{number} in {format_duration(restart.wait_s)}{where}")

    def _place(self, folder: str) -> str:
        """Names the host of a checkpoint's folder, unless that may be found here too, or in a store."""
        is_elsewhere = self._first_host_is_apart and "://" not in folder
        return f"{self._session.plan.nodes[0].host.name}:{folder}" if is_elsewhere else folder

    def _wait(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Waits between two attempts, or until something is so; returns whether the job is to go on."""
        until_s = time.monotonic() + seconds
        while self.requests.stop is None and not until() and (now_s := time.monotonic()) < until_s:
            # What asks for an answer and stops nothing; a stop has left this loop.
            self.requests.handle_pending()
            tick_s = self._sink.tick(now_s)
            try:
                self._woken.get(timeout=max(0.0, min(until_s, until_s if tick_s is None else tick_s) - now_s))
            except queue.Empty:
                continue
        return self.requests.stop is None

    def _stopped(self, outcome: Outcome) -> Outcome:
        """The user's stop came between two attempts: nothing runs, and the stop is the end."""
        stop = self.requests.stop
        assert stop is not None, "a stop was asked for"
        return replace(outcome, exit_code=128 + stop.signal, report=None)

    def _forget_copies(self, outcome: Outcome) -> None:
        """Has copies in memory removed that agents have left for an attempt that does not follow."""
        plan = self._session.plan
        may_have_followed = outcome.exit_code != 0 and plan.attempt < self._policies.max_restarts
        if may_have_followed and has_memory_copies(plan.run_dir):
            hosts = [node.host for node in plan.nodes]
            sweep_hosts(hosts, lambda host: sweep_command(host.python or self._python, plan.job_id), self._transport)

    def _ended(self, outcome: Outcome) -> Outcome:
        self._forget_copies(outcome)
        kind = "done" if outcome.exit_code == 0 else "stopped" if outcome.report is None else "failed"
        self._sink.event("end", outcome=kind, exit_code=outcome.exit_code, attempts=outcome.attempts)
        return outcome


def _restarts(count: int) -> str:
    return "the 1 restart is" if count == 1 else f"all {count} restarts are"
