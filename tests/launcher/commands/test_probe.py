"""`dsrun probe` on this machine: its table, its JSON, its refusals, and the view that goes on."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment, invoke, run_dsrun, start_dsrun


def test_probe_prints_a_table_no_wider_than_80_columns_and_without_trailing_blanks() -> None:
    result = invoke("probe")
    assert (result.exit_code, result.stderr) == (0, "")
    table = result.stdout.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table if not line.startswith(" ")] == [
        *("host", "cpu", "memory", "gpu", "disk", "network", "versions")
    ]
    assert all(len(line) <= 80 and line == line.rstrip() for line in result.stdout.splitlines())
    assert "\x1b" not in result.stdout


def test_all_shows_limits_and_all_that_is_worth_knowing() -> None:
    lines = invoke("probe", "--all").stdout.splitlines()
    sections = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert {"limits", "cgroup", "numa"} <= set(sections)
    assert not any("--all" in line for line in lines)


def test_a_path_is_looked_at_too(tmp_path: Path) -> None:
    shown = invoke("probe", "--path", str(tmp_path)).stdout
    assert f"          {tmp_path}" in shown.replace("\n" + " " * 10 + str(tmp_path), "\n          " + str(tmp_path))
    report = json.loads(invoke("probe", "--json", "--path", str(tmp_path)).stdout)
    assert [place["path"] for place in report["storage"]["paths"]][-1] == str(tmp_path)


def test_what_torch_loads_is_told_on_request_only() -> None:
    assert json.loads(invoke("probe", "--json").stdout)["loaded"] is None
    report = json.loads(invoke("probe", "--deep", "--json").stdout)
    assert report["loaded"]["torch"] == report["versions"]["torch"]


def test_nothing_heavy_is_imported_for_a_probe_of_this_machine() -> None:
    code = (
        "import sys, io, contextlib\n"
        "from dsrun.launcher.cli import main\n"
        "try:\n"
        "    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())): main(['probe'])\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'numpy', 'pydantic', 'rich', 'fabric', 'yaml')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--nodes", "2"], "`--nodes 2`: without a hostfile there is this machine alone", "name the hosts: `-H hosts`"),
        (["--watch", "--bench"], "`--watch` and `--bench` do not go together", "`--watch` shows what changes alone"),
        (
            ["--watch", "1", "--path", "."],
            "`--watch` and `--path` do not go together",
            "`--watch` shows what changes alone",
        ),
        (["--watch", "0"], "`--watch`: expected a time above 0, got `0`", "see `dsrun probe --help`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], error: str, hint: str) -> None:
    result = invoke("probe", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {error}\nhint: {hint}\n")


def test_hosts_that_are_this_machine_are_asked_and_folded(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n[1-3] slots=1\n")
    result = run_dsrun("probe", "-H", "hosts", "--transport", "local", cwd=tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rest = result.stdout.splitlines()
    assert first == "all 3 hosts"
    assert "what differs" not in rest
    told = json.loads(run_dsrun("probe", "-H", "hosts", "--transport", "local", "--json", cwd=tmp_path).stdout)
    assert list(told["hosts"]) == ["n1", "n2", "n3"]
    assert told["hosts"]["n2"]["schema_version"] == told["schema_version"]
    assert all(abs(clock["offset_s"]) <= clock["doubt_s"] + 0.1 for clock in told["clocks"].values())


def test_a_host_that_does_not_answer_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("here slots=1\naway slots=1 python=/no/python\n")
    result = run_dsrun("probe", "-H", "hosts", "--transport", "local", cwd=tmp_path)
    assert result.exit_code == 1
    assert result.stdout.startswith("here\n")
    assert "error: host away: " in result.stderr
    assert "/no/python" in result.stderr
    told = run_dsrun("probe", "-H", "hosts", "--transport", "local", "--json", cwd=tmp_path)
    assert told.exit_code == 1
    assert "/no/python" in json.loads(told.stdout)["hosts"]["away"]["error"]


def test_the_live_view_prints_one_json_line_an_interval_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with start_dsrun("probe", "--watch", "0.1", "--json", cwd=tmp_path, env=clean_environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == b""
    for line in lines:
        (load,) = line["hosts"].values()
        assert 0 <= load["cpu_percent"] <= 100
        assert 0 < load["memory_used_bytes"] < load["memory_total_bytes"]
    assert lines[0]["time_s"] < lines[2]["time_s"]


def test_on_a_terminal_each_view_stands_in_place_of_the_one_before(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dsrun", "probe", "--watch", "0.1"]
    env = clean_environment(TERM="xterm", COLUMNS="80", LINES="24")
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"WRITTEN") < 3:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(ours)
    # The cursor goes up before a view is drawn again.
    assert seen.count(b"\x1b[1A") >= 2


def test_measuring_says_what_it_does_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with start_dsrun("probe", "--bench", "--path", str(tmp_path), cwd=tmp_path, env=clean_environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"dsrun: measuring memory copies\n"
        assert process.stderr.readline() == b"dsrun: measuring the disk at %s\n" % bytes(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert list(tmp_path.iterdir()) == []
