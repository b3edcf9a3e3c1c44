"""`dsrun show`: everything that was written down about one job. Only shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from dsrun.units import format_bytes

from ..job_facts import MACHINE_FILE
from ..job_list import Job, find_job
from ..job_progress import last_step
from ..job_record import CONFIG_COPY, read_json
from ..job_text import align, command_text, job_json, short_duration, took_s
from ..job_words import job_argument

Row = tuple[str, str]


@click.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the whole plan and probe.")
@job_argument()
def command(as_json: bool, job: str) -> int:
    """Show a job: command, plan, versions, git state, config, how it ended and why."""
    found = find_job(job, os.environ)
    facts = read_json(found.folder / MACHINE_FILE) or {}
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
    rows = [*_job_rows(found, now), *_plan_rows(found), *_machine_rows(facts)]
    click.echo("\n".join(align(rows)))
    failure: list[str] = (found.outcome or {}).get("failure") or []
    if failure:
        click.echo("\n" + "\n".join(failure))
    return 0


def _job_rows(job: Job, now: datetime) -> Iterator[Row]:
    record = job.record
    yield "job", job.id
    state = job.state.value if job.exit_code is None else f"{job.state.value}, exit code {job.exit_code}"
    took = took_s(job, now)
    yield (
        "state",
        state if took is None else f"{state}, {'for' if job.state.is_live else 'after'} {short_duration(took)}",
    )
    step = last_step(job.folder)
    if step is not None:
        yield "step", str(step)
    attempts: int = (job.outcome or {}).get("attempts", 1)
    if attempts > 1:
        yield "attempts", str(attempts)
    yield "command", command_text(job)
    yield "folder", record.cwd
    yield "created", f"{record.created:%Y-%m-%d %H:%M:%S %z} by {record.user} on {record.host}"
    how = "in the background" if record.detached else "in the foreground"
    yield "front end", f"pid {record.front_end.pid}, {how}{', queued' if record.queued else ''}"
    yield "logs", str(job.folder)


def _plan_rows(job: Job) -> Iterator[Row]:
    record, plan = job.record, job.record.plan
    hosts = ", ".join(record.hosts)
    yield "ranks", f"{record.ranks} on {hosts}"
    yield "start", f"{plan.get('start', '?')}, grace {plan.get('grace_s', 0):g}s"
    variables: dict[str, str] = plan.get("env") or {}
    for position, (name, value) in enumerate(sorted(variables.items())):
        yield "" if position else "variables", f"{name}={value}"
    if record.config is not None:
        copy = job.folder / CONFIG_COPY
        yield "config", f"{record.config}{f', as it was: {copy}' if copy.exists() else ''}"


def _machine_rows(facts: dict[str, Any]) -> Iterator[Row]:
    probe: dict[str, Any] = facts.get("probe") or {}
    versions: dict[str, Any] = probe.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("dsrun", "python", "torch", "cuda", "nccl") if versions.get(name)]
    if probe.get("driver"):
        named.append(f"driver {probe['driver']}")
    if named:
        yield "versions", ", ".join(named)
    usable = [gpu for gpu in probe.get("gpus", ()) if gpu.get("usable")]
    for position, gpu in enumerate(usable):
        size = gpu.get("memory_total_bytes")
        yield "" if position else "gpus", f"{gpu['index']} {gpu['name']}{f', {format_bytes(size)}' if size else ''}"
    git: dict[str, Any] | None = facts.get("git")
    if git is not None:
        changed = {True: ", with changed files", False: ""}.get(git.get("dirty", ""), ", changes unknown")
        yield "git", f"{git['commit']}{changed}"
