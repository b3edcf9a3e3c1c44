from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsrun.launcher.dashboard.open_metrics import serving
from support.cli import clean_environment, invoke, start_dsrun
from support.recorded_runs import append_records, run_lines
from support.watched_jobs import JOB_ID, running_job

parser = pytest.importorskip("prometheus_client.openmetrics.parser")
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of jobs, in a state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dsrun" / "jobs"


@contextmanager
def metrics(*words: str, state: Path) -> Generator[subprocess.Popen[bytes]]:
    """`dsrun metrics` for the time of a `with`."""
    env = clean_environment(XDG_STATE_HOME=str(state))
    with start_dsrun("metrics", *words, cwd=state, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(url: str, *, accept: str = OPEN_METRICS) -> dict[str, float]:
    """Values that a server answers with, by name and labels without the job."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join(
            [sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "job")]
        ): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def wait_for(url: str, name: str, value: float) -> dict[str, float]:
    """What a server answers with once this is in it."""
    deadline_s = time.monotonic() + 30
    while (values := asked(url)).get(name) != value:
        assert time.monotonic() < deadline_s, values
        time.sleep(0.1)
    return values


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_without_a_job_that_runs_there_is_an_answer_and_a_signal_ends_it(
    tmp_path: Path, jobs: Path, signum: signal.Signals
) -> None:
    with metrics("--port", "0", state=tmp_path) as process:
        url = line_of(process)
        assert url.startswith("http://127.0.0.1:")
        assert asked(url) == {"dsrun_jobs": 0}
        process.send_signal(signum)
        assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 0


def test_a_job_is_followed_to_its_end_and_answers_come_at_once(tmp_path: Path, jobs: Path) -> None:
    with running_job(jobs) as folder:
        append_records(folder, run_lines(range(1, 501)))
        with metrics("--port", "0", state=tmp_path) as process:
            url = line_of(process)
            assert wait_for(url, "dsrun_step", 500)["dsrun_job_running"] == 1
            begin_s = time.monotonic()
            for _ in range(10):
                asked(url)
            assert (time.monotonic() - begin_s) / 10 < 0.5
            append_records(folder, run_lines(range(501, 503), first=False))
            wait_for(url, "dsrun_step", 502)
            value = {"schema_version": 1, "job_id": JOB_ID, "outcome": "failed", "exit_code": 137, "attempts": 1}
            value |= {"ended": "2026-11-21T07:35:00+00:00", "duration_s": 60.0, "run_dir": str(folder), "ranks": []}
            (folder / "outcome.json").write_text(json.dumps(value | {"failure": ["error: killed"]}))
            values = wait_for(url, "dsrun_job_running", 0)
            assert (values["dsrun_job_exit_code"], values["dsrun_step"]) == (137, 502)


def test_there_is_nothing_but_metrics() -> None:
    with serving("127.0.0.1", 0, lambda: ()) as (address, port):
        url = f"http://{address}:{port}"
        with urllib.request.urlopen(f"{url}/", timeout=10) as answer:
            assert b"/metrics" in answer.read()
        head = urllib.request.Request(f"{url}/metrics", method="HEAD")
        with urllib.request.urlopen(head, timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/../etc/passwd", timeout=10)


def test_a_client_that_says_nothing_keeps_nobody_waiting() -> None:
    with serving("127.0.0.1", 0, lambda: ()) as (address, port), socket.create_connection((address, port)):
        assert asked(f"http://{address}:{port}/metrics") == {}


def test_a_port_that_is_taken_is_told(jobs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        shown = invoke("metrics", "--port", str(port))
    assert shown.exit_code == 2
    assert shown.stderr == (
        f"error: metrics cannot be served on 127.0.0.1 port {port}: address already in use\n"
        "hint: `--port 0` takes any that is free; 9400 is that of NVIDIA's DCGM exporter too\n"
    )


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", "error: `--host no-such-host.invalid`: there is no such host"),
        ("a..b", "error: `--host a..b`: there is no such host: encoding with 'idna' codec failed"),
        ("192.0.2.1", "error: metrics cannot be served on 192.0.2.1 port 0: cannot assign requested address"),
    ],
)
def test_a_host_that_is_not_this_machine_is_told(jobs: Path, host: str, says: str) -> None:
    shown = invoke("metrics", "--port", "0", "--host", host)
    assert shown.exit_code == 2
    assert shown.stderr.startswith(says)


def test_an_address_that_others_reach_is_told(tmp_path: Path, jobs: Path) -> None:
    with metrics("--port", "0", "--host", "0.0.0.0", state=tmp_path) as process:
        url = line_of(process)
        assert process.stderr is not None
        said = process.stderr.readline().decode()
        assert said == f"dsrun: {url} is open to all who reach this machine; it asks for no password\n"


def test_a_file_is_replaced_whole_and_gone_at_the_end(tmp_path: Path, jobs: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client.parser")
    file = tmp_path / "dsrun.prom"
    with running_job(jobs) as folder:
        append_records(folder, run_lines(range(1, 6)))
        with metrics("--textfile", str(file), JOB_ID, state=tmp_path) as process:
            deadline_s = time.monotonic() + 30
            while not file.exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            families = list(prometheus.text_string_to_metric_families(file.read_text()))
            assert "dsrun_loss" in {family.name for family in families}
            assert file.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["dsrun"]


def test_a_file_that_cannot_be_written_is_told(jobs: Path, tmp_path: Path) -> None:
    shown = invoke("metrics", "--textfile", str(tmp_path / "none" / "dsrun.prom"))
    assert shown.exit_code == 2
    assert "cannot be written: no such file or directory" in shown.stderr


@pytest.mark.parametrize(("name", "says"), [("notes.txt", "no file of dsrun's metrics"), ("pipe", "it is a fifo")])
def test_nothing_of_anybody_else_is_replaced_or_removed(jobs: Path, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    with metrics("--textfile", name, state=tmp_path) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert says in said.decode()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_pipe_is_neither_replaced_nor_removed(jobs: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    shown = invoke("metrics", "--textfile", str(tmp_path / "pipe"))
    assert shown.exit_code == 2
    assert "expected a regular file" in shown.stderr
    assert (tmp_path / "pipe").is_fifo()


def test_a_package_that_is_missing_is_named_with_what_installs_it(jobs: Path, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('no module named prometheus_client')\n")
    env = clean_environment(XDG_STATE_HOME=str(tmp_path))
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    with start_dsrun("metrics", "--port", "0", cwd=tmp_path, env=env) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said.decode().endswith("\nhint: pip install 'dsrun[metrics]'\n")


def test_a_job_that_there_is_not_is_told(jobs: Path) -> None:
    assert invoke("metrics", "nobody").stderr.startswith("error: there is no job `nobody`")
