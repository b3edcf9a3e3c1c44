"""One job's front end, from a checked launch to its outcome: here the parts of a job are put together.

Holds the job's lock and devices, keeps its record, shows its output, and passes on the user's wishes. Reads no options
and exits nothing: see commands/run.py. Runs in the foreground or behind `detach`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun.contract import CONFIG_ENV
from dsrun.errors import DsrunError, UsageError

from .failures import FailureReport, RankEnd
from .job_facts import FactsWriter, read_facts
from .job_folder import link_job
from .job_output import JobOutput
from .job_record import JobLock, copy_config, new_record, write_outcome, write_record
from .job_run import JobRun, Policies
from .outcome_text import closing, opening, outcome_json, without_ranks
from .output import Printer, terminal_printer
from .protocol import StreamName
from .resolve import Launch
from .script_words import misplaced_options
from .stopping import StopRequests
from .tally import Outcome
from .transport.local import LocalTransport

#: What the front end says in the background: notes, the report, and faults of its own.
FRONT_END_LOG = "front_end.log"
#: For what is written down about the machine, once the job has ended.
_FACTS_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a job is run and shown, beside what it is.

    Attributes:
        words: the words after `dsrun`, as they were typed.
        options: names of dsrun's own options, for a script that stumbles over one of them.
        policies: what to do when the job fails or hangs.
        detached: nobody looks: lines of ranks go to their logs only.
        as_json: stdout is kept for one object.
        quiet: no notes.
    """

    words: tuple[str, ...]
    options: frozenset[str]
    policies: Policies
    detached: bool = False
    as_json: bool = False
    quiet: bool = False


class FrontEnd:
    """One job.

    Args:
        launch: what to run.
        settings: how.
        job_id: its id.
        folder: its folder, just made.
    """

    def __init__(self, launch: Launch, settings: RunSettings, *, job_id: str, folder: Path) -> None:
        self._launch = launch
        self._settings = settings
        self._folder = folder
        self._plan = launch.plan(job_id=job_id, run_dir=str(folder))
        self._job: JobRun | None = None
        self._stops = StopRequests(self._request_stop)
        self._printer = terminal_printer(
            hosts=[host.name for host in launch.allocation.hosts for _ in range(host.slots)],
            quiet=settings.quiet,
            stdout_is_data=settings.as_json,
            environ=os.environ,
            on_closed=self._stops.output_closed,
            keep_waiting=self._obey_requests,
        )

    def run(self, ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Runs the job to its end.

        Args:
            ready: called once the job has its record and is on its way.

        Returns:
            the outcome, as `outcome_json` gives it.

        Raises:
            DsrunError: it could not be started, or not be run to its end. Of one that was not started nothing is left.
        """
        with self._stops.catching_signals():
            try:
                lock = JobLock(self._folder)
                self._write_down()
                ready()
            except BaseException:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise
            try:
                return self._run()
            finally:
                lock.release()

    def _write_down(self) -> None:
        config = self._launch.env.get(CONFIG_ENV)
        record = new_record(
            self._plan,
            words=self._settings.words,
            now=datetime.now().astimezone(),
            detached=self._settings.detached,
            queued=False,
            config=config,
            config_digest=copy_config(config, self._folder),
        )
        write_record(self._folder, record)

    def _run(self) -> dict[str, Any]:
        self._tell(link_job(self._folder, os.environ), prefix="`dsrun ps` does not find this job: ")
        for warning in self._launch.warnings:
            self._printer.warning(warning)
        self._printer.note(opening(self._plan, devices=self._launch.devices))
        facts = FactsWriter(self._folder, self._read_facts)
        started_s = time.monotonic()
        try:
            outcome = self._run_ranks()
        except DsrunError as error:
            duration_s = time.monotonic() - started_s
            report = error.render().splitlines()
            write_outcome(
                self._folder, without_ranks(self._plan, "failed", error.exit_code, report, duration_s=duration_s)
            )
            raise
        finally:
            self._tell(facts.finish(_FACTS_PATIENCE_S))
        return self._conclude(outcome, duration_s=time.monotonic() - started_s)

    def _run_ranks(self) -> Outcome:
        output = JobOutput(self._plan, _NotesOnly(self._printer) if self._settings.detached else self._printer)
        try:
            policies = self._settings.policies
            self._job = JobRun(self._plan, LocalTransport(), output, python=sys.executable, policies=policies)
            return self._job.run()
        finally:
            output.close()

    def _conclude(self, outcome: Outcome, *, duration_s: float) -> dict[str, Any]:
        """Reports and writes down how the job ended."""
        report = None if outcome.report is None else [*outcome.report.render(), *self._hints(outcome.report)]
        if report is not None:
            self._printer.report(report)
        was_stopped = outcome.report is None and outcome.exit_code != 0
        exit_code = self._stops.exit_code(outcome.exit_code) if was_stopped else outcome.exit_code
        value = outcome_json(self._plan, outcome, report, exit_code=exit_code, duration_s=duration_s)
        self._printer.note(closing(value))
        try:
            write_outcome(self._folder, value)
        except OSError as error:
            self._tell(f"{self._folder}: the outcome is not written down: {(error.strerror or str(error)).lower()}")
        return value

    def _hints(self, report: FailureReport) -> list[str]:
        """Says so where a script stumbled over an option that was meant for dsrun."""
        if not isinstance(report.cause, RankEnd) or report.cause.status != UsageError.exit_code:
            return []
        words = self._launch.request.words[1:]
        misplaced = misplaced_options(words, report.cause.last_lines, options=self._settings.options)
        return [f"hint: `{option}` is an option of dsrun; put it before the script" for option in misplaced]

    def _read_facts(self) -> dict[str, Any]:
        program = self._launch.program
        script = Path(program.target).absolute() if program.kind == "script" else None
        folder = Path(self._launch.cwd) if script is None else script.parent
        return read_facts(script=script, folder=folder, environ=os.environ)

    def _request_stop(self, signum: int, why: str | None) -> None:
        if self._job is not None:
            self._job.request_stop(signum, why)

    def _obey_requests(self) -> bool:
        return self._job is None or self._job.obey_requests()

    def _tell(self, problem: str | None, *, prefix: str = "") -> None:
        if problem is not None:
            self._printer.note(f"{prefix}{problem}")


class _NotesOnly:
    """A console for a job that nobody looks at: its logs are complete."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Writes dsrun's own talk."""
        self._printer.note(text)
