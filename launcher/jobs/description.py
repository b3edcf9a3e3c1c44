"""What was written down about a job, as rows of a label and a text; labels may repeat. Reads and draws nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.contract.environment import AS_DEEPSPEED_ENV
from dsrun.units import format_bytes

from ..console.rank_set import format_rank_set
from ..failures.report import describe_status
from .listing import Job
from .text import command_text

#: Label and text.
Row = tuple[str, str]

#: What fits a screen or two.
_MOST_HOSTS = 8


def job_rows(job: Job) -> Iterator[Row]:
    """Yields who started the job, where and when."""
    record = job.record
    yield "command", command_text(job)
    yield "folder", record.cwd
    yield "created", f"{record.created:%Y-%m-%d %H:%M:%S %z} by {record.user} on {record.host}"
    if job.ended is not None:
        yield "ended", f"{job.ended.astimezone(record.created.tzinfo):%Y-%m-%d %H:%M:%S %z}"
    how = "in the background" if record.detached else "in the foreground"
    yield "front end", f"pid {record.front_end.pid}, {how}{', queued' if record.queued else ''}"
    yield "logs", str(job.folder)


def plan_rows(job: Job) -> Iterator[Row]:
    """Yields what was started on which hosts; of a plan of another version, as far as it is understood."""
    # Plans are kept as they were, see `JobRecord.plan`.
    yield from _understood(_rows_of_plan(job), "plan", "job.json")


def _understood(rows: Iterator[Row], label: str, file: str) -> Iterator[Row]:
    """Yields rows up to the first one that is of another form than this version writes, and then where it stands."""
    try:
        yield from rows
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        yield label, f"of another version of dsrun, or damaged; {file} has it"


def _rows_of_plan(job: Job) -> Iterator[Row]:
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


def hardware_rows(probe: dict[str, Any]) -> Iterator[Row]:
    """Yields what the first host has, as far as it is understood.

    Args:
        probe: Report of the host, from `machine.json`.
    """
    yield from _understood(_rows_of_hardware(probe), "hardware", "machine.json")


def _rows_of_hardware(probe: dict[str, Any]) -> Iterator[Row]:
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


def software_rows(probe: dict[str, Any], facts: dict[str, Any]) -> Iterator[Row]:
    """Yields versions, the state of the code and variables, as far as they are understood.

    Args:
        probe: Report of the host, from `machine.json`.
        facts: Contents of `machine.json`.
    """
    yield from _understood(_rows_of_software(probe, facts), "software", "machine.json")


def _rows_of_software(probe: dict[str, Any], facts: dict[str, Any]) -> Iterator[Row]:
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


def end_rows(job: Job) -> Iterator[Row]:
    """Yields how the ranks ended, as far as it is understood; of a job that runs, nothing."""
    yield from _understood(_rows_of_end(job), "end", "outcome.json")


def _rows_of_end(job: Job) -> Iterator[Row]:
    outcome = job.outcome or {}
    if outcome.get("attempts", 0) > 1:
        yield "attempts", str(outcome["attempts"])
    by_status: dict[int | None, list[int]] = {}
    for rank in outcome.get("ranks") or ():
        by_status.setdefault(rank["status"], []).append(rank["rank"])
    for status, ranks in by_status.items():
        how = "not known to have ended" if status is None else describe_status(status).removeprefix("was ")
        yield "ranks", f"{format_rank_set(ranks)}: {how}"
