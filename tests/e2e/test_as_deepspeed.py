"""`dsrun --as-deepspeed`: ranks, and what they start, find dsrun as `deepspeed`, whichever way they are started."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

import dsrun
from dsrun.as_deepspeed.search_path import SITE
from dsrun.contract.environment import RankInfo
from support.cli import Result, clean_environment, run_dsrun

#: Prints in this process and in a child what `deepspeed` is, and this process's words.
SHOW = """\
import importlib.metadata as m, os, subprocess, sys
which = "import deepspeed, os; print(os.path.dirname(deepspeed.__file__), deepspeed.__version__)"
exec(which)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", which], check=True)
print(m.version("deepspeed"), *sys.argv[1:])
"""
OURS = f"{SITE}/deepspeed 0.19.8+dsrun"
WORDS = ("--deepspeed", "ds.json", "--deepspeed_config", "b.json", "--config", "c.yaml", "--local_rank=0")
TORCHRUN = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, master_port=1).to_env()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the script, and with an installed DeepSpeed of another version."""
    (tmp_path / "show.py").write_text(SHOW)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    (tmp_path / "installed" / "deepspeed").mkdir(parents=True)
    (tmp_path / "installed" / "deepspeed" / "__init__.py").write_text("__version__ = '0.15.1'\n")
    metadata = tmp_path / "installed" / "deepspeed-0.15.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.1\n")
    return tmp_path


def run(folder: Path, *words: str, **changes: str) -> Result:
    env = clean_environment(
        XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(folder / "installed"), **changes
    )
    return run_dsrun(*words, cwd=folder, env=env)


def lines_of(result: Result, rank: int) -> list[str]:
    tag = f"[{rank}] "
    return [line.removeprefix(tag) for line in result.stdout.splitlines() if line.startswith(tag)]


@pytest.mark.parametrize(
    "words",
    [
        ["--start", "fork", "show.py"],
        pytest.param(
            ["--start", "exec", "app.pyz"], marks=pytest.mark.soak("a module, and a program that is not Python")
        ),
        ["-m", "show"],
    ],
)
def test_ranks_and_what_they_start_find_dsrun_also_where_deepspeed_is_installed(folder: Path, words: list[str]) -> None:
    result = run(folder, "--as-deepspeed", "-n", "2", *words, *WORDS)
    assert result.exit_code == 0, result.stderr
    for rank in (0, 1):
        assert lines_of(result, rank) == [OURS, OURS, f"0.19.8+dsrun {' '.join(WORDS)}"]
    assert result.stderr.count(f"deepspeed is dsrun {dsrun.__version__} (as 0.19.8)") == 1
    assert result.stderr.count("made no engine") <= 1
    shown = run(folder, "show", result.stderr.split("dsrun: job ")[1].partition(":")[0]).stdout
    assert re.search(r"^  deepspeed +is dsrun \(as 0\.19\.8\)$", shown, re.MULTILINE)


def test_without_the_option_import_deepspeed_gives_what_it_gave(folder: Path) -> None:
    result = run(folder, "show.py")
    assert lines_of(result, 0) == [*[f"{folder}/installed/deepspeed 0.15.1"] * 2, "0.15.1"]
    assert "deepspeed is dsrun" not in result.stderr
    assert "made no engine" not in result.stderr


def test_a_program_that_is_not_python_passes_it_on(folder: Path) -> None:
    result = run(folder, "--as-deepspeed", "-q", "--no-python", sys.executable, "show.py", "x")
    assert lines_of(result, 0) == [OURS, OURS, "0.19.8+dsrun x"]
    assert result.stderr == ""


@pytest.mark.parametrize("words", [["show.py"], ["--no-python", sys.executable, "show.py"]])
def test_a_rank_of_another_launcher_finds_it_too(folder: Path, words: list[str]) -> None:
    result = run(folder, "--as-deepspeed", *words, *WORDS, **TORCHRUN)
    assert result.stdout.splitlines() == [OURS, OURS, f"0.19.8+dsrun {' '.join(WORDS)}"], result.stderr


def test_a_bad_version_is_refused_below_another_launcher_too(folder: Path) -> None:
    result = run(folder, "--as-deepspeed", "show.py", **TORCHRUN, DSRUN_AS_DEEPSPEED_VERSION="2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: environment: DSRUN_AS_DEEPSPEED_VERSION is '2'" in result.stderr


def test_a_job_that_a_script_starts_has_it_as_any_other_child(folder: Path) -> None:
    words = [sys.executable, "-m", "dsrun", "-q", "--start", "exec", "show.py"]
    (folder / "outer.py").write_text(f"import subprocess, sys\nsubprocess.run({words!r}, check=True)\n")
    result = run(folder, "--as-deepspeed", "--start", "exec", "outer.py")
    assert lines_of(result, 0) == [f"[0] {line}" for line in (OURS, OURS, "0.19.8+dsrun")], result.stderr
