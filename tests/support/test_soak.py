"""Marked tests on made-up ones: what runs with the option and without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_CONFTEST = """
from support import soak

def pytest_addoption(parser):
    soak.add_option(parser)

def pytest_collection_modifyitems(config, items):
    soak.leave_out(config, items)
"""
_SETTINGS = f"""
[pytest]
pythonpath = {_TESTS}
addopts = --strict-markers
markers =
    soak(reason): as in pyproject.toml
"""
_CASES = """
import pytest

@pytest.mark.parametrize("layout", ["few", pytest.param("all", marks=pytest.mark.soak("few of them run"))])
def test_layouts(layout): pass
"""


def ran(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one made-up file."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text(_SETTINGS)
    (folder / "test_made_up.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_marked_case_is_left_out_and_counted(tmp_path: Path) -> None:
    result = ran(tmp_path, _CASES)
    assert "test_layouts[few] PASSED" in result.stdout
    assert "test_layouts[all]" not in result.stdout
    assert "1 passed, 1 deselected" in result.stdout


def test_a_marked_case_runs_with_the_option(tmp_path: Path) -> None:
    result = ran(tmp_path, _CASES, "--soak")
    assert "test_layouts[few] PASSED" in result.stdout
    assert "test_layouts[all] PASSED" in result.stdout
    assert "2 passed" in result.stdout


@pytest.mark.parametrize("options", [[], ["--soak"]])
def test_a_marker_without_a_reason_fails_the_run(tmp_path: Path, options: list[str]) -> None:
    source = "import pytest\n@pytest.mark.soak()\ndef test_one(): pass\n"
    result = ran(tmp_path, source, *options)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_one: `soak` wants one reason" in result.stderr + result.stdout
