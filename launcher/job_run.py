"""One job from its plan to its outcome, over all its attempts. Starts sessions; what a session does stands there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .plan import LaunchPlan
from .session import Session, Sink
from .tally import Outcome
from .transport.base import Transport

#: What becomes of a job that hangs: it is told, ended, or started again.
OnHang = Literal["report", "stop", "restart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What the user wants done when a job fails or hangs.

    Attributes:
        max_restarts: how often it may be started again.
        min_uptime_s: an attempt that lived this long was no crash at the start: waiting before restarts begins anew.
        hang_timeout_s: a rank without progress for this long hangs; None looks only at ranks that beat, after 30 min.
        on_hang: what becomes of a job that hangs.
    """

    max_restarts: int = 0
    min_uptime_s: float = 60.0
    hang_timeout_s: float | None = None
    on_hang: OnHang = "report"


class JobRun:
    """One job.

    Args:
        plan: the first attempt's launch; its run_dir must exist here.
        transport: how to reach the hosts.
        sink: where output and news of all attempts go.
        python: the interpreter for the agents; dsrun must be importable there.
        policies: what to do when the job fails or hangs.
    """

    def __init__(self, plan: LaunchPlan, transport: Transport, sink: Sink, *, python: str, policies: Policies) -> None:
        self._session = Session(plan, transport, sink, python=python)

    def request_stop(self, signum: int, why: str | None = None) -> None:
        """See `Session.request_stop`; ends the job, not only its present attempt."""
        self._session.request_stop(signum, why)

    def kill_now(self, signum: int) -> None:
        """See `Session.kill_now`; ends the job, not only its present attempt."""
        self._session.kill_now(signum)

    def pass_signal(self, signum: int) -> None:
        """See `Session.pass_signal`."""
        self._session.pass_signal(signum)

    def obey_requests(self) -> bool:
        """See `Session.obey_requests`."""
        return self._session.obey_requests()

    def run(self) -> Outcome:
        """Runs the job to its end, whatever the end is.

        Returns:
            the outcome of the last attempt.

        Raises:
            LaunchError: an agent could not be started; what was started is stopped.
        """
        return self._session.run()
