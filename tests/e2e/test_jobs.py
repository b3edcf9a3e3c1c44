"""Jobs that one leaves and finds again: real ones, in the background, seen and ended by other `dsrun` processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cli import Result, clean_environment, run_dsrun, start_dsrun
from support.processes import kill_left, wait_for_end, wait_until_gone

DEADLINE_S = 60.0

#: Each rank says that it is ready, then a line for every file that the test puts down; ends when told to.
TALK = r"""
import os, pathlib, sys, time
rank = os.environ["RANK"]
sys.stdout.write(f"ready {rank}\n")
number = 0
while True:
    number += 1
    said = pathlib.Path(f"say{number}")
    while not said.exists():
        time.sleep(0.02)
    text = said.read_text()
    if text.startswith("exit "):
        sys.exit(int(text.split()[1]))
    sys.stdout.write(f"{text} {rank}\n")
"""


class Jobs:
    """A working folder, and the jobs that are started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = clean_environment(XDG_STATE_HOME=str(folder.parent / "state"), CUDA_VISIBLE_DEVICES="")
        self.ids: list[str] = []

    def run(self, *args: str) -> Result:
        return run_dsrun(*args, cwd=self.folder, env=self.env, timeout_s=DEADLINE_S)

    def ok(self, *args: str) -> str:
        result = self.run(*args)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    def start(self, *args: str) -> str:
        """Starts a job in the background; returns its id."""
        return self.note(self.ok("run", "-d", "--start", "exec", *args))

    def note(self, stdout: str) -> str:
        """Keeps the id that a start has printed, so that nothing is left after the test."""
        job_id = stdout.strip()
        assert re.fullmatch(r"[0-9]{8}-[0-9]{4}-[a-z0-9]{4}", job_id), f"no id of a job: {job_id!r}"
        self.ids.append(job_id)
        return job_id

    def open(self, *args: str) -> subprocess.Popen[bytes]:
        return start_dsrun(*args, cwd=self.folder, env=self.env)

    def say(self, number: int, text: str) -> None:
        """Lets every rank say a line."""
        new = self.folder / f".say{number}"
        new.write_text(text)
        new.rename(self.folder / f"say{number}")

    def listed(self, *args: str) -> dict[str, dict[str, Any]]:
        return {job["id"]: job for job in json.loads(self.ok("ps", "--json", *args))["jobs"]}

    def path(self, job_id: str) -> Path:
        return self.folder.parent / "state" / "dsrun" / "jobs" / job_id

    def front_end(self, job_id: str) -> int:
        return json.loads((self.path(job_id) / "job.json").read_text())["front_end"]["pid"]

    def wait_ready(self, job_id: str, ranks: int = 2) -> None:
        logs = [self.path(job_id) / f"rank{rank}.log" for rank in range(ranks)]
        # A job that has just left the queue has no logs yet.
        until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))


