"""The ways to have dsrun as `deepspeed` without its launcher: what they change, for whom, and what they refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dsrun
from dsrun.as_deepspeed.search_path import BIN, SITE, variables
from dsrun.as_deepspeed.version import STANDARD, full_version, wanted_version
from dsrun.errors import InputError
from support.cli import Result, clean_environment

RUN = ("-m", "dsrun.as_deepspeed")
#: Prints which `deepspeed` this process has, and which version its package and its metadata say.
WHICH = (
    "import importlib.metadata as m, os, deepspeed\n"
    "print(os.path.dirname(deepspeed.__file__), deepspeed.__version__, m.version('deepspeed'))\n"
)
#: The same in this process and in one that it starts.
BOTH = (
    f"import subprocess, sys\nexec({WHICH!r})\nsys.stdout.flush()\nsubprocess.run([sys.executable, '-c', {WHICH!r}])\n"
)
OURS = f"{SITE}/deepspeed {full_version(STANDARD)} {full_version(STANDARD)}"
LINE = f"dsrun: deepspeed is dsrun {dsrun.__version__} (as {STANDARD})"
NO_ENGINE = "dsrun: warning: the program has ended and made no engine"


def python(*words: str, cwd: Path, **changes: str) -> Result:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=clean_environment(XDG_STATE_HOME=str(cwd / "state"), **changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "both.py").write_text(BOTH)
    return tmp_path


@pytest.fixture
def installed(work: Path) -> str:
    """A folder on the path with an installed DeepSpeed of another version."""
    folder = work / "installed"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.15.1'\n")
    metadata = folder / "deepspeed-0.15.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.1\n")
    return str(folder)


def test_a_script_and_what_it_starts_have_dsrun_also_where_deepspeed_is_installed(work: Path, installed: str) -> None:
    done = python(*RUN, "both.py", cwd=work, PYTHONPATH=installed)
    assert (done.stdout.splitlines(), done.exit_code) == ([OURS, OURS], 0), done.stderr
    assert done.stderr.count(LINE) == 1
    plain = python("both.py", cwd=work, PYTHONPATH=installed)
    assert plain.stdout.splitlines() == [f"{installed}/deepspeed 0.15.1 0.15.1"] * 2
    assert plain.stderr == ""


def test_a_module_keeps_its_words_and_its_folder_first(work: Path) -> None:
    (work / "mine").mkdir()
    (work / "mine" / "main.py").write_text("import sys\nfrom . import near\nprint(sys.path[0], *sys.argv[1:])\n")
    (work / "mine" / "near.py").write_text(WHICH)
    done = python(*RUN, "-m", "mine.main", "--deepspeed", "ds.json", "--local_rank=0", cwd=work)
    assert done.stdout.splitlines() == [OURS, f"{work} --deepspeed ds.json --local_rank=0"], done.stderr


def test_a_notebook_has_dsrun_from_the_import_on(work: Path, installed: str) -> None:
    program = f"import dsrun.as_deepspeed.install\n{BOTH}"
    done = python("-c", program, cwd=work, PYTHONPATH=installed)
    assert done.stdout.splitlines() == [OURS, OURS], done.stderr


def test_the_folder_on_pythonpath_is_enough_and_is_there_once(work: Path) -> None:
    show = "import os, deepspeed; print(os.environ['DSRUN_AS_DEEPSPEED'], os.environ['PYTHONPATH'])"
    done = python("-c", show, cwd=work, PYTHONPATH=f"{SITE}{os.pathsep}/else{os.pathsep}{SITE}")
    assert done.stdout == f"{STANDARD} {SITE}{os.pathsep}/else\n", done.stderr
    assert done.stderr == f"{LINE}\n"


def test_another_rank_than_the_first_says_nothing(work: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert python(*RUN, "both.py", cwd=work, **place).stderr == ""


@pytest.mark.parametrize("words", [RUN, ("-c", "import dsrun.as_deepspeed.install; exec(open('both.py').read())")])
def test_a_wish_for_another_version_is_told_by_package_and_metadata(work: Path, words: tuple[str, ...]) -> None:
    script = ("both.py",) if words is RUN else ()
    done = python(*words, *script, cwd=work, DSRUN_AS_DEEPSPEED_VERSION="0.17.5")
    assert done.stdout.splitlines() == [f"{SITE}/deepspeed 0.17.5 0.17.5"] * 2, done.stderr
    assert "(as 0.17.5)" in done.stderr
    # A child of such a process, whose parent does not pass the wish on.
    later = python("-c", WHICH, cwd=work, DSRUN_AS_DEEPSPEED="0.17.5", PYTHONPATH=_path_for("0.17.5", work))
    assert later.stdout == f"{SITE}/deepspeed 0.17.5 0.17.5\n"
    assert (work / "state" / "dsrun").stat().st_mode & 0o077 == 0


def _path_for(version: str, work: Path) -> str:
    return os.pathsep.join([str(work / "state" / "dsrun" / "as_deepspeed" / version), SITE])


@pytest.mark.parametrize("wish", ["0.9.2", "0.19.9", "1", "0.17", "0.17.5.1", "../../x", "0.17.5rc1", "٠.17.5"])
def test_a_version_that_dsrun_cannot_stand_for_is_refused_by_name(wish: str) -> None:
    with pytest.raises(InputError, match=r"DSRUN_AS_DEEPSPEED_VERSION is .* expected a version .* from 0\.9\.3 to"):
        wanted_version({"DSRUN_AS_DEEPSPEED_VERSION": wish})


def test_a_parents_version_that_is_none_is_refused_by_name_where_deepspeed_is_imported(work: Path) -> None:
    done = python("-c", "import deepspeed", cwd=work, PYTHONPATH=SITE, DSRUN_AS_DEEPSPEED="1")
    assert done.exit_code == 1
    assert "InputError: environment: DSRUN_AS_DEEPSPEED is '1'; expected a version of DeepSpeed" in done.stderr
    assert "not enough values" not in done.stderr
    assert "deepspeed is dsrun" not in done.stderr
    with pytest.raises(InputError) as raised:
        wanted_version({"DSRUN_AS_DEEPSPEED": "1"})
    assert raised.value.hint == f"unset it: dsrun then stands for {STANDARD}"
    unset = python("-c", WHICH, cwd=work, PYTHONPATH=SITE)
    assert unset.stdout == f"{OURS}\n", unset.stderr


def test_versions_are_the_wish_then_the_parents_then_the_standard() -> None:
    assert wanted_version({}) == wanted_version({"DSRUN_AS_DEEPSPEED_VERSION": ""}) == STANDARD
    assert wanted_version({"DSRUN_AS_DEEPSPEED": "0.10.0"}) == "0.10.0"
    assert wanted_version({"DSRUN_AS_DEEPSPEED": "0.10.0", "DSRUN_AS_DEEPSPEED_VERSION": "0.9.3"}) == "0.9.3"


def test_bad_words_are_refused_in_two_lines(work: Path) -> None:
    done = python(*RUN, "both.py", cwd=work, DSRUN_AS_DEEPSPEED_VERSION="2")
    assert (done.exit_code, done.stderr.count("\n"), done.stderr[:24]) == (2, 2, "error: environment: DSRU")
    for words in ((), ("-m",), ("--help",)):
        refused = python(*RUN, *words, cwd=work)
        assert refused.exit_code == 2
        assert f"PYTHONPATH={SITE}" in refused.stderr
    assert "cannot read 'none.py'" in python(*RUN, "none.py", cwd=work).stderr


def test_a_deepspeed_that_is_imported_already_is_refused_by_its_file(work: Path, installed: str) -> None:
    done = python("-c", "import deepspeed, dsrun.as_deepspeed.install", cwd=work, PYTHONPATH=installed)
    assert f"another deepspeed is imported already, from {installed}/deepspeed/__init__.py" in done.stderr
    assert done.exit_code == 1
    again = "import dsrun.as_deepspeed.install, deepspeed, importlib; importlib.reload(dsrun.as_deepspeed.install)"
    assert python("-c", again, cwd=work).exit_code == 0


@pytest.mark.parametrize("name", ["deepspeed.py", "deepspeed/__init__.py"])
def test_the_scripts_own_module_of_that_name_is_told_of(work: Path, name: str) -> None:
    path = work / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    (work / "own.py").write_text("import deepspeed; print(deepspeed.__file__)")
    done = python(*RUN, "own.py", cwd=work)
    assert done.stdout == f"{path}\n"
    assert f"dsrun: warning: {path} is what `import deepspeed` gives here, and not dsrun" in done.stderr
    # A folder without __init__.py, of configs for example, does not win.
    shutil.rmtree(work / "deepspeed", ignore_errors=True)
    path.unlink(missing_ok=True)
    (work / "deepspeed").mkdir()
    assert "is what `import" not in python(*RUN, "both.py", cwd=work).stderr


def test_a_program_that_made_no_engine_is_told_of_unless_its_children_did_the_work(work: Path) -> None:
    burn = "sum(range(3_000_000))"
    (work / "none.py").write_text(f"import sys\n{burn}\nsys.exit(0)\n")
    (work / "engine.py").write_text(f"from dsrun.contract import environment\nenvironment.note_engine()\n{burn}\n")
    (work / "fails.py").write_text("raise SystemExit(3)\n")
    (work / "starts.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'])\n")
    told = {name: NO_ENGINE in python(*RUN, f"{name}.py", cwd=work).stderr for name in ("none", "engine", "fails")}
    assert told == {"none": True, "engine": False, "fails": False}
    assert NO_ENGINE not in python(*RUN, "starts.py", cwd=work).stderr
    tool = python(*RUN, "-m", "deepspeed.launcher.runner", "--help", cwd=work)
    assert "--include" in tool.stdout
    assert NO_ENGINE not in tool.stderr


def test_variables_of_another_host_are_made_anew_with_this_hosts_folder() -> None:
    there = {"PYTHONPATH": "/opt/py/dsrun/as_deepspeed/site:/theirs:", "PATH": "/opt/py/dsrun/as_deepspeed/bin:/bin"}
    assert variables(there, STANDARD) == {
        "PYTHONPATH": f"{SITE}:/theirs:",
        "PATH": f"{BIN}:/bin",
        "DSRUN_AS_DEEPSPEED": STANDARD,
        "DSRUN_AS_DEEPSPEED_PYTHON": sys.executable,
    }
    assert variables({}, STANDARD)["PYTHONPATH"] == SITE
