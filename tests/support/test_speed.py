"""scripts/test on made-up tests: what may run again, and what stays failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import speed

_ROOT = Path(__file__).parents[2]
_CONFTEST = """
from support import speed

def pytest_addoption(parser):
    speed.add_option(parser)

def pytest_configure(config):
    speed.register(config)

def pytest_collection_modifyitems(items):
    speed.note_reasons(items)
"""
_SETTINGS = f"""
[pytest]
pythonpath = {_ROOT / "tests"}
addopts = --strict-markers
markers =
    depends_on_speed(reason): as in pyproject.toml
"""
#: Fails in its first run, and passes in each later one.
_LATE = """
import pathlib, pytest

def late(name):
    ran = pathlib.Path(__file__).with_name(name)
    first = not ran.exists()
    ran.touch()
    assert not first, "no time"
"""
_MARKED = _LATE + "@pytest.mark.depends_on_speed('a bound of 5 s')\ndef test_marked(): late('marked')\n"
_PASSES = "def test_passes(): pass\n"


def ran(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/test as it is, on made-up tests, with this interpreter's packages.

    Args:
        folder: a new one.
        files: sources by name.
    """
    scripts, tests, programs = (folder / name for name in ("scripts", "tests", ".venv/bin"))
    for each in (scripts, tests, programs):
        each.mkdir(parents=True)
    shutil.copy(_ROOT / "scripts/test", scripts)
    for name in ("environment", "test_packages"):
        (scripts / name).write_text("")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    (folder / "pytest.ini").write_text(_SETTINGS)
    (tests / "conftest.py").write_text(_CONFTEST)
    for name, source in files.items():
        (tests / f"{name}.py").write_text(source)
    # What xdist told this worker is not the tests' that start there.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    words = ["bash", "scripts/test", "tests", "-n", "1", "--max-worker-restart", "0"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environ, timeout=100)


def test_a_failure_that_depends_on_speed_runs_again_and_is_listed(tmp_path: Path) -> None:
    ended = ran(tmp_path, test_marked=_MARKED, test_passes=_PASSES)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "note: the failed tests that depend on the machine's speed run again, one at a time" in ended.stderr
    assert "tests/test_marked.py::test_marked: a bound of 5 s" in ended.stdout
    assert "tests/test_marked.py::test_marked: passed alone" in ended.stdout
    assert ended.stdout.count("1 passed") == 2, "what has passed does not run again"


def test_every_other_failure_stays_though_it_would_pass_alone(tmp_path: Path) -> None:
    ended = ran(tmp_path, test_other=_LATE + "def test_other(): late('other')\n")
    assert ended.returncode == 1
    assert "run again" not in ended.stderr


def test_an_other_failure_stays_beside_one_that_passes_alone(tmp_path: Path) -> None:
    ended = ran(tmp_path, test_marked=_MARKED, test_other=_LATE + "def test_other(): late('other')\n")
    assert ended.returncode == 1
    assert "tests/test_marked.py::test_marked: passed alone" in ended.stdout
    listed = ended.stdout.partition("failed before, and stay so")[2]
    assert "tests/test_other.py::test_other" in listed


def test_more_than_a_few_failures_are_no_chance_and_stay(tmp_path: Path) -> None:
    marked = f"@pytest.mark.depends_on_speed('a bound')\n@pytest.mark.parametrize('case', range({speed.MOST + 1}))\n"
    ended = ran(tmp_path, test_slow=f"import pytest\n{marked}def test_slow(case): assert 0\n")
    assert ended.returncode == 1
    assert "run again" not in ended.stderr


def test_what_fails_alone_too_stays_failed(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.depends_on_speed('a bound')\ndef test_slow(): assert 0\n"
    ended = ran(tmp_path, test_slow=source)
    assert ended.returncode == 1
    assert "tests/test_slow.py::test_slow: did not pass" in ended.stdout


@pytest.mark.parametrize(
    "other",
    ["import os\ndef test_dies(): os._exit(3)\n", "import no_such_module\n"],
    ids=["a worker that dies", "a file that cannot be imported"],
)
def test_what_no_test_reports_stays_failed(tmp_path: Path, other: str) -> None:
    assert ran(tmp_path, test_marked=_MARKED, test_other=other).returncode != 0


def test_a_marker_wants_a_reason(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.depends_on_speed)
    with pytest.raises(pytest.UsageError, match="`depends_on_speed` wants one reason"):
        speed.note_reasons([request.node])