def until(is_so: Callable[[], bool]) -> None:
    """Waits for something that tells nobody when it happens."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "talk.py").write_text(TALK)
    made = Jobs(folder)
    yield made
    for job_id in made.ids:
        kill_left(job_id)


def test_a_job_is_left_found_followed_and_stopped(jobs: Jobs) -> None:
    job_id = jobs.start("-n", "2", "talk.py")
    assert jobs.listed()[job_id]["state"] == "running"
    jobs.wait_ready(job_id)
    with jobs.open("logs", job_id[-4:], "-f") as following:
        assert following.stdout is not None
        assert sorted(following.stdout.readline() for _ in range(2)) == [b"[0] ready 0\n", b"[1] ready 1\n"]
        jobs.say(1, "hello")
        assert sorted(following.stdout.readline() for _ in range(2)) == [b"[0] hello 0\n", b"[1] hello 1\n"]
        stopped = jobs.run("stop", job_id)
        assert stopped.exit_code == 0
        assert stopped.stderr.startswith(f"dsrun: job {job_id}: stopped after ")
        rest, _ = following.communicate(timeout=DEADLINE_S)
        assert rest.startswith(b"dsrun: SIGTERM: stopping 2 ranks (grace 10.0s)")
        assert following.returncode == 0
    assert wait_until_gone(job_id) == []
    job = jobs.listed()[job_id]
    assert (job["state"], job["exit_code"], job["ranks"], job["detached"]) == ("stopped", 143, 2, True)
    assert [path.name for path in jobs.path(job_id).iterdir() if path.stat().st_mode & 0o077] == []


def test_the_id_is_all_that_stands_on_stdout_and_the_launch_was_checked_before(jobs: Jobs) -> None:
    result = jobs.run("run", "-d", "--start", "exec", "talk.py")
    jobs.note(result.stdout)
    (job_id,) = jobs.listed()
    assert result.stdout == f"{job_id}\n"
    assert f"`dsrun logs {job_id} -f` follows the job, `dsrun stop {job_id}` ends it" in result.stderr
    jobs.ok("stop", "--now", job_id)
    refused = jobs.run("-d", "tolk.py")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "error: script tolk.py: no such file\nhint: did you mean `talk.py`?\n"
    assert list(jobs.listed()) == [job_id]


def test_a_job_in_the_background_outlives_the_session_and_the_hangup_of_who_started_it(jobs: Jobs) -> None:
    with jobs.open("run", "-d", "--start", "exec", "talk.py") as starting:
        out, _ = starting.communicate(timeout=DEADLINE_S)
    job_id = jobs.note(out.decode())
    front_end = jobs.front_end(job_id)
    assert os.getsid(front_end) == front_end
    os.kill(front_end, signal.SIGHUP)
    jobs.wait_ready(job_id, ranks=1)
    jobs.say(1, "exit 0")
    assert wait_for_end(front_end, timeout_s=DEADLINE_S)
    assert jobs.listed()[job_id]["state"] == "done"


def test_a_killed_front_end_is_seen_as_crashed_and_nothing_is_left(jobs: Jobs) -> None:
    job_id = jobs.start("-n", "2", "talk.py")
    jobs.wait_ready(job_id)
    os.kill(jobs.front_end(job_id), signal.SIGKILL)
    assert wait_until_gone(job_id, timeout_s=DEADLINE_S) == []
    job = jobs.listed()[job_id]
    assert (job["state"], job["exit_code"], job["ended"]) == ("crashed", None, None)
    assert jobs.run("logs", job_id, "--ranks", "1").stdout.splitlines()[0] == "[1] ready 1"
    attached = jobs.run("attach", job_id)
    assert attached.exit_code == 1
    assert attached.stderr.startswith(f"error: job {job_id}: its front end was killed\nhint: ")
    assert jobs.run("stop", job_id).stderr == f"dsrun: job {job_id}: crashed, nothing of it is left\n"


def test_ctrl_c_leaves_an_attached_job_and_its_end_is_the_exit_code(jobs: Jobs) -> None:
    job_id = jobs.start("-n", "2", "talk.py")
    jobs.wait_ready(job_id)
    for number in (1, 2):
        with jobs.open("attach", "last") as attached:
            assert attached.stdout is not None
            assert attached.stderr is not None
            assert attached.stderr.readline().startswith(
                f"dsrun: job {job_id}: attached, 2 ranks run; Ctrl-C leaves".encode()
            )
            jobs.say(number, f"line {number}")
            expected = [f"[{rank}] line {number} {rank}\n".encode() for rank in (0, 1)]
            assert sorted(attached.stdout.readline() for _ in range(2)) == expected
            if number == 1:
                attached.send_signal(signal.SIGINT)
                _, err = attached.communicate(timeout=DEADLINE_S)
                assert attached.returncode == 130
                assert f"dsrun: job {job_id}: left; it goes on\n".encode() in err
                assert b"Traceback" not in err
                assert jobs.listed()[job_id]["state"] == "running"
            else:
                jobs.say(3, "exit 7")
                _, err = attached.communicate(timeout=DEADLINE_S)
                assert attached.returncode == 7
                assert b"exited with code 7" in err
                assert err.decode().splitlines()[-1].startswith(f"dsrun: job {job_id}: failed after ")
    shown = jobs.ok("show", job_id)
    assert "failed, exit code 7" in shown
    assert "exited with code 7" in shown


def test_two_jobs_in_the_background_are_told_apart_and_stopped_in_one_go(jobs: Jobs) -> None:
    first, second = (jobs.start("talk.py") for _ in range(2))
    for job_id in (first, second):
        jobs.wait_ready(job_id, ranks=1)
    assert {job["state"] for job in jobs.listed().values()} == {"running"}
    refused = jobs.run("rm", first)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"error: job {first} is running\nhint: `dsrun stop {first}` ends it\n",
    )
    stopped = jobs.run("stop", first, second, "--now")
    assert stopped.exit_code == 0
    assert {line.split()[2].rstrip(":") for line in stopped.stderr.splitlines()} == {first, second}
    assert jobs.run("stop", first).stderr == f"dsrun: job {first} had ended already: stopped\n"
    assert jobs.run("rm", first).exit_code == 0
    assert list(jobs.listed()) == [second]
    assert jobs.ok("rm", "--older-than", "0s") == ""
    assert jobs.listed() == {}
    assert not jobs.path(second).exists()


def test_a_job_that_does_not_end_in_time_is_told_and_killed_on_request(jobs: Jobs) -> None:
    (jobs.folder / "deaf.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TALK)
    job_id = jobs.start("--grace", "600s", "deaf.py")
    jobs.wait_ready(job_id, ranks=1)
    late = jobs.run("stop", "--timeout", "0.2s", job_id)
    assert late.exit_code == 1
    assert late.stderr == (
        f"error: job {job_id} has not ended within 0.2s\nhint: `dsrun stop --now {job_id}` kills its ranks\n"
    )
    assert jobs.run("stop", "--now", job_id).exit_code == 0
    assert wait_until_gone(job_id) == []


@pytest.fixture
def one_core() -> Iterator[None]:
    """What is started here has one core: one slot for jobs on the CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_asking_twice_to_stop_does_not_kill_ranks_that_save(jobs: Jobs) -> None:
    (jobs.folder / "save.py").write_text(
        "import pathlib, signal, time\n"
        "def on_term(signum, frame):\n"
        "    print('saving', flush=True)\n"
        "    while not pathlib.Path('saved').exists():\n"
        "        time.sleep(0.02)\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, on_term)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(1)\n"
    )
    job_id = jobs.start("-n", "1", "--grace", "60s", "save.py")
    jobs.wait_ready(job_id, ranks=1)
    with jobs.open("stop", job_id) as first, jobs.open("stop", job_id) as second:
        until(lambda: "saving" in (jobs.path(job_id) / "rank0.log").read_text())
        third = jobs.run("stop", "--timeout", "1s", job_id)
        assert third.stderr.startswith(f"error: job {job_id} has not ended within 1s\n")
        (jobs.folder / "saved").touch()
        for stopping in (first, second):
            _, err = stopping.communicate(timeout=DEADLINE_S)
            assert err.decode().startswith(f"dsrun: job {job_id}: stopped after ")
    assert json.loads(jobs.ok("show", "--json", job_id))["outcome"]["ranks"][0]["status"] == 0


