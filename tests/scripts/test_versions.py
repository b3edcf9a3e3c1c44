"""`scripts/versions`: interpreters are found or named as missing, environments made once, and what failed is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from versions import PAIRS, TESTS, Row, find_python, results, table

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite name="pytest" time="12.5">
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_of_a_gpu"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_a" name="test_bad[2]"><failure message="no"/></testcase>
<testcase classname="tests.test_b" name="test_set_up"><error message="no"/></testcase>
</testsuite></testsuites>"""
WELL = (
    '<testsuites><testsuite time="3.0"><testcase classname="tests.test_a" name="test_good"/></testsuite></testsuites>'
)
#: Answers like a Python, makes environments of itself, and has the tests end as $REPORT and $STATUS say.
PYTHON = """#!/bin/sh
echo "$*" >> "$LOG"
case "$1 $2" in
    "-c import ensurepip"*) echo {version}.7 ;;
    "-c import platform"*) echo {version}.7 2.10.0+cpu ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") exit "${{PIP_STATUS:-0}}" ;;
    "-m pytest") for word; do case "$word" in --junitxml=*) printf %s "$REPORT" > "${{word#*=}}" ;; esac; done
        exit "${{STATUS:-0}}" ;;
esac
"""


def made_up_python(path: Path, version: str, text: str = PYTHON) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(version=version))
    path.chmod(0o755)
    return path


