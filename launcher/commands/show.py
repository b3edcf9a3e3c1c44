"""`dsrun show`: everything that was written down about one job. Only shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.wait_records import to_fields
from dsrun.errors import UsageError

from ..jobs.description import Row, end_rows, hardware_rows, job_rows, plan_rows, software_rows
from ..jobs.facts import SCHEMA_VERSION
from ..jobs.listing import Job, find_job
from ..jobs.progress import doing_now, last_step
from ..jobs.record import read_json
from ..jobs.text import align, job_json, short_duration, state_text, took_s
from ..options.job_argument import job_argument
from ..records.waits import read_waits, waited_for
from ._waits_text import waits_lines

_LABEL_WIDTH = 9
#: What fits a screen or two; `--json` has all.
_MOST_CONFIG_LINES = 24


@click.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the whole plan and probe.")
@click.option("--waits", is_flag=True, help="Show what the ranks wait in, and for whom, in the last steps recorded.")
@job_argument()
def command(as_json: bool, waits: bool, job: str) -> int:
    """Show a job: command, plan, hardware, versions, git state, config, how it ended and why."""
    found = find_job(job, os.environ)
    if waits:
        return _show_waits(found, as_json=as_json)
    facts = read_json(JobPaths(found.folder).machine) or {}
    if facts.get("schema_version") != SCHEMA_VERSION:
        facts = {}
    now = datetime.now().astimezone()
    if as_json:
        body = {
            "schema_version": 1,
            **job_json(found, step=last_step(found.folder), now=now),
            "config": found.record.config,
            "config_digest": found.record.config_digest,
            "plan": found.record.plan,
            "machine": facts,
            "outcome": found.outcome,
        }
        click.echo(json.dumps(body, indent=2))
        return 0
    click.echo("\n\n".join("\n".join(lines) for lines in _sections(found, facts, now) if lines))
    return 0


def _show_waits(job: Job, *, as_json: bool) -> int:
    record = read_waits(job.folder)
    if as_json:
        who = None if record is None else waited_for(record)
        body = {
            "schema_version": 1,
            "id": job.id,
            "waited_for": None if who is None else asdict(who),
            "waits": None if record is None else to_fields(record),
        }
        click.echo(json.dumps(body, indent=2))
    elif record is None:
        meanwhile = f"; until then `dsrun top {job.id}` shows who waits" if job.state.is_live else ""
        raise UsageError(
            f"job {job.id}: its ranks have recorded no waits",
            hint="two or more ranks of `dsrun.initialize` record them every 20 optimizer steps, the first time after "
            f"step 21{meanwhile}",
        )
    else:
        click.echo("\n".join(waits_lines(record)))
    return 0


def _sections(job: Job, facts: dict[str, Any], now: datetime) -> Iterator[list[str]]:
    """Yields what is shown, a section at a time; what was not written down is left out."""
    probe: dict[str, Any] = facts.get("probe") or {}
    yield [f"job {job.id}: {_state(job, now)}", *_table(job_rows(job))]
    yield _titled("plan", plan_rows(job))
    yield _titled("hardware", hardware_rows(probe))
    yield _titled("software", software_rows(probe, facts))
    yield _config_lines(job)
    yield _titled("end", end_rows(job))
    failure: list[str] = (job.outcome or {}).get("failure") or []
    yield failure


def _titled(title: str, rows: Iterable[Row]) -> list[str]:
    lines = _table(rows)
    return [title, *lines] if lines else []


def _table(rows: Iterable[Row]) -> list[str]:
    """Returns rows as indented lines; a label that repeats is shown once."""
    shown: list[Row] = []
    before = ""
    for label, text in rows:
        shown.append(("" if label == before else label, text))
        before = label
    return [f"  {line}" for line in align([(f"{label:<{_LABEL_WIDTH}}", text) for label, text in shown])]


def _state(job: Job, now: datetime) -> str:
    took, step = took_s(job, now), last_step(job.folder)
    if job.state.is_live:
        since = "" if took is None else f" for {short_duration(took)}"
        return f"{job.state.value}{since}, {doing_now(job.folder).text}{'' if step is None else f', step {step}'}"
    if job.outcome is not None and job.never_ran and "waited_for" in job.outcome:
        waited = f", waited {short_duration(job.outcome['duration_s'])} for {job.outcome['waited_for']}"
        return f"{state_text(job)}, exit code {job.exit_code}{waited}"
    after = "" if took is None else f", after {short_duration(took)}"
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    return f"{state_text(job)}{code}{after}{'' if step is None else f', step {step}'}"


def _config_lines(job: Job) -> list[str]:
    """Returns the config as it was when the job was started, as far as it fits a screen."""
    if job.record.config is None:
        return []
    copy = JobPaths(job.folder).config_copy
    try:
        lines = copy.read_text(errors="replace").splitlines()
    except OSError:
        # It was gone when the job was started, or never a file.
        return [f"config {job.record.config}"]
    more = len(lines) - _MOST_CONFIG_LINES
    rest = [f"  ... {more} more lines in {copy}"] if more > 0 else []
    return [f"config {job.record.config}", *(f"  {line}" for line in lines[:_MOST_CONFIG_LINES]), *rest]
