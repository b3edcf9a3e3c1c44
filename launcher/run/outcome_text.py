"""What dsrun says of a job when it begins and when it has ended: a line each for people, an object for programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from dsrun.units import format_duration, format_list

from ..plan.launch_plan import LaunchPlan
from ..session.rank_table import Outcome

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
SCHEMA_VERSION = 1
#: Hosts that the first line names.
_MOST_NAMES = 4


def opening(plan: LaunchPlan, *, devices: str, source: str = "") -> str:
    """Returns the line with which a job begins.

    Args:
        plan: the launch.
        devices: devices that the job trains on, in words; empty where they are not known here.
        source: name of the scheduler's job that gave the hosts, `PBS job 123`; empty where the user named them, or for
            this machine.
    """
    count = len(plan.ranks)
    ranks = f"{count} rank{'s' if count > 1 else ''}"
    if plan.outside is not None:
        ranks += f" of {plan.world_size} (node {plan.outside.node_rank} of {plan.outside.node_count})"
    hosts = plan.nodes[0].host.name if len(plan.nodes) == 1 else f"{len(plan.nodes)} hosts"
    if source:
        hosts += f" of {source}{'' if len(plan.nodes) == 1 else _names(plan)}"
    parts = [f"{ranks} on {hosts}", devices, plan.program.target, f"logs in {short(plan.run_dir)}"]
    return f"job {plan.job_id}: {', '.join(part for part in parts if part)}"


def _names(plan: LaunchPlan) -> str:
    """Names the hosts of a scheduler's job, which the user has not, as far as a line of output has room."""
    return f" ({format_list([node.host.name for node in plan.nodes], _MOST_NAMES)})"


def closing(value: dict[str, Any]) -> str:
    """Returns the line with which a job ends.

    Args:
        value: object that `outcome_json` returned.
    """
    attempts = value["attempts"]
    if value.get("never_ran"):
        return _closing_of_none(value)
    after = f"after {format_duration(value['duration_s'])}{f', {attempts} attempts' if attempts > 1 else ''}"
    logs = f", logs in {short(value['run_dir'])}"
    match value["outcome"]:
        case "done":
            return f"job {value['job_id']}: done {after}"
        case "stopped":
            return f"job {value['job_id']}: stopped {after}{logs}"
        case _:
            return f"job {value['job_id']}: failed {after} with exit code {value['exit_code']}{logs}"


def _closing_of_none(value: dict[str, Any]) -> str:
    """Returns the last line of a job of which no rank has run."""
    waited = f"waited {format_duration(value['duration_s'])} for {value['waited_for']}"
    how = f"job {value['job_id']}: {value['outcome']} before it started ({waited})"
    if value["outcome"] == "stopped":
        return how
    return f"{how} with exit code {value['exit_code']}, logs in {short(value['run_dir'])}"


def outcome_json(
    plan: LaunchPlan,
    outcome: Outcome,
    report: Sequence[str] | None,
    *,
    exit_code: int,
    duration_s: float,
    waited_for: str,
) -> dict[str, Any]:
    """Returns what `--json` prints at the end of a run, and `outcome.json` keeps.

    Args:
        plan: the launch.
        outcome: outcome of the job's ranks.
        report: lines that say why the job failed; None if it did not.
        exit_code: exit code of dsrun.
        duration_s: seconds from the start of the agents to the last rank's end, which is now.
        waited_for: description of what the job waited for at its end; used only if no rank has run.
    """
    how = "done" if outcome.exit_code == 0 else "stopped" if report is None else "failed"
    ranks = [
        {"rank": end.rank, "host": end.host, "pid": end.pid, "status": end.status, "log": end.log}
        for end in outcome.ends
    ]
    value = without_ranks(plan, how, exit_code, report, duration_s=duration_s, waited_for=waited_for)
    if outcome.attempts > 1 or any(end.pid is not None for end in outcome.ends):
        value |= {"never_ran": False, "waited_for": None}
    return value | {"attempts": outcome.attempts, "ranks": ranks}


def without_ranks(
    plan: LaunchPlan, how: str, exit_code: int, report: Sequence[str] | None, *, duration_s: float, waited_for: str
) -> dict[str, Any]:
    """Returns the same for a job of whose ranks nothing is known: they were not started, or their host was not.

    Args:
        plan: the launch.
        how: `stopped` or `failed`.
        exit_code: exit code of dsrun.
        report: lines that say why the job failed; None if it was stopped.
        duration_s: seconds that the job took, up to now.
        waited_for: description in words of what the job waited for.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "job_id": plan.job_id,
        "outcome": how,
        "exit_code": exit_code,
        "attempts": 0,
        "ended": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "duration_s": round(duration_s, 3),
        "never_ran": True,
        "waited_for": waited_for,
        "run_dir": plan.run_dir,
        "failure": None if report is None else list(report),
        "hosts": [node.host.name for node in plan.nodes],
        "ranks": [],
    }


def short(path: str) -> str:
    """Writes the home folder as `~`, which a shell reads back."""
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if home != "/" and path.startswith(f"{home}/") else path
