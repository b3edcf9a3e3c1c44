"""One job's front end, from a checked launch to its outcome: here the parts of a job are put together.

Holds the job's lock and devices, keeps its record, shows its output, and collects the user's requests. Reads no options
and exits nothing: see commands/run.py. Runs in the foreground or behind `detach`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.contract.environment import CONFIG_ENV
from dsrun.errors import DsrunError, UsageError

from ..console.live import JobConsole, terminal_console
from ..console.signals import StopRequests
from ..failures.report import FailureReport, RankEnd
from ..jobs.facts import FactsWriter, read_facts
from ..jobs.folder import link_job, remove_job
from ..jobs.lock import JobLock
from ..jobs.queue.turn import hold_devices
from ..jobs.record import (
    JobRecord,
    append_waiting,
    copy_config,
    new_record,
    started_record,
    write_outcome,
    write_record,
)
from ..launch.checked_launch import Launch
from ..launch.stdin_choice import StdinObstacle, why_no_stdin
from ..logs.job_output import JobOutput
from ..machine.devices.choice import DeviceLease
from ..masking import masker_of
from ..monitors.processes import MonitorProcesses
from ..plan.environment import counted_environ
from ..plan.launch_plan import LaunchPlan
from ..plan.script_args import misplaced_options
from ..protocol import StreamName
from ..scheduler.slurm import signal_names
from ..session.job_run import JobRun, Policies
from ..session.rank_table import Outcome
from ..session.user_requests import Interrupted, UserRequests
from ..traces.job_end import conclude_profile
from ..transport.base import OwnedTransport
from ..transport.local import LocalTransport
from .outcome_text import closing, opening, outcome_json, without_ranks
from .own_stdin import OwnStdin

if TYPE_CHECKING:
    from .prepare_hosts import HostSettings

#: For what is written down about the machine, once the job has ended.
_FACTS_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """How a job comes to its devices.

    Attributes:
        queue: whether the job waits for its turn.
        priority: priority in the queue, higher first.
        share_gpus: whether the job takes GPUs that are in use if too few are free.
    """

    queue: bool = False
    priority: int = 0
    share_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a job is run and shown, beside what it is.

    Attributes:
        words: the words after `dsrun`, as they were typed.
        options: names of dsrun's own options: a script may fail over one of them, and none takes a secret.
        policies: policies for a job that fails or hangs.
        hold: choice of how the job gets its devices.
        hosts: settings for reaching and checking other hosts; None where there is no other host.
        detached: nobody looks: lines of ranks go to their logs only.
        shown: ranks whose lines are shown; None for all.
        progress: bars and a progress row are shown below the lines, where there is a terminal.
        as_json: stdout is kept for one object.
        quiet: no notes.
    """

    words: tuple[str, ...]
    options: frozenset[str]
    policies: Policies
    hold: Hold
    hosts: HostSettings | None = None
    detached: bool = False
    shown: frozenset[int] | None = None
    progress: bool = True
    as_json: bool = False
    quiet: bool = False


class _NotedDisplay:
    """The moving part of the console, which also fetches what the trackers have to say. See `Display`.

    Args:
        console: the console.
        monitors: the trackers.
    """

    def __init__(self, console: JobConsole, monitors: MonitorProcesses) -> None:
        self._console = console
        self._monitors = monitors

    @property
    def shows_bars(self) -> bool:
        """As the console has it."""
        return self._console.shows_bars

    def bar(self, rank: int, stream: StreamName, state: str | None) -> None:
        """See `BarDisplay`."""
        self._console.bar(rank, stream, state)

    def tick(self, now_s: float) -> float | None:
        """Shows new notes, and does what the console has to do."""
        for note in self._monitors.notes():
            self._console.note(note)
        return self._console.tick(now_s)

    def close(self) -> None:
        """See `Display`."""
        self._console.close()