def versions(folder: Path, *args: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a Python 3.10 that is made up, and no other."""
    made_up_python(folder / "bin" / "python3.10", "3.10")
    environ = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder), "LOG": str(folder / "log"), "REPORT": WELL}
    command = [sys.executable, str(ROOT / "scripts" / "versions.py"), "--folder", str(folder / "cache"), *args]
    return subprocess.run(
        command, env=environ | changes, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def commands(folder: Path) -> list[str]:
    """What the made-up Python was asked to run with `-m`, by the word behind it."""
    lines = (folder / "log").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("-m ")]


def test_the_tests_that_run_are_there() -> None:
    assert [test for test in TESTS if not (ROOT / test).is_file()] == []


def test_what_is_promised_is_what_runs() -> None:
    pythons = sorted({int(pair.partition(":")[0].removeprefix("3.")) for pair in PAIRS})
    torches = sorted({int(pair.partition(":")[2].removeprefix("2.")) for pair in PAIRS})
    assert pythons == list(range(pythons[0], pythons[-1] + 1))
    assert torches == list(range(torches[0], torches[-1] + 1))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classifiers = [f"Programming Language :: Python :: 3.{minor}" for minor in pythons]
    assert [one for one in project["classifiers"] if "Python :: 3." in one] == classifiers
    assert project["requires-python"] == f">=3.{pythons[0]}"
    assert f"torch>=2.{torches[0]}" in project["dependencies"]
    promise = f"Python 3.{pythons[0]} to 3.{pythons[-1]}", f"torch 2.{torches[0]} to 2.{torches[-1]}"
    for page in ("README.md", "docs/reference/versions.md"):
        assert [words for words in promise if words not in (ROOT / page).read_text()] == []


def test_an_interpreter_is_the_named_one_or_that_on_path_or_the_newest_of_pyenv(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "LOG": "/dev/null"}
    assert find_python("3.12", given={}, environ=environ) is None
    for release in ("3.12.9", "3.12.10", "3.1.2"):
        text = PYTHON.replace("{version}.7", release)
        made_up_python(tmp_path / ".pyenv" / "versions" / release / "bin" / "python", release, text)
    newest = str(tmp_path / ".pyenv" / "versions" / "3.12.10" / "bin" / "python")
    assert find_python("3.12", given={}, environ=environ) == newest
    # pyenv's stand-in for a version that is not installed, which is on PATH all the same.
    here = made_up_python(tmp_path / "bin" / "python3.12", "", "#!/bin/sh\nexit 127\n")
    assert find_python("3.12", given={}, environ=environ) == newest
    made_up_python(here, "3.12")
    assert find_python("3.12", given={}, environ=environ) == str(here)
    other = made_up_python(tmp_path / "other", "3.12")
    assert find_python("3.12", given={"3.12": str(other)}, environ=environ) == str(other)
    # One that was named is not replaced by another.
    assert find_python("3.12", given={"3.12": str(tmp_path / "nowhere")}, environ=environ) is None


def test_counts_are_of_tests_and_a_set_up_that_failed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert results(tmp_path / "report.xml") == (
        {"passed": 1, "failed": 2, "skipped": 1},
        ("tests.test_a::test_bad[2]", "tests.test_b::test_set_up"),
    )


def test_an_environment_is_made_once_and_its_row_kept(tmp_path: Path) -> None:
    first = versions(tmp_path, "--only", "3.10:2.10", "--torch-build", "cpu", "--json")
    assert first.returncode == 0, first.stderr
    (row,) = json.loads(first.stdout)
    wanted = {"python": "3.10.7", "torch": "2.10.0+cpu", "passed": 1, "failed": 0, "skipped": 0, "seconds": 3.0}
    assert row.items() >= wanted.items()
    assert (
        "install --quiet --disable-pip-version-check torch==2.10.* --index-url https://download.pytorch.org/whl/cpu"
        in (tmp_path / "log").read_text()
    )
    again = versions(tmp_path, "--only", "3.10:2.10", "--torch-build", "cpu")
    assert again.returncode == 0, again.stderr
    assert commands(tmp_path) == ["venv", "pip", "pip", "pytest", "pytest"]
    # Other tests are no row of the usual ones.
    versions(tmp_path, "--only", "3.10:2.10", "--torch-build", "cpu", "--", "tests/other", REPORT=REPORT, STATUS="1")
    last = versions(tmp_path, "--only", "3.10:2.10,3.13:2.15", "--torch-build", "cpu", "--last", "--markdown")
    assert last.returncode == 0
    assert re.search(r"^\| 3\.10\.7 \| 2\.10\.0\+cpu \| 1 \| 0 \| 0 \| 3 \| 20\d\d-\d\d-\d\d \|$", last.stdout, re.M)
    assert "`tests/e2e/test_example.py`" in last.stdout
    assert commands(tmp_path)[-1] == "pytest"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"REPORT": REPORT, "STATUS": "1"}, "failed: tests.test_a::test_bad[2]"),
        ({"STATUS": "2"}, "pytest ended with 2"),
        ({"PIP_STATUS": "1"}, "torch==2.10.*: failed"),
    ],
    ids=["tests fail", "pytest stops", "torch cannot be had"],
)
def test_what_failed_is_told_and_the_exit_code_is_1(tmp_path: Path, changes: dict[str, str], told: str) -> None:
    ended = versions(tmp_path, "--only", "3.10:2.10", **changes)
    assert ended.returncode == 1
    assert told in ended.stdout
    # The next run makes what is missing, and does not take half an environment for a whole one.
    assert versions(tmp_path, "--only", "3.10:2.10").returncode == 0


def test_a_pair_without_an_interpreter_is_skipped_by_name(tmp_path: Path) -> None:
    one = versions(tmp_path, "--only", "3.10:2.10,3.13:2.15")
    assert (one.returncode, "Python 3.13, torch 2.15: skipped: no Python 3.13: `pyenv install 3.13`" in one.stdout) == (
        0,
        True,
    )
    # But a run of nothing is no proof.
    none = versions(tmp_path, "--only", "3.13:2.15")
    assert (none.returncode, none.stderr.splitlines()[0]) == (1, "error: nothing ran")


def test_a_run_that_is_ended_ends_the_tests(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    text = PYTHON.replace('"-m pytest")', f'"-m pytest") exec sleep 60 > {fifo} ;;\n    "-m never")')
    made_up_python(tmp_path / "bin" / "python3.10", "3.10", text)
    script = str(ROOT / "scripts" / "versions.py")
    command = [sys.executable, script, "--folder", str(tmp_path / "cache"), "--only", "3.10:2.10"]
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "LOG": "/dev/null"}
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process, fifo.open() as tests:
        process.terminate()
        # Ends when nobody holds it any more.
        assert tests.read() == ""
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_list_names_what_would_run_and_runs_nothing(tmp_path: Path) -> None:
    shown = versions(tmp_path, "--list")
    assert shown.returncode == 0, shown.stderr
    assert [line.partition(": ")[0] for line in shown.stdout.splitlines()].count("Python 3.10, torch 2.10") == 1
    assert len(shown.stdout.splitlines()) == len(PAIRS)
    assert commands(tmp_path) == []
    bad = versions(tmp_path, "--only", "3.10")
    assert (bad.returncode, bad.stderr.splitlines()[-1]) == (
        2,
        "bash scripts/versions: error: --only: 3.10 is no pair such as 3.10:2.10",
    )


def test_a_table_is_aligned_and_leaves_out_what_did_not_run() -> None:
    facts: dict[str, Any] = {"python": "3.10.13", "torch": "2.10.0+cu128", "date": "2026-11-23"}
    rows = [
        Row(**facts, passed=300, seconds=200.4),
        Row(python="3.9", torch="2.0", reason="skipped: none", absent=True),
    ]
    assert table(rows) == (
        "Python   torch         passed  failed  skipped  seconds  date\n"
        "3.10.13  2.10.0+cu128  300     0       0        200      2026-11-23\n"
        "Python 3.9, torch 2.0: skipped: none"
    )
