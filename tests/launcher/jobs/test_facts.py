from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.jobs.facts import differences, digest_of_file, git_state, gone_variables, read_facts


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A working tree of one commit, with the script in a folder of it."""
    folder = tmp_path / "code"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder / "src"


def test_git_tells_commit_and_changes_from_any_folder_of_the_tree(code: Path) -> None:
    clean = git_state(code)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (code / "new.py").write_text("")
    assert git_state(code) == clean
    (code / "train.py").write_text("2\n")
    assert git_state(code) == clean | {"dirty": True}


def test_where_there_is_no_commit_git_says_nothing(tmp_path: Path) -> None:
    assert git_state(tmp_path / "gone") is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def facts(code: Path, **environ: str) -> dict[str, Any]:
    """What would be read back from the file."""
    return json.loads(json.dumps(read_facts(script=code / "train.py", folder=code, environ=environ)))


def test_facts_are_plain_json_and_hold_no_secret(code: Path) -> None:
    found = facts(code, CUDA_VISIBLE_DEVICES="", HF_TOKEN="hf_123", NCCL_DEBUG="INFO", LESSOPEN="x")
    assert found["environment"] == {"CUDA_VISIBLE_DEVICES": "", "HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}
    assert found["script_digest"] == digest_of_file(code / "train.py")
    assert found["probe"]["versions"]["python"]
    assert "hf_123" not in json.dumps(found)


def test_nothing_changed_is_no_difference(code: Path) -> None:
    assert differences(facts(code), read_facts(script=code / "train.py", folder=code, environ={})) == []


def test_every_change_is_a_line(code: Path) -> None:
    before = facts(code, NCCL_DEBUG="INFO", OMP_NUM_THREADS="4")
    before["probe"]["versions"]["torch"] = "2.10.0"
    before["probe"]["gpus"] = [{"index": 0, "name": "H200", "uuid": "GPU-1", "usable": True}]
    now = copy.deepcopy(before)
    now["probe"]["versions"]["torch"] = "2.11.0"
    now["probe"]["gpus"] += [
        {"index": 1, "name": "H200", "uuid": "GPU-2", "usable": True},
        {"index": 2, "name": "H200", "uuid": "GPU-3", "usable": False},
    ]
    now["git"] = {"commit": "c" * 40, "dirty": True}
    now["script_digest"] = "d" * 64
    now["environment"] = {"OMP_NUM_THREADS": "8", "HF_HOME": "/h"}
    assert differences(before, now) == [
        "torch: 2.10.0 -> 2.11.0",
        "GPU 1: none -> H200 (GPU-2)",
        f"git commit: {before['git']['commit']} -> {'c' * 40}",
        "git working tree: no changed files -> changed files",
        f"script digest: {before['script_digest'][:16]} -> {'d' * 16}",
        "variable HF_HOME: none -> /h",
        "variable NCCL_DEBUG: INFO -> none",
        "variable OMP_NUM_THREADS: 4 -> 8",
    ]


def test_variables_of_a_desktop_or_a_prompt_are_none_of_a_scripts(code: Path) -> None:
    session = ("XAUTHORITY", "GTK_MODULES", "QT_IM_MODULE", "SYSTEMD_EXEC_PID", "STARSHIP_SHELL", "DIRENV_DIFF", "LESS")
    before = facts(code, LAB_DATA="a-place", **dict.fromkeys(session, "x"))
    assert gone_variables(before, {}) == ["LAB_DATA"]


def test_of_other_variables_the_names_alone_are_recorded_and_those_that_are_gone_are_known(code: Path) -> None:
    before = facts(
        code, LAB_DATA="a-place", API_KEY="a-secret", NCCL_DEBUG="INFO", SSH_TTY="/dev/pts/1", SLURM_JOB_ID="7"
    )
    assert before["variables"] == ["API_KEY", "LAB_DATA"]
    assert "a-place" not in json.dumps(before)
    assert "a-secret" not in json.dumps(before)
    assert gone_variables(before, {"API_KEY": "another", "NEW": "1"}) == ["LAB_DATA"]
    assert gone_variables({}, {}) == []


def test_what_was_not_recorded_is_not_compared(code: Path) -> None:
    assert differences({}, facts(code, NCCL_DEBUG="INFO")) == []
    assert differences({"environment": {}}, facts(code, NCCL_DEBUG="x" * 99)) == [
        f"variable NCCL_DEBUG: none -> {'x' * 77}..."
    ]
