"""A script gets the words behind it as python would give them, a lone `--` too, whichever way its ranks are started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsrun.contract.environment import RankInfo
from dsrun.launcher.plan.launch_plan import LaunchPlan
from support.cli import clean_environment, invoke, run_dsrun

pytestmark = pytest.mark.timeout(60)
SHOW = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
#: Typed behind the script, and what it is given.
WORDS = ["a", "--", "--config", "mine.yaml", "--", "b", "--"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


def environment(folder: Path, more: Mapping[str, str] = {}) -> dict[str, str]:
    return clean_environment(XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="") | dict(more)


def given(folder: Path, *typed: str, more: Mapping[str, str] = {}) -> list[str]:
    """What the script got, wherever its line came out."""
    done = run_dsrun(*typed, cwd=folder, env=environment(folder, more))
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line[line.index("[", 1) :] if line.startswith("[0] ") else line)


def test_python_gives_a_script_every_word(folder: Path) -> None:
    done = subprocess.run([sys.executable, "show.py", *WORDS], cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == WORDS


def test_ranks_here_get_every_word(folder: Path) -> None:
    assert given(folder, "--start", "fork", "show.py", *WORDS) == WORDS


def test_a_double_dash_before_the_script_ends_dsruns_own_options_and_is_dropped(folder: Path) -> None:
    assert given(folder, "--start", "exec", "--", "show.py", "--config", "mine.yaml", "-n", "2") == (
        ["--config", "mine.yaml", "-n", "2"]
    )


def test_a_rank_that_another_launcher_started_gets_every_word(folder: Path) -> None:
    torchrun = RankInfo(rank=0, world_size=2, master_port=1).to_env() | {"TORCHELASTIC_RUN_ID": "none"}
    assert given(folder, "-q", "show.py", *WORDS, more=torchrun) == WORDS
    assert given(folder, "-q", "--", "show.py", "--config", "x", more=torchrun) == ["--config", "x"]


def test_a_host_with_a_dsrun_of_its_own_gives_every_word(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    place = ["--nodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    assert given(folder, "-q", *place, "--start", "exec", "show.py", *WORDS) == WORDS


def test_a_detached_job_gives_every_word(folder: Path) -> None:
    env = environment(folder)
    started = run_dsrun("-d", "--start", "exec", "show.py", *WORDS, cwd=folder, env=env)
    job = started.stdout.strip()
    done = run_dsrun("attach", job, cwd=folder, env=env)
    log = folder / "state" / "dsrun" / "jobs" / job / "rank0.log"
    assert log.read_text() == f"{json.dumps(WORDS)}\n", done.stderr


def test_ranks_of_other_hosts_get_every_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The plan is what agents are sent over ssh; what they make of it is the same as here.
    monkeypatch.chdir(folder)
    (folder / "hosts").write_text("far-a slots=1\nfar-b slots=1\n")
    result = invoke("run", "--dry-run", "--json", "-H", "hosts", "--transport", "ssh", "show.py", *WORDS)
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    del value["reached"]
    plan = LaunchPlan.from_json(value)
    assert list(plan.program.args) == WORDS


@pytest.mark.parametrize("typed", [["show.py", *WORDS], ["-q", "--", "show.py", "--config", "mine.yaml"]])
def test_what_a_scheduler_runs_has_every_word(folder: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str]) -> None:
    monkeypatch.chdir(folder)
    script = invoke("slurm", "--print", *typed, "--", "--nodes=2")
    assert script.stdout.endswith(f"-m dsrun run {' '.join(typed)}\n"), script.stderr
    pods = invoke("k8s", *typed, "--", "--image", "img:1", "--json")
    assert pods.exit_code == 0, pods.stderr
    assert json.dumps(typed)[1:-1] in " ".join(pods.stdout.split()), pods.stdout
