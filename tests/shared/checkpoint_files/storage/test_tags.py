"""Tags are plain folder names that stay inside, and `latest` names one that is complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.storage.tags import (
    check_tag,
    complete_tags,
    is_plain_name,
    latest_tag,
    tag_to_load,
    tag_to_save,
    why_not_saved_to,
)
from dsrun.errors import CheckpointError


@pytest.mark.parametrize("tag", ["global_step10", "a", "5", "x=1", "v1.2+best", "a" * 200])
def test_plain_names_are_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag", ["", "..", "../a", "/a", "a/b", "a\0", "a\n", "-x", ".x", "latest", "a" * 201, "ä", "a b"]
)
def test_others_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag is"):
        check_tag(tag)
    assert tag == "latest" or len(tag) == 201 or not is_plain_name(tag)


def test_only_folders_with_an_index_are_complete_tags_oldest_first(tmp_path: Path) -> None:
    assert complete_tags(tmp_path) == []
    assert latest_tag(tmp_path / "missing") is None
    for name in ("b", "a", "partial"):
        (tmp_path / name).mkdir()
    for seconds, name in enumerate(("b", "a")):
        (tmp_path / name / INDEX_FILE).write_text("{}")
        os.utime(tmp_path / name / INDEX_FILE, (seconds, seconds))
    assert complete_tags(tmp_path) == ["b", "a"]
    (tmp_path / "latest").write_text("a\n")
    assert latest_tag(tmp_path) == "a"
    for content in ("partial", "../a", "", "a" * 1_000_000):
        (tmp_path / "latest").write_text(content)
        with pytest.raises(CheckpointError, match="is no complete checkpoint; complete tags here: b, a"):
            latest_tag(tmp_path)


def test_links_are_not_written_through_and_not_followed_outside(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "real").mkdir(parents=True)
    outside.mkdir()
    (folder / "best").symlink_to("real")
    (folder / "away").symlink_to(outside)
    assert tag_to_load(folder, "best") == folder / "best"
    assert tag_to_save(folder, "new") == folder / "new"
    with pytest.raises(CheckpointError, match="away: it is a link that leaves"):
        tag_to_load(folder, "away")
    for tag in ("best", "away"):
        with pytest.raises(CheckpointError, match="it is a link to"):
            tag_to_save(folder, tag)


def test_a_folder_that_cannot_be_made_is_told_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    for usable in (tmp_path, tmp_path / "a" / "b", Path("a/b"), Path(".")):
        assert why_not_saved_to(usable) is None
    assert why_not_saved_to(file / "a") == f"{file} is no folder"
    assert why_not_saved_to(Path("broken/a")) == "broken is no folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file"], "nothing was made"
