from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.contract import CHECKPOINT_EVENT, RECORDS_FILE
from dsrun.launcher.resume_point import newest_checkpoint


def save(folder: Path, tag: str, *, complete: bool = True, time: float = 1.0) -> str:
    target = folder / "checkpoints" / tag
    target.mkdir(parents=True, exist_ok=True)
    if complete:
        (target / "index.json").write_text("{}")
    with (folder / RECORDS_FILE).open("a") as file:
        file.write(json.dumps({"event": "step", "time": time, "step": 3}) + "\n")
        file.write(json.dumps({"event": CHECKPOINT_EVENT, "time": time, "path": str(target), "step": 3}) + "\n")
    return str(target)


def test_a_job_without_records_has_nowhere_to_go_on_from(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path)) is None


def test_the_newest_save_that_is_complete_counts(tmp_path: Path) -> None:
    save(tmp_path, "step10")
    newest = save(tmp_path, "step20")
    save(tmp_path, "step30", complete=False)
    found = newest_checkpoint(str(tmp_path))
    assert found is not None
    assert found.folder == newest


def test_a_second_save_into_the_same_folder_is_another_one(tmp_path: Path) -> None:
    save(tmp_path, "last", time=1.0)
    first = newest_checkpoint(str(tmp_path))
    save(tmp_path, "last", time=2.0)
    second = newest_checkpoint(str(tmp_path))
    assert first is not None
    assert second is not None
    assert first.folder == second.folder
    assert first.identity != second.identity


@pytest.mark.parametrize(
    "rest", ['{"event": "checkpoint", "pa', '{"event": "checkpoint", "path": 3}', "[]", '"checkpoint"']
)
def test_a_line_that_was_cut_off_or_makes_no_sense_is_passed_over(tmp_path: Path, rest: str) -> None:
    whole = save(tmp_path, "step10")
    with (tmp_path / RECORDS_FILE).open("a") as file:
        file.write(rest)
    found = newest_checkpoint(str(tmp_path))
    assert found is not None
    assert found.folder == whole