@pytest.mark.usefixtures("one_core")
def test_a_job_waits_its_turn_in_the_queue_and_can_be_stopped_there(jobs: Jobs) -> None:
    first = jobs.start("talk.py")
    waiting, leaving = (jobs.start("--queue", "talk.py") for _ in range(2))
    states = {job_id: job["state"] for job_id, job in jobs.listed().items()}
    assert states == {first: "running", waiting: "queued", leaving: "queued"}
    stopped = jobs.run("stop", leaving)
    told = rf"dsrun: job {leaving}: stopped before it started \(waited [0-9.]+ ?m?s for its devices\)\n"
    assert re.fullmatch(told, stopped.stderr), stopped.stderr
    left = jobs.listed()[leaving]
    assert (left["state"], left["never_ran"], left["exit_code"], left["duration_s"]) == ("stopped", True, 143, None)
    assert jobs.listed()[waiting]["state"] == "queued"
    with jobs.open("attach", waiting) as attached:
        assert attached.stderr is not None
        first_line = attached.stderr.readline().decode()
        jobs.ok("stop", "--now", first)
        jobs.wait_ready(waiting, ranks=1)
        assert jobs.listed()[waiting]["state"] == "running"
        jobs.say(1, "exit 0")
        out, err = attached.communicate(timeout=DEADLINE_S)
    waits = f"attached, waiting for 1 slot: slot-0 is held by job {first} (pid "
    assert first_line.startswith(f"dsrun: job {waiting}: {waits}"), first_line
    assert (attached.returncode, out) == (0, b"[0] ready 0\n")
    assert f"dsrun: job {waiting}: 1 rank runs" in err.decode()


