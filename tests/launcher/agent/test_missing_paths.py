from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.launcher.agent.missing_paths import missing_here
from dsrun.launcher.plan.launch_plan import LaunchPlan, ProgramKind
from support.jobs import program_plan


def plan(folder: Path, kind: ProgramKind, target: str, *, cwd: str | None = None) -> LaunchPlan:
    made = program_plan(folder, kind, target)
    return made if cwd is None else replace(made, cwd=cwd)


def test_nothing_is_missing_where_folder_and_script_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "app").mkdir()
    for target in ("train.py", str(tmp_path / "train.py"), "app"):
        assert missing_here(plan(tmp_path, "script", target)) is None


@pytest.mark.parametrize(("kind", "target"), [("module", "no.such"), ("command", "./no-such")])
def test_modules_and_commands_are_left_to_their_ranks(tmp_path: Path, kind: ProgramKind, target: str) -> None:
    assert missing_here(plan(tmp_path, kind, target)) is None


def test_a_script_counts_from_the_working_folder(tmp_path: Path) -> None:
    problem = missing_here(plan(tmp_path, "script", "sub/train.py"))
    assert problem is not None
    assert problem.message == f"script '{tmp_path}/sub/train.py': no such file there"


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    problem = missing_here(plan(tmp_path, "script", "/no/train.py", cwd="/no/such"))
    assert problem is not None
    assert problem.message == (
        "working folder '/no/such': no such folder there; script '/no/train.py': no such file there"
    )
    file = tmp_path / "file"
    file.touch()
    problem = missing_here(plan(tmp_path, "script", "train.py", cwd=str(file)))
    assert problem is not None
    assert problem.message == f"working folder '{file}': is no folder there"
