"""Which checkpoint a load means: the tag asked for, the one to go on from, the latest."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.storage.deepspeed_tags import LATEST_UNIVERSAL_FILE
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.tags import LATEST_FILE
from dsrun.errors import CheckpointError, InputError
from dsrun.runtime.engine.saving.resume import choose_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with the tags `old` and `new`, of which `latest` names the second."""
    for tag in ("old", "new"):
        (tmp_path / "run" / tag).mkdir(parents=True)
        (tmp_path / "run" / tag / INDEX_FILE).write_text("{}")
    (tmp_path / "run" / LATEST_FILE).write_text("new")
    return tmp_path / "run"


def test_a_tag_goes_before_the_one_to_go_on_from_and_that_before_the_latest(folder: Path) -> None:
    resume = folder / "old"
    assert choose_checkpoint(folder, "new", resume=resume, missing_ok=False) == folder / "new"
    assert choose_checkpoint(folder, None, resume=resume, missing_ok=False) == folder / "old"
    assert choose_checkpoint(folder, None, resume=None, missing_ok=False) == folder / "new"


def test_the_latest_universal_one_goes_before_the_latest_where_there_is_one(folder: Path) -> None:
    def choose(**more: bool) -> Place | None:
        return choose_checkpoint(folder, None, resume=None, missing_ok=False, **more)

    assert choose(universal=True) == folder / "new"
    (folder / LATEST_UNIVERSAL_FILE).write_text("old\n")
    assert choose(universal=True) == folder / "old"
    assert choose() == folder / "new"
    (folder / "theirs").mkdir()
    (folder / "theirs" / "mp_rank_00_model_states.pt").touch()
    (folder / LATEST_UNIVERSAL_FILE).write_text("theirs")
    assert choose(universal=True) == folder / "theirs"
    for wrong in ("gone", "../run/old", ""):
        (folder / LATEST_UNIVERSAL_FILE).write_text(wrong)
        with pytest.raises(CheckpointError, match=r"latest_universal: it names .* which is no complete checkpoint"):
            choose(universal=True)


def test_a_job_started_again_needs_no_folder(folder: Path) -> None:
    assert choose_checkpoint(None, None, resume=folder / "old", missing_ok=False) == folder / "old"


def test_a_folder_is_the_same_however_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert choose_checkpoint(Path("run/../run"), None, resume=folder / "old", missing_ok=False) == folder / "old"


def test_another_folder_is_loaded_as_asked_also_in_a_job_started_again(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "base-model" / "old"
    assert choose_checkpoint(folder, None, resume=elsewhere, missing_ok=False) == folder / "new"


def test_nothing_to_load_is_an_error_unless_a_start_from_scratch_is_meant(tmp_path: Path) -> None:
    for load_dir in (tmp_path, None):
        assert choose_checkpoint(load_dir, None, resume=None, missing_ok=True) is None
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        choose_checkpoint(tmp_path, None, resume=None, missing_ok=False)
    with pytest.raises(InputError, match="there is no load_dir, and this job was not started again"):
        choose_checkpoint(None, None, resume=None, missing_ok=False)
    with pytest.raises(InputError, match="tag is 'a', and there is no load_dir"):
        choose_checkpoint(None, "a", resume=tmp_path / "b", missing_ok=True)
