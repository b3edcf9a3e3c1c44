from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.jobs.record import write_json
from support.cli import clean_environment, invoke, start_dsrun
from support.job_records import NOW, leave_job
from support.recorded_runs import a_step, append_records, run_lines, step_line
from support.terminals import Terminal
from support.watched_jobs import JOB_ID, running_job


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of jobs, in a state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dsrun" / "jobs"


@pytest.fixture
def folder(jobs: Path) -> Iterator[Path]:
    """Folder of a job that runs and has taken 60 steps."""
    with running_job(jobs) as folder:
        append_records(folder, run_lines(range(1, 61)))
        yield folder


def terminal(*words: str, state: Path, columns: int = 80, lines: int = 24, **env: str) -> Terminal:
    """`dsrun watch` on a terminal of this size."""
    size = {"COLUMNS": "", "LINES": "", "TERM": "xterm-256color"}
    environ = {**clean_environment(XDG_STATE_HOME=str(state)), **size, **env}
    opened = Terminal("watch", *words, cwd=state, env={name: value for name, value in environ.items() if value})
    opened.resize(columns=columns, lines=lines)
    return opened


def end_well(folder: Path) -> None:
    """Writes down that a job has ended."""
    value = {"schema_version": 1, "job_id": folder.name, "outcome": "done", "exit_code": 0, "attempts": 1}
    value |= {"ended": NOW.isoformat(), "duration_s": 60.0, "run_dir": str(folder), "failure": None, "ranks": []}
    write_json(JobPaths(folder).outcome, value)


def test_without_a_job_there_is_nothing_to_watch(jobs: Path) -> None:
    shown = invoke("watch", "--once")
    assert shown.exit_code == 2
    assert shown.stderr == f"error: there is no job in {jobs}\nhint: `dsrun train.py` starts one\n"


def test_without_a_name_it_is_the_newest_job_that_runs_else_the_newest_one(jobs: Path) -> None:
    leave_job(jobs, "20261122-0000-zzzz", created=NOW.replace(day=22), outcome="done")
    shown = invoke("watch", "--once")
    assert shown.stderr == "dsrun: job 20261122-0000-zzzz: no job runs; the newest one\n"
    with running_job(jobs):
        assert invoke("watch", "--once").stderr == f"dsrun: job {JOB_ID}: the newest job that runs\n"


def test_one_page_is_printed_and_left_where_it_is(folder: Path) -> None:
    shown = invoke("watch", "--once", "last")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{JOB_ID}  running  step 60  ran ")
    assert "\x1b" not in shown.stdout


def test_an_object_is_printed_once(folder: Path) -> None:
    value = json.loads(invoke("watch", "--json", JOB_ID).stdout)
    assert (value["job"]["id"], value["last_step"]["step"]) == (JOB_ID, 60)


def test_a_job_that_has_ended_is_shown_with_its_outcome(jobs: Path) -> None:
    folder = leave_job(jobs, JOB_ID, outcome="failed", exit_code=3)
    append_records(folder, run_lines(range(1, 61)))
    shown = invoke("watch", JOB_ID)
    assert shown.exit_code == 0
    assert f"{JOB_ID} failed  step 60  loss 2.893  lr" in shown.stdout
    assert shown.stderr.startswith(f"dsrun: job {JOB_ID}: failed after 1m 0s with exit code 3, logs in ")


def test_a_pipe_gets_a_line_every_so_often_until_the_job_ends(jobs: Path, tmp_path: Path) -> None:
    env = clean_environment(XDG_STATE_HOME=str(tmp_path))
    with (
        running_job(jobs) as folder,
        start_dsrun("watch", "--every", "0.1s", JOB_ID, cwd=tmp_path, env=env) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert b"no step yet" in process.stdout.readline()
            append_records(folder, [step_line(a_step(1))])
            while b"step 1  loss" not in process.stdout.readline():
                assert process.poll() is None
            end_well(folder)
            out, err = process.communicate(timeout=30)
            assert b"done  step 1" in out.splitlines()[-1]
            assert err == f"dsrun: job {JOB_ID}: done after 1m 0s\n".encode()
            assert process.returncode == 0
        finally:
            process.kill()


def test_ctrl_c_leaves_lines_without_a_word_and_the_job_alone(folder: Path, tmp_path: Path) -> None:
    env = clean_environment(XDG_STATE_HOME=str(tmp_path))
    with start_dsrun("watch", JOB_ID, cwd=tmp_path, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")


def test_a_page_goes_on_with_the_job_and_stays_when_it_ends(folder: Path, tmp_path: Path) -> None:
    with terminal(JOB_ID, state=tmp_path) as screen:
        screen.expect("step 60")
        screen.expect("q leaves, the job goes on")
        append_records(folder, run_lines(range(61, 101), first=False))
        screen.expect("step 100")
        end_well(folder)
        screen.expect("done")
        assert screen.end() == 0
        assert screen.settings_now() == screen.settings
        page, _, rest = screen.text.rpartition(f"{JOB_ID}  done  step 100")
        assert page
        assert rest.endswith(f"dsrun: job {JOB_ID}: done after 1m 0s\n")


def test_q_leaves_a_page_and_l_shows_the_log(folder: Path, tmp_path: Path) -> None:
    with terminal(JOB_ID, state=tmp_path, NO_COLOR="1") as screen:
        screen.expect("q leaves")
        screen.type("l")
        screen.expect("no line in the log yet")
        screen.type("lq")
        screen.expect(f"dsrun: job {JOB_ID}: left; it goes on")
        assert screen.end() == 0
        assert screen.settings_now() == screen.settings
        assert not any(f"\x1b[{colour}m" in screen.raw for colour in (31, 32, 33, 34, 35, 36))


@pytest.mark.parametrize(("end", "code"), [("\x03", 0), ("", 128 + signal.SIGTERM)])
def test_who_is_interrupted_leaves_the_terminal_as_it_was(folder: Path, tmp_path: Path, end: str, code: int) -> None:
    with terminal(JOB_ID, state=tmp_path) as screen:
        screen.expect("q leaves")
        if end:
            screen.type(end)
        else:
            screen.kill(signal.SIGTERM)
        assert screen.end() == code
        assert screen.settings_now() == screen.settings
        assert "Traceback" not in screen.text
        # The first screen is back, and the cursor.
        assert screen.raw.rindex("\x1b[?1049l") > screen.raw.rindex("\x1b[?1049h")
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


def test_a_terminal_that_changes_its_size_is_drawn_anew(folder: Path, tmp_path: Path) -> None:
    with terminal(JOB_ID, state=tmp_path) as screen:
        screen.expect("q leaves")
        screen.resize(columns=140, lines=40)
        screen.expect("tokens/s │")
        screen.type("q")
        assert screen.end() == 0


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_lines(folder: Path, tmp_path: Path, name: str) -> None:
    with terminal(JOB_ID, state=tmp_path, TERM=name) as screen:
        screen.expect(f"{JOB_ID} running  step 60  loss")
        screen.type("\x03")
        assert screen.end() == 0


def test_a_job_whose_plan_is_of_another_version_is_watched(jobs: Path) -> None:
    leave_job(jobs, JOB_ID, outcome="done", plan={"nodes": [{"host": "node1"}]})
    assert invoke("watch", "--once", JOB_ID).stdout.startswith(f"{JOB_ID}  done")


def test_a_time_of_nothing_is_refused() -> None:
    shown = invoke("watch", "--every", "0s")
    assert (shown.exit_code, shown.stderr.splitlines()[0]) == (2, "error: `--every`: expected a time above 0, got `0s`")