class FrontEnd:
    """One job.

    Args:
        launch: launch to run.
        settings: settings of how the job is run and shown.
        job_id: its id.
        folder: its folder, just made.
        on_held: callback for the moment when the job has its devices, or waits for none any more; called once.
    """

    def __init__(
        self,
        launch: Launch,
        settings: RunSettings,
        *,
        job_id: str,
        folder: Path,
        on_held: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_held = on_held
        self._launch = launch
        self._settings = settings
        self._folder = folder
        self._stdin = OwnStdin(wanted=launch.stdin_rank is not None)
        self._plan = self._with_stdin(launch.plan(job_id=job_id, run_dir=str(folder)))
        self._transport: OwnedTransport = LocalTransport(stdin_fd=self._stdin.descriptor)
        self._began_s = time.monotonic()
        #: What the job waits for that has no rank yet.
        self._waits_for = "its devices"
        self._requests = UserRequests()
        self._stops = StopRequests(self._requests.request_stop, names=signal_names(os.environ))
        self._console = terminal_console(
            hosts=_shown_hosts(self._plan),
            quiet=settings.quiet,
            stdout_is_data=settings.as_json,
            environ=os.environ,
            on_closed=self._stops.output_closed,
            keep_waiting=self._requests.handle_pending,
            shown=frozenset() if settings.detached else settings.shown,
            progress_of=folder if settings.progress and not settings.detached else None,
        )

    def run(self, ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Runs the job to its end.

        Args:
            ready: callback for the moment when the job has its record and, unless it queues, also its devices and fit
                hosts; called once.

        Returns:
            the outcome, as `outcome_json` gives it.

        Raises:
            DsrunError: it could not be started, or not be run to its end. Nothing is left of a job that did not come
                to `ready`.
        """
        queued = self._settings.hold.queue
        lock: JobLock | None = None
        is_ready = False
        with self._stops.catching_signals(self._requests), ExitStack() as stack:
            # Later, for it is another once there are other hosts.
            stack.callback(lambda: self._transport.close())
            stack.callback(self._stdin.close)
            try:
                lock = JobLock(self._folder)
                record = self._write_down()
                if queued:
                    ready()
                    is_ready = True
                held = stack.enter_context(self._hold_devices())
                self._on_held()
                if held is not None:
                    plan = self._launch.plan(job_id=record.id, run_dir=str(self._folder), held=held)
                    self._plan = self._prepare_hosts(self._with_stdin(plan))
                    write_record(self._folder, started_record(record, self._plan, now=_now(), environ=os.environ))
                if not queued:
                    ready()
                    is_ready = True
                stop = self._requests.stop_before_start
                return self._run() if stop is None else self._stopped_early(stop)
            except DsrunError as error:
                if is_ready:
                    self._end_early("failed", error.exit_code, error.render().splitlines())
                raise
            finally:
                if not is_ready:
                    with suppress(OSError, DsrunError):
                        # What went wrong is on its way to the user already.
                        remove_job(self._folder, os.environ)
                if lock is not None:
                    lock.release()

    def _write_down(self) -> JobRecord:
        config = self._launch.env.get(CONFIG_ENV)
        record = new_record(
            self._plan,
            words=self._settings.words,
            now=_now(),
            detached=self._settings.detached,
            queued=self._settings.hold.queue,
            config=config,
            config_digest=copy_config(config, self._folder),
            transport=self._launch.placement.transport,
            environ=os.environ,
            own_options=self._settings.options,
        )
        write_record(self._folder, record)
        self._tell(link_job(self._folder, os.environ), prefix="`dsrun ps` does not find this job: ")
        return record

    def _hold_devices(self) -> AbstractContextManager[DeviceLease | None]:
        hold = self._settings.hold
        return hold_devices(
            self._launch.demand,
            environ=counted_environ(os.environ, self._launch.env),
            queue=hold.queue,
            priority=hold.priority,
            share=hold.share_gpus,
            job_id=self._plan.job_id,
            note=self._say_waiting,
            keep_waiting=lambda: self._requests.stop_before_start is None,
        )

    def _prepare_hosts(self, plan: LaunchPlan) -> LaunchPlan:
        """Makes other hosts ready, if there are any; a request to stop ends it at once."""
        settings = self._settings.hosts
        if settings is None:
            return plan
        self._waits_for = "its hosts"
        from .prepare_hosts import HostPreparation

        hosts = HostPreparation(
            self._launch.placement,
            settings,
            lease_s=plan.lease_s,
            stdin_fd=self._stdin.descriptor,
            note=self._say_waiting,
            warn=self._console.warning,
            check=self._requests.check,
        )
        self._transport = hosts.transport
        with suppress(Interrupted):
            return hosts.prepare(plan, python=sys.executable)
        return plan

    def _with_stdin(self, plan: LaunchPlan) -> LaunchPlan:
        return replace(plan, stdin_rank=None) if self._stdin.is_in_background else plan

    def _why_no_stdin(self, rank: int) -> str:
        taken = self._launch.stdin_taken
        if self._stdin.is_in_background:
            taken = StdinObstacle("dsrun runs in the background of its terminal", "start it in the foreground")
        return why_no_stdin(rank, self._plan.stdin_rank, self._launch.placement, taken=taken)

    def _run(self) -> dict[str, Any]:
        for warning in self._launch.warnings:
            self._console.warning(warning)
        for note in self._launch.notes:
            self._console.note(note)
        self._console.note(opening(self._plan, devices=self._launch.devices, source=self._launch.placement.source))
        facts = FactsWriter(self._folder, self._read_facts)
        monitors = MonitorProcesses(
            self._folder,
            job_id=self._plan.job_id,
            cwd=self._plan.cwd,
            monitors=self._launch.monitors,
            environ={**os.environ, **self._launch.env},
        )
        self._began_s = time.monotonic()
        self._waits_for = "its ranks to start"
        try:
            outcome = self._run_ranks(monitors)
        finally:
            self._console.close()
            monitors.finish(self._console.note)
            for note in monitors.notes():
                self._console.note(note)
            self._tell(facts.finish(_FACTS_PATIENCE_S))
        return self._conclude(outcome)

    def _run_ranks(self, monitors: MonitorProcesses) -> Outcome:
        display = _NotedDisplay(self._console, monitors)
        output = JobOutput(self._plan, self._console, display=display, why_no_stdin=self._why_no_stdin)
        try:
            policies = self._settings.policies
            job = JobRun(
                self._plan,
                self._transport,
                output,
                python=sys.executable,
                policies=policies,
                requests=self._requests,
            )
            return job.run()
        finally:
            output.close()

    def _conclude(self, outcome: Outcome) -> dict[str, Any]:
        """Reports and writes down how the job ended."""
        duration_s = time.monotonic() - self._began_s
        report = None if outcome.report is None else [*outcome.report.render(), *self._hints(outcome.report)]
        if report is not None:
            self._console.report(report)
        for line in conclude_profile(self._folder, self._plan.env, self._plan.ranks):
            self._console.note(line)
        was_stopped = outcome.report is None and outcome.exit_code != 0
        exit_code = self._stops.exit_code(outcome.exit_code) if was_stopped else outcome.exit_code
        waited_for = self._waits_for
        return self._end(
            outcome_json(self._plan, outcome, report, exit_code=exit_code, duration_s=duration_s, waited_for=waited_for)
        )

    def _stopped_early(self, signum: int) -> dict[str, Any]:
        """Ends a job that has no rank yet."""
        return self._end_early("stopped", self._stops.exit_code(128 + signum), None)

    def _end_early(self, how: str, exit_code: int, report: list[str] | None) -> dict[str, Any]:
        duration_s = time.monotonic() - self._began_s
        waited_for = self._waits_for
        return self._end(
            without_ranks(self._plan, how, exit_code, report, duration_s=duration_s, waited_for=waited_for)
        )

    def _say_waiting(self, text: str) -> None:
        """Shows what a job without a rank waits for, and writes it down for who looks from elsewhere."""
        self._console.note(text)
        # Whoever writes the logs says what is wrong with the folder.
        with suppress(OSError):
            append_waiting(self._folder, masker_of(self._plan, os.environ).text(text))

    def _end(self, value: dict[str, Any]) -> dict[str, Any]:
        """Says and writes down the outcome."""
        self._console.note(closing(value))
        try:
            write_outcome(self._folder, value)
        except OSError as error:
            self._tell(f"{self._folder}: the outcome is not written down: {(error.strerror or str(error)).lower()}")
        return value

    def _hints(self, report: FailureReport) -> list[str]:
        """Says so where a script stumbled over an option that was meant for dsrun."""
        if not isinstance(report.cause, RankEnd) or report.cause.status != UsageError.exit_code:
            return []
        request = self._launch.request
        words = () if request.all_are_scripts else request.words[1:]
        misplaced = misplaced_options(words, report.cause.last_lines, options=self._settings.options)
        return [f"hint: `{option}` is an option of dsrun; put it before the script" for option in misplaced]

    def _read_facts(self) -> dict[str, Any]:
        program = self._launch.program
        script = Path(program.target).absolute() if program.kind == "script" else None
        folder = Path(self._launch.cwd) if script is None else script.parent
        return read_facts(script=script, folder=folder, environ=os.environ)

    def _tell(self, problem: str | None, *, prefix: str = "") -> None:
        if problem is not None:
            self._console.note(f"{prefix}{problem}")


def _shown_hosts(plan: LaunchPlan) -> list[str]:
    """Returns the host of each rank, as lines are tagged; ranks that others start have no lines here."""
    return plan.rank_hosts if plan.outside is None else [plan.nodes[0].host.name] * plan.world_size


def _now() -> datetime:
    return datetime.now().astimezone()