def test_a_job_runs_again_with_its_words_and_says_what_changed(jobs: Jobs, tmp_path: Path) -> None:
    script = jobs.folder / "once.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], os.environ['API_KEY'] == 'very-secret-value')\n")
    (jobs.folder / "ds.json").write_text('{"train_batch_size": 4}')
    words = ("--start", "exec", "--env", "API_KEY=very-secret-value", "once.py", "a b", "--config", "ds.json")
    jobs.env["LAB_DATA"] = "where-the-data-is"
    assert jobs.ok(*words) == "[0] ['a b'] True\n"
    del jobs.env["LAB_DATA"]
    (job_id,) = jobs.listed()
    for path in jobs.path(job_id).iterdir():
        assert b"very-secret-value" not in path.read_bytes(), path
        assert b"where-the-data-is" not in path.read_bytes(), path
    script.write_text(script.read_text() + "# changed\n")
    (jobs.folder / "ds.json").write_text('{"train_batch_size": 8}')
    refused = jobs.run("rerun", job_id)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"error: job {job_id}: the value of `--env API_KEY` was not recorded, for it is a secret\n"
        "hint: set API_KEY in the environment\n",
    )
    jobs.env |= {"API_KEY": "very-secret-value", "NCCL_DEBUG": "INFO"}
    again = run_dsrun("rerun", job_id, cwd=tmp_path, env=jobs.env, timeout_s=DEADLINE_S)
    assert (again.exit_code, again.stdout) == (0, "[0] ['a b'] True\n")
    told = [line.removeprefix("dsrun: changed since: ") for line in again.stderr.splitlines() if "changed" in line]
    assert [line.partition(":")[0] for line in told] == [
        "script digest",
        "variable NCCL_DEBUG",
        "variables that are not set any more",
        f"config {jobs.folder / 'ds.json'}",
    ]
    assert "not set any more: LAB_DATA; set them first" in again.stderr
    assert len(jobs.listed()) == 2
    plan = json.loads(jobs.ok("show", "last", "--json"))["plan"]
    assert (plan["cwd"], plan["program"]["args"], plan["env"]["API_KEY"]) == (str(jobs.folder), ["a b"], "***")


def test_a_job_with_a_folder_of_its_own_is_found_too(jobs: Jobs) -> None:
    job_id = jobs.start("--log-dir", "mine", "talk.py")
    jobs.wait_ready(job_id, ranks=1)
    assert jobs.listed()[job_id]["folder"] == str(jobs.folder / "mine" / job_id)
    jobs.ok("stop", "--now", job_id)
    jobs.ok("rm", job_id)
    assert jobs.listed() == {}
    assert list((jobs.folder / "mine").iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_one_line(jobs: Jobs) -> None:
    state = Path(jobs.env["XDG_STATE_HOME"])
    state.write_text("")
    for args in (["-d", "talk.py"], ["talk.py"]):
        result = jobs.run(*args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (
            f"error: log folder {state}/dsrun/jobs: cannot be made: not a directory\n"
            "hint: name another with `--log-dir DIR`\n"
        )
    (jobs.folder / "once.py").write_text("print('ran')\n")
    elsewhere = jobs.run("--log-dir", "mine", "--start", "exec", "once.py")
    assert (elsewhere.exit_code, elsewhere.stdout) == (0, "[0] ran\n")
    assert f"dsrun: `dsrun ps` does not find this job: {state}" in elsewhere.stderr


def test_without_a_home_jobs_are_where_xdg_says(jobs: Jobs) -> None:
    del jobs.env["HOME"]
    job_id = jobs.start("talk.py")
    jobs.wait_ready(job_id, ranks=1)
    jobs.say(1, "exit 0")
    assert wait_for_end(jobs.front_end(job_id), timeout_s=DEADLINE_S)
    assert jobs.listed()[job_id]["state"] == "done"
