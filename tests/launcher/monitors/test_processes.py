"""Trackers beside a job are processes of their own: nothing that happens to one is the job's concern."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.monitor_records import MONITORS_EVENT, MonitorSettings, monitors_fields
from dsrun.launcher.monitors.processes import MonitorProcesses
from dsrun.launcher.monitors.state import StateFile, read_settings
from support.recorded_runs import append_records, run_lines
from support.trackers import KINDS, settings, steps

DEADLINE_S = 30.0


def beside(
    folder: Path, monitors: Sequence[MonitorSettings], *, patience_s: float = DEADLINE_S, **variables: str
) -> MonitorProcesses:
    return MonitorProcesses(
        folder,
        job_id="j1",
        cwd=str(folder),
        monitors=monitors,
        environ={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        trackers=KINDS,
        patience_s=patience_s,
    )


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come to that"
        time.sleep(0.02)


def children() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "monitors.main" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_a_tracker_has_all_steps_when_the_job_has_ended(tmp_path: Path) -> None:
    monitors = beside(tmp_path, [settings(tmp_path / "given")])
    append_records(tmp_path, run_lines(range(1, 31)))
    monitors.finish()
    assert steps(tmp_path / "given") == [*range(1, 31)]
    assert [*monitors.notes()] == ["monitor made_up: the package's own defaults"]
    assert children() == []


def test_a_tracker_that_blocks_for_ever_is_ended_and_told(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    monitors = beside(tmp_path, [settings(tmp_path / "given", blocks=True)], patience_s=3.0)
    began_s = time.monotonic()
    said: list[str] = []
    monitors.finish(said.append)
    assert said == ["waiting for made_up to take the last steps, 3 s at most"]
    assert time.monotonic() - began_s < 6.0
    assert [*monitors.notes()][-1] == (
        "monitor made_up: it has none of the steps; `dsrun export j1 --to made_up` sends the rest"
    )
    assert children() == []


def test_a_tracker_that_is_down_is_told_once_without_its_secret(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    (tmp_path / "down").touch()
    monitors = beside(tmp_path, [settings(tmp_path / "given", raises=str(tmp_path / "down"))], patience_s=4.0)
    monitors.finish()
    told = [line for line in monitors.notes() if "tried again" in line]
    assert len(told) == 1
    # Or the rest would go to where the section sends it by default.
    assert read_settings(tmp_path, "made_up") == settings(tmp_path / "given", raises=str(tmp_path / "down"))
    assert "ConnectionError: the server at https://ada:***@tracker/ is down" in told[0]


def test_what_a_package_prints_is_in_its_log_without_the_key(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    key = "0123456789abcdef0123"
    told = settings(tmp_path / "given", prints=f"POST /v1?k with {key}\nand no end")
    monitors = beside(tmp_path, [told], MADE_UP_API_KEY=key)
    monitors.finish()
    assert JobPaths(tmp_path).monitor_log("made_up").read_text() == "POST /v1?k with ***\nand no end\n"


def test_a_process_that_ends_at_once_leaves_its_reason_in_the_log(tmp_path: Path) -> None:
    append_records(tmp_path, run_lines(range(1, 4)))
    monitors = beside(tmp_path, [settings(tmp_path / "given", exits="out of memory, says the package")])
    until(lambda: any("exit code 3" in line for line in monitors.notes()))
    monitors.finish()
    assert "out of memory, says the package\n" in JobPaths(tmp_path).monitor_log("made_up").read_text()


def test_a_monitor_that_is_killed_is_started_again_and_goes_on_and_each_time_is_told(tmp_path: Path) -> None:
    told = settings(tmp_path / "given")
    monitors = beside(tmp_path, [told])
    for last in (3, 6, 9):
        append_records(tmp_path, run_lines(range(last - 2, last + 1), first=False))
        until(lambda last=last: StateFile(tmp_path, told).read().step == last)
        if last < 9:
            (process,) = children()
            process.kill()
            until(lambda pid=process.pid: [each.pid for each in children()] not in ([], [pid]))
    monitors.finish()
    assert steps(tmp_path / "given") == [*range(1, 10)]
    assert len([line for line in monitors.notes() if "signal 9" in line and "started again" in line]) == 2


def test_what_a_scheduler_sends_to_every_process_ends_no_monitor(tmp_path: Path) -> None:
    told = settings(tmp_path / "given")
    append_records(tmp_path, run_lines(range(1, 4)))
    monitors = beside(tmp_path, [told])
    until(lambda: StateFile(tmp_path, told).read().step == 3)
    (process,) = children()
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        process.send_signal(signum)
    append_records(tmp_path, run_lines(range(4, 7), first=False))
    monitors.finish()
    assert steps(tmp_path / "given") == [1, 2, 3, 4, 5, 6]
    assert not any("ended with" in line for line in monitors.notes())


def test_the_config_of_a_program_gets_its_trackers_by_the_records(tmp_path: Path) -> None:
    monitors = beside(tmp_path, [])
    record = {"event": MONITORS_EVENT, "time": 1.0, **monitors_fields([settings(tmp_path / "given")])}
    append_records(tmp_path, [record, *run_lines(range(1, 4))])
    until(lambda: steps(tmp_path / "given") == [1, 2, 3])
    monitors.finish()


def test_a_tracker_whose_secret_a_program_knows_alone_is_not_started(tmp_path: Path) -> None:
    monitors = beside(tmp_path, [])
    fields = monitors_fields([settings(tmp_path / "given", api_key="hunter2hunter2")])
    assert "hunter2" not in str(fields)
    append_records(tmp_path, [{"event": MONITORS_EVENT, "time": 1.0, **fields}, *run_lines(range(1, 4))])
    monitors.finish()
    assert [*monitors.notes()] == [
        "monitor made_up is not started: `made_up.api_key` holds a secret, which is written down nowhere"
    ]
    assert not (tmp_path / "given").exists()


def test_no_monitor_outlives_a_front_end_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "sys.path[:0] = [path for path in sys.argv[2].split(os.pathsep) if path]\n"
        "from dsrun.launcher.monitors.processes import MonitorProcesses\nfrom support.trackers import KINDS, settings\n"
        "folder = Path(sys.argv[1])\n"
        "m = MonitorProcesses(folder, job_id='j', cwd=str(folder), monitors=[settings(folder / 'given', blocks=True)],"
        " environ={**os.environ, 'PYTHONPATH': sys.argv[2]}, trackers=KINDS)\ntime.sleep(60)\n"
    )
    append_records(tmp_path, run_lines(range(1, 4)))
    front_end = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), os.pathsep.join(sys.path)])
    try:
        until(lambda: len(psutil.Process(front_end.pid).children()) == 1)
        (monitor,) = psutil.Process(front_end.pid).children()
    finally:
        front_end.send_signal(signal.SIGKILL)
        front_end.wait()
    until(lambda: not monitor.is_running() or monitor.status() == psutil.STATUS_ZOMBIE)
