"""`dsrun queue`: the jobs that hold devices of this machine, and those that wait for some."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

import click

from ..jobs.queue.listing import Entry, list_queue
from ..jobs.text import align, fit_terminal, short_duration


@click.command("queue")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(as_json: bool) -> int:
    """Show the jobs that hold GPUs or slots of this machine, then those that wait, the next first.

    Only your own jobs are listed; GPUs in use by others show in `dsrun run` and `nvidia-smi`.
    """
    entries = list_queue(os.environ)
    now_s = time.time()
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "jobs": [_json(entry) for entry in entries]}))
    elif entries:
        for line in fit_terminal(table(entries, now_s=now_s)):
            click.echo(line)
    else:
        click.echo("dsrun: no job holds or waits for a device of this machine", err=True)
    return 0


def table(entries: Sequence[Entry], *, now_s: float) -> list[str]:
    """Returns the table, columns aligned, without trailing blanks.

    Args:
        entries: entries of the queue, one row each.
        now_s: seconds since the epoch.
    """
    rows = [("JOB", "PID", "STATE", "SINCE", "PRIORITY", "DEVICES")]
    rows += [
        (
            entry.job_id,
            str(entry.pid),
            entry.state,
            short_duration(now_s - entry.since_s),
            "" if entry.priority is None else str(entry.priority),
            entry.devices,
        )
        for entry in entries
    ]
    return align(rows)


def _json(entry: Entry) -> dict[str, Any]:
    return {
        "job_id": entry.job_id,
        "pid": entry.pid,
        "state": entry.state,
        "since_s": entry.since_s,
        "priority": entry.priority,
        "devices": entry.devices,
        "names": list(entry.names),
    }
