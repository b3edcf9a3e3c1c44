"""`dsrun show`: everything that was written down about one job. Only shows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.wait_records import to_fields
from dsrun.errors import UsageError
from dsrun.units import format_bytes

from ..console.rank_set import format_rank_set
from ..failures.report import describe_status
from ..jobs.facts import SCHEMA_VERSION
from ..jobs.listing import Job, find_job
from ..jobs.progress import doing_now, last_step
from ..jobs.record import read_json
from ..jobs.text import align, command_text, job_json, short_duration, state_text, took_s
from ..options.job_argument import job_argument
from ..records.waits import read_waits, waited_for
from ._waits_text import waits_lines

Row = tuple[str, str]

_LABEL_WIDTH = 9
#: What fits a screen or two; `--json` has all.
_MOST_CONFIG_LINES, _MOST_HOSTS = 24, 8


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
    yield [f"job {job.id}: {_state(job, now)}", *_table(_job_rows(job))]
    yield _titled("plan", _plan_rows(job))
    yield _titled("hardware", _hardware_rows(probe))
    yield _titled("software", _software_rows(probe, facts))
    yield _config_lines(job)
    yield _titled("end", _end_rows(job))
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


def _job_rows(job: Job) -> Iterator[Row]:
    record = job.record
    yield "command", command_text(job)
    yield "folder", record.cwd
    yield "created", f"{record.created:%Y-%m-%d %H:%M:%S %z} by {record.user} on {record.host}"
    if job.ended is not None:
        yield "ended", f"{job.ended.astimezone(record.created.tzinfo):%Y-%m-%d %H:%M:%S %z}"
    how = "in the background" if record.detached else "in the foreground"
    yield "front end", f"pid {record.front_end.pid}, {how}{', queued' if record.queued else ''}"
    yield "logs", str(job.folder)


def _plan_rows(job: Job) -> Iterator[Row]:
    record, plan = job.record, job.record.plan
    program: dict[str, Any] = plan.get("program") or {}
    if program:
        python = "" if program["kind"] == "command" else f", {program['python']}"
        yield "program", f"{program['kind']} {program['target']}{python}"
    nodes: list[dict[str, Any]] = plan.get("nodes") or []
    if not nodes:
        yield "ranks", f"{record.ranks} on {', '.join(record.hosts)}"
    for node in nodes[:_MOST_HOSTS]:
        workers: list[dict[str, Any]] = node["workers"]
        ranks = format_rank_set(worker["rank"] for worker in workers)
        devices = ", ".join(f"{name}={value}" for name, value in sorted(workers[0]["env"].items()))
        yield "ranks", f"{ranks} on {node['host']['name']}{f', {devices}' if devices else ''}"
    if len(nodes) > _MOST_HOSTS:
        yield "ranks", f"and {len(nodes) - _MOST_HOSTS} more hosts"
    if record.transport != "local":
        yield "reached", f"by {record.transport}"
    if plan:
        yield "start", f"{plan.get('start', '?')}, cores {plan.get('bind', '?')}, grace {plan.get('grace_s', 0):g}s"
    if plan.get("max_restarts"):
        yield "restarts", f"at most {plan['max_restarts']}"
    variables: dict[str, str] = plan.get("env") or {}
    if AS_DEEPSPEED_ENV in variables:
        yield "deepspeed", f"is dsrun (as {variables[AS_DEEPSPEED_ENV]})"
    for name, value in sorted(variables.items()):
        yield "variables", f"{name}={value}"


def _hardware_rows(probe: dict[str, Any]) -> Iterator[Row]:
    if host := probe.get("host"):
        container = f", in {host['container']}" if host.get("container") else ""
        yield "host", f"{host['name']}, {host['os']}, kernel {host['kernel']}{container}"
    if cpu := probe.get("cpu"):
        yield "cpu", f"{cpu['model']}, {cpu['cores_usable']} of {cpu['cores_present']} cores usable"
    if memory := probe.get("memory"):
        yield "memory", f"{format_bytes(memory['usable_bytes'])} usable of {format_bytes(memory['total_bytes'])}"
    gpus: list[dict[str, Any]] = [gpu for gpu in probe.get("gpus") or () if gpu.get("usable")]
    for gpu in gpus:
        size = gpu.get("memory_total_bytes")
        yield "gpus", f"{gpu['index']} {gpu['name']}{f', {format_bytes(size)}' if size else ''}"
    if "gpus" in probe and not gpus:
        yield "gpus", "none"
    if disk := probe.get("disk"):
        free, total = format_bytes(disk["free_bytes"]), format_bytes(disk["total_bytes"])
        yield "disk", f"{free} free of {total}, {disk['filesystem']}, {disk['path']}"


def _software_rows(probe: dict[str, Any], facts: dict[str, Any]) -> Iterator[Row]:
    versions: dict[str, Any] = probe.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("dsrun", "python", "torch", "cuda", "nccl") if versions.get(name)]
    if probe.get("driver"):
        named.append(f"driver {probe['driver']}")
    if named:
        yield "versions", ", ".join(named)
    git: dict[str, Any] | None = facts.get("git")
    if git is not None:
        changed = {True: ", with changed files", False: ""}.get(git.get("dirty", ""), ", changes unknown")
        yield "git", f"{git['commit']}{changed}"
    elif "git" in facts:
        yield "git", "no commit"
    if facts.get("script_digest"):
        yield "script", f"sha256 {facts['script_digest']}"
    environment: dict[str, str] = facts.get("environment") or {}
    for name, value in sorted(environment.items()):
        yield "inherited", f"{name}={value}"


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


def _end_rows(job: Job) -> Iterator[Row]:
    outcome = job.outcome or {}
    if outcome.get("attempts", 0) > 1:
        yield "attempts", str(outcome["attempts"])
    by_status: dict[int | None, list[int]] = {}
    for rank in outcome.get("ranks") or ():
        by_status.setdefault(rank["status"], []).append(rank["rank"])
    for status, ranks in by_status.items():
        how = "not known to have ended" if status is None else describe_status(status).removeprefix("was ")
        yield "ranks", f"{format_rank_set(ranks)}: {how}"
