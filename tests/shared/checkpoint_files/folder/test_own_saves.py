"""Who looks for checkpoints waits for what its own job is still writing, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.listing import list_tags
from dsrun.checkpoint_files.folder.own_saves import SavingMark, wait_for_own_saves
from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import CheckpointError
from support.checkpoints import write_two_files

#: Makes a mark, says so, and ends when it is told to: without releasing the mark, as a process that is killed.
_MARKS = """
import os, sys
from pathlib import Path
from dsrun.checkpoint_files.folder.own_saves import SavingMark
mark = SavingMark(Path(sys.argv[1]), "0a", timeout_s=60.0)
print("marked", flush=True)
sys.stdin.readline()
os._exit(1)
"""
#: Lists checkpoints, and says when it begins to wait for one.
_LISTS = """
import sys
from pathlib import Path
import dsrun.checkpoint_files.folder.own_saves as own_saves
from dsrun.checkpoint_files.folder.listing import list_tags
wait = own_saves._wait
def say(*args):
    print("waiting", flush=True)
    wait(*args)
own_saves._wait = say
print([tag.name for tag in list_tags(Path(sys.argv[1]))], flush=True)
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_a_rank_has_started_waits_for_the_ranks_save(tmp_path: Path) -> None:
    mark = SavingMark(tmp_path / "tag", "0a", timeout_s=60.0)
    with start(_LISTS, tmp_path) as lists:
        assert line_of(lists) == "waiting"
        write_two_files(tmp_path / "tag")
        mark.release()
        assert line_of(lists) == "['tag']"
    assert not list(tmp_path.glob(".*"))


def test_another_process_of_the_job_waits_until_the_one_that_saves_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_ID_ENV, "a-job")
    with start(_MARKS, tmp_path / "tag") as marks:
        assert line_of(marks) == "marked"
        with start(_LISTS, tmp_path) as lists:
            assert line_of(lists) == "waiting"
            assert marks.stdin is not None
            marks.stdin.close()
            assert line_of(lists) == "[]"
    (left,) = tmp_path.glob(".saving-*")
    SavingMark(tmp_path / "next", "0b", timeout_s=60.0).release()
    assert not left.exists()


def test_nobody_waits_for_another_jobs_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(_MARKS, tmp_path / "tag") as marks:  # no parent of this process
        assert line_of(marks) == "marked"
        wait_for_own_saves(tmp_path)
        monkeypatch.setenv(JOB_ID_ENV, "another-job")
        wait_for_own_saves(tmp_path)


def test_a_save_that_takes_too_long_is_named_and_one_of_another_tag_is_not_waited_for(tmp_path: Path) -> None:
    write_two_files(tmp_path / "old")
    mark = SavingMark(tmp_path / "new", "0a", timeout_s=0.0)
    with pytest.raises(CheckpointError, match=r"new: process \d+ on .* has been writing it for more than 0 s"):
        list_tags(tmp_path)
    with pytest.raises(CheckpointError, match="has been writing it"):
        find_tag(tmp_path / "new")
    assert find_tag(tmp_path / "old") == tmp_path / "old"
    mark.release()
    assert [tag.name for tag in list_tags(tmp_path)] == ["old"]


def test_a_folder_that_is_no_folder_has_no_saves(tmp_path: Path) -> None:
    (tmp_path / ".saving-x").write_text("no mark")
    wait_for_own_saves(tmp_path / "nowhere")
    wait_for_own_saves(tmp_path)
