"""How a preflight looks: one line if all is well, a table of what is not, a JSON object. Only formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dsrun.units import format_duration

from .facts import JobGpu
from .findings import AnsweredHost, Finding, Preflight
from .versions import models_of

_COLOURS = {"green": "32", "amber": "33", "red": "31"}


def summary(preflight: Preflight) -> str:
    """Returns one line: how many hosts, how they are, and how long it took to find out."""
    count = len(preflight.seen)
    hosts = "1 host" if count == 1 else f"{count} hosts"
    took = f"in {format_duration(preflight.seconds)}"
    red = [finding for finding in preflight.findings if finding.verdict == "red"]
    if red:
        concerned = len({name for finding in red for name in finding.hosts})
        problems = "1 problem" if len(red) == 1 else f"{len(red)} problems"
        where = "" if count == 1 else f" on {concerned} of {hosts}"
        return f"preflight: {problems}{where}, {took}"
    is_odd = any(len(finding.hosts) < count for finding in preflight.findings)
    alike = "fit, not all alike" if is_odd else "fit" if preflight.findings or count == 1 else "alike"
    usual = _usual(preflight)
    return f"preflight: {hosts} {alike}{f' ({usual})' if usual else ''} {took}"


def describe(preflight: Preflight, *, colour: bool = False) -> list[str]:
    """Returns the summary, where ranks meet if there was a choice, and a row for each finding with its fix.

    Args:
        preflight: result of a preflight, to be described.
        colour: verdicts are coloured.
    """
    rows = [_row(finding, colour=colour) for finding in _aligned(preflight.findings)]
    chosen = None if preflight.meeting is None else preflight.meeting.text()
    return [summary(preflight), *([] if chosen is None else [chosen]), *(line for row in rows for line in row)]


def preflight_json(preflight: Preflight) -> dict[str, Any]:
    """Returns plain JSON values with the version of their schema first."""
    meeting = preflight.meeting
    return {
        "schema_version": 1,
        "ok": not preflight.is_red,
        "seconds": round(preflight.seconds, 3),
        "meeting": None if meeting is None else asdict(meeting),
        "findings": [asdict(finding) for finding in preflight.findings],
        "hosts": [
            {"name": name, "answered": True, **_host_json(its)}
            if isinstance(its, AnsweredHost)
            else {"name": name, "answered": False, "reason": its.reason, "hint": its.hint}
            for name, its in preflight.seen.items()
        ],
    }


def _host_json(seen: AnsweredHost) -> dict[str, Any]:
    value = asdict(seen)
    facts: dict[str, Any] = value["facts"]
    # A digest of every file helps nobody; findings name those that differ.
    for name in ("code", "memory", "limits", "gpus_unusable", "net_plugin", "net_variables"):
        del facts[name]
    memory, limits, unusable = seen.facts.memory, seen.facts.limits, seen.facts.gpus_unusable
    facts |= {
        "gpus": [_gpu_json(gpu) for gpu in seen.facts.gpus],
        "rdma": [asdict(port) for port in seen.facts.ports],
        "left_out": [f"{one.text}; {one.fix}" for one in seen.facts.left_out],
        "no_gpus_fix": None if unusable is None else unusable.fix,
        "memory_bytes": memory.limit_bytes,
        "shm_bytes": memory.shm_total_bytes,
        "shm_free_bytes": memory.shm_free_bytes,
        "memlock_bytes": None if limits is None else limits.lockable_bytes,
        "nofile": None if limits is None else limits.nofile,
    }
    return value


def _gpu_json(gpu: JobGpu) -> dict[str, Any]:
    its = gpu.gpu
    return {
        "index": None if its is None else its.index,
        "label": gpu.device.label,
        "model": gpu.model,
        "total_bytes": None if its is None else its.memory_total_bytes,
        "free_bytes": None if its is None else its.memory_free_bytes,
        "used_by": gpu.device.used_by,
        "compute_capability": None if its is None else its.compute_capability,
    }


def _usual(preflight: Preflight) -> str:
    """Names what most hosts have: `torch 2.13.0, 8 x NVIDIA H100`."""
    facts = [its.facts for its in preflight.seen.values() if isinstance(its, AnsweredHost)]
    torch = [f"torch {its.versions.torch}" for its in facts if its.versions.torch is not None]
    models = [found for its in facts if (found := models_of(its)) is not None]
    # Of as many the first one, see [Note: the odd one].
    return ", ".join(max(names, key=names.count) for names in (torch, models) if names)


def _aligned(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    width = max((len(finding.name) for finding in findings), default=0)
    return [(finding, width) for finding in findings]


def _row(row: tuple[Finding, int], *, colour: bool) -> list[str]:
    finding, width = row
    word = f"{finding.verdict:<5}"
    shown = f"\x1b[{_COLOURS[finding.verdict]}m{word}\x1b[0m" if colour else word
    first, *more = [*finding.text.splitlines(), f"fix: {finding.fix}"]
    return [f"{shown}  {finding.name:<{width}}  {first}", *(f"{'':5}  {'':{width}}  {line}" for line in more)]
