from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsrun.launcher.cli import app
from dsrun.launcher.commands.queue import table
from dsrun.launcher.jobs.queue.leases import ClaimFolder
from dsrun.launcher.jobs.queue.listing import Entry
from dsrun.launcher.jobs.queue.turn import claim_folders, hold_devices
from dsrun.launcher.machine.devices.choice import Demand
from support.nvml import box, made_up_nvml


def queue(state: Path, *args: str) -> Result:
    return CliRunner().invoke(app, ["queue", *args], env={"XDG_STATE_HOME": str(state)})


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A machine where one job holds two GPUs and two wait, the later one with the higher priority."""
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    tickets = ClaimFolder(claim_folders(environ)[1])
    with hold_devices(
        Demand(ranks=2, gpus=2),
        environ=environ,
        queue=False,
        priority=0,
        share=False,
        job_id="first",
        note=print,
        keep_waiting=lambda: False,
        load_nvml=made_up_nvml(*box(3)),
    ):
        for number, (job, priority) in enumerate([("later", 0), ("sooner", 2)]):
            content = {"job_id": job, "pid": 7, "number": number, "priority": priority, "since_s": 5.0}
            tickets.claim(job, content | {"wants": "2 GPUs", "names": ["GPU-0", "GPU-1"]})
        yield tmp_path
        tickets.drop_all()


def test_holders_come_first_and_waiters_in_the_order_of_service(busy: Path) -> None:
    result = queue(busy, "--json")
    jobs = json.loads(result.stdout)["jobs"]
    assert [(job["job_id"], job["state"], job["devices"], job["priority"]) for job in jobs] == [
        ("first", "holds", "GPUs 0, 1", None),
        ("sooner", "waits", "2 GPUs", 2),
        ("later", "waits", "2 GPUs", 0),
    ]
    assert (jobs[0]["names"], jobs[0]["pid"]) == (["GPU-0", "GPU-1"], os.getpid())


def test_the_table_has_a_line_a_job(busy: Path) -> None:
    lines = queue(busy).stdout.splitlines()
    assert lines[0].split() == ["JOB", "PID", "STATE", "SINCE", "PRIORITY", "DEVICES"]
    assert [line.split()[0] for line in lines[1:]] == ["first", "sooner", "later"]


def test_an_empty_queue_is_said_on_stderr(tmp_path: Path) -> None:
    result = queue(tmp_path)
    assert (result.stdout, result.stderr) == ("", "dsrun: no job holds or waits for a device of this machine\n")
    assert json.loads(queue(tmp_path, "--json").stdout) == {"schema_version": 1, "jobs": []}
    assert list(tmp_path.iterdir()) == [], "looking leaves no folder behind"


def test_the_table_reads_as_reviewed() -> None:
    entries = [
        Entry(job_id="20260101-1200-abcd", pid=4, state="holds", since_s=0, priority=None, devices="GPU 0", names=()),
        Entry(job_id="x", pid=4242, state="waits", since_s=90, priority=5, devices="2 GPUs", names=()),
    ]
    assert table(entries, now_s=100) == [
        "JOB                 PID   STATE  SINCE  PRIORITY  DEVICES",
        "20260101-1200-abcd  4     holds  1m               GPU 0",
        "x                   4242  waits  10s    5         2 GPUs",
    ]
