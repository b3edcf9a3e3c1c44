"""What a dead agent left behind is found by its environment and ended; nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsrun.launcher.agent.leftovers import sweep_command
from dsrun.launcher.agent.start.cgroup_scope import make_scope, scope_name
from dsrun.launcher.isolated_command import isolated_command
from dsrun.launcher.protocol import FrameReader, Message, Output, Start, encode
from support.jobs import script_plan
from support.processes import kill_left, wait_for_end, wait_until_gone

pytestmark = pytest.mark.timeout(120)


def sweep(job_id: str, nonce: str | None = None) -> dict[str, Any]:
    run = subprocess.run(
        sweep_command(sys.executable, job_id, nonce), capture_output=True, text=True, check=True, timeout=100
    )
    assert run.stderr == ""
    return json.loads(run.stdout)


@contextmanager
def sleeper(source: str = "", **environment: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that is nobody's child but this test's."""
    code = source + "\nprint('ready', flush=True)\nimport time\ntime.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def environment_of(job_id: str, nonce: str) -> dict[str, str]:
    return {"DSRUN_JOB_ID": job_id, "DSRUN_NONCE": nonce}


def test_only_processes_with_the_jobs_id_and_nonce_are_ended() -> None:
    job_id = f"test-sweep-{os.getpid()}"
    with (
        sleeper(**environment_of(job_id, "ours")) as ours,
        sleeper(**environment_of(job_id, "of another attempt")) as other_attempt,
        sleeper(**environment_of(job_id + "0", "ours")) as other_job,
        sleeper() as nobodys,
    ):
        name = psutil.Process(ours.pid).name()
        assert sweep(job_id, "ours") == {"agents": [], "ended": [{"pid": ours.pid, "name": name}], "left": []}
        assert ours.wait(10) == -signal.SIGTERM
        assert [process.poll() for process in (other_attempt, other_job, nobodys)] == [None, None, None]
        assert [entry["pid"] for entry in sweep(job_id)["ended"]] == [other_attempt.pid]
        assert [process.poll() for process in (other_job, nobodys)] == [None, None]
        assert sweep(job_id) == {"agents": [], "ended": [], "left": []}


def test_what_ignores_the_request_is_killed() -> None:
    job_id = f"test-sweep-{os.getpid()}"
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with sleeper(ignoring, **environment_of(job_id, "n")) as process:
        assert [entry["pid"] for entry in sweep(job_id, "n")["ended"]] == [process.pid]
        assert process.wait(10) == -signal.SIGKILL


def test_the_nonce_is_in_no_command_line() -> None:
    assert not any("secret" in word for word in sweep_command("python", "j1", "secret"))


def test_a_sweep_from_within_the_job_does_not_end_whoever_asked_for_it() -> None:
    job_id = f"test-sweep-{os.getpid()}"
    environment = {**os.environ, **environment_of(job_id, "n")}
    run = subprocess.run(
        sweep_command(sys.executable, job_id, "n"), env=environment, capture_output=True, text=True, timeout=100
    )
    assert (run.returncode, json.loads(run.stdout)) == (0, {"agents": [], "ended": [], "left": []})


def test_a_process_that_wrote_over_its_environment_is_found_by_the_jobs_control_group() -> None:
    job_id = f"test-sweep-{os.getpid()}"
    scope = make_scope(scope_name(job_id, 0))
    if scope is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    with sleeper() as process:
        assert scope.add(process.pid)
        assert [entry["pid"] for entry in sweep(job_id)["ended"]] == [process.pid]
        assert process.wait(10) == -signal.SIGTERM
    assert not scope.folder.exists()


#: A child that has no parent-death signal and left the rank's session, and has children in turn. Its word is one write:
#: ranks' standard streams are unbuffered, and a second write after the agent's death would end it.
CHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
os.write(1, b"child" + os.linesep.encode())
time.sleep(1000)
"""
WITH_CHILD = f"""
import subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
threading.Event().wait()
"""


def own_folders(job_id: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"dsrun-{job_id}-*"))


@contextmanager
def running_agent(folder: Path) -> Generator[tuple[str, str, subprocess.Popen[bytes]]]:
    plan = script_plan(folder, WITH_CHILD)
    with subprocess.Popen(
        isolated_command(sys.executable, "dsrun.launcher.agent.main", plan.job_id),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as agent:
        try:
            assert agent.stdin is not None
            agent.stdin.write(encode(Start(plan=plan.to_json(), node_rank=0)))
            assert agent.stdout is not None
            messages: list[Message] = []
            reader = FrameReader()
            while "".join(m.text for m in messages if isinstance(m, Output)).count("child") < 2:
                messages += reader.feed(agent.stdout.read(1 << 16))
            yield plan.job_id, plan.nonce, agent
        finally:
            kill_left(plan.job_id)


def test_agent_and_spawner_killed_at_one_moment_leave_nothing_that_a_sweep_does_not_end(tmp_path: Path) -> None:
    with running_agent(tmp_path) as (job_id, nonce, agent):
        (spawner,) = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        assert len(own_folders(job_id)) == 1, "the agent was given no mark of the front end's folder"
        # Stopped first, so that neither sees the other die.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (agent.pid, int(spawner)):
                os.kill(pid, signum)
        assert agent.wait(10) == -signal.SIGKILL
        assert wait_for_end(int(spawner), timeout_s=10)
        swept = sweep(job_id, nonce)
        # Two children and theirs; the ranks may have died of their parent's death just before.
        assert len(swept["ended"]) >= 4
        assert swept["left"] == []
        assert wait_until_gone(job_id) == []
        assert own_folders(job_id) == []


def test_an_agent_of_an_older_dsrun_is_known_by_the_name_that_it_had_there() -> None:
    old = "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from dsrun.launcher.agent import main; main()"
    stand_in = "import sys\nsys.stdin.read()\n"
    # Python runs what follows `-c`; what is behind it stands in the command line as an agent's own would.
    command = [sys.executable, "-c", stand_in, "-c", old, "an-old-job"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        try:
            assert sweep("an-old-job") == {"agents": [agent.pid], "ended": [], "left": []}
        finally:
            agent.stdin.close()


def test_a_job_whose_agent_lives_is_left_to_it(tmp_path: Path) -> None:
    with running_agent(tmp_path) as (job_id, nonce, agent):
        assert sweep(job_id, nonce) == {"agents": [agent.pid], "ended": [], "left": []}
        assert agent.poll() is None
        assert agent.stdin is not None
        agent.stdin.close()
        assert agent.wait(30) == 0
        assert wait_until_gone(job_id) == []
