"""Files become a checkpoint only where they make whole tensors, and what is removed is nobody's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.publish import file_name, is_published, outlived, publish
from dsrun.checkpoint_files.folder.removal import remove_tag
from dsrun.checkpoint_files.index.value import INDEX_FILE, StoredFile
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls, try_lock
from dsrun.checkpoint_files.storage.tags import LATEST_FILE
from dsrun.errors import CheckpointError
from support.publications import part, publication


def test_what_is_published_is_read(tmp_path: Path) -> None:
    nbytes = publish(publication(tmp_path, "t", "0a0a0a0a"), calls=FileCalls())
    index = read_index(tmp_path / "t")
    assert index.tensors["w", "param"].shape == (4, 3)
    assert index.values == {"a": 1, "latest": 1}
    assert nbytes == sum(path.stat().st_size for path in (tmp_path / "t").iterdir())
    assert (tmp_path / LATEST_FILE).read_text() == "t"
    assert is_published(tmp_path / "t", "0a0a0a0a")
    assert not is_published(tmp_path / "t", "0b0b0b0b")
    assert not is_published(tmp_path / "other", "0b0b0b0b")
    (tmp_path / "t" / INDEX_FILE).write_text("damaged")
    assert is_published(tmp_path / "t", "0b0b0b0b"), "it cannot be known, so its files stay"


@pytest.mark.parametrize(
    ("second_shape", "more_bytes", "said"),
    [
        (None, 0, "the boxes have 6 elements together, and the tensor has 12"),
        (4, 1, "bytes, and [0-9]+ were written"),
        (5, 0, r"is F32 \(5, 3\) there, and elsewhere \(4, 3\)"),
    ],
)
def test_parts_that_make_no_whole_are_not_published(
    tmp_path: Path, second_shape: int | None, more_bytes: int, said: str
) -> None:
    tag = tmp_path / "t"
    publish(publication(tmp_path, "t", "0a0a0a0a"), calls=FileCalls())
    files: list[StoredFile | None] = [part(tag, 0, "0b0b0b0b"), None]
    if second_shape is not None:
        second = part(tag, 1, "0b0b0b0b", shape=second_shape)
        files[1] = StoredFile(second.nbytes + more_bytes, second.sums)
    with pytest.raises(CheckpointError, match=said):
        publish(publication(tmp_path, "t", "0b0b0b0b", files=files), calls=FileCalls())
    assert set(read_index(tag).files) == {file_name(rank, "0a0a0a0a") for rank in range(2)}


def test_only_what_nobody_names_or_writes_is_removed(tmp_path: Path) -> None:
    publish(publication(tmp_path, "t", "0a0a0a0a"), calls=FileCalls())
    part(tmp_path / "t", 7, "0b0b0b0b")  # of a save that was killed
    part(tmp_path / "t", 8, "0c0c0c0c")  # of one that is under way
    writing = os.open(tmp_path / "t" / file_name(8, "0c0c0c0c"), os.O_RDWR)
    assert try_lock(writing)
    (tmp_path / "t" / "notes.txt").write_text("the user's own")
    (tmp_path / "outside").write_text("not to be touched")
    (tmp_path / "t" / file_name(9, "0d0d0d0d")).symlink_to(tmp_path / "outside")
    publish(publication(tmp_path, "t", "0e0e0e0e"), calls=FileCalls())
    os.close(writing)
    assert {path.name for path in (tmp_path / "t").iterdir()} == {
        INDEX_FILE, "notes.txt", file_name(0, "0e0e0e0e"), file_name(1, "0e0e0e0e"), file_name(8, "0c0c0c0c"),
        file_name(9, "0d0d0d0d"),
    }  # fmt: skip
    assert (tmp_path / "outside").read_text() == "not to be touched"
    remove_tag(tmp_path / "t", calls=FileCalls())
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"notes.txt", file_name(9, "0d0d0d0d")}


@pytest.mark.parametrize(
    ("last", "every", "tag", "expected"),
    [
        (1, None, "global_step9", ["global_step2", "global_step3", "global_step10"]),
        (3, None, "global_step9", ["global_step2"]),
        (3, None, "best", []),
        (2, 5, "best", ["global_step2"]),
        (1, 2, "global_step9", ["global_step3"]),
        (9, None, "global_step9", []),
    ],
)
def test_which_ones_are_outlived(tmp_path: Path, last: int, every: int | None, tag: str, expected: list[str]) -> None:
    for name in ("global_step2", "global_step3", "global_step10", "mine"):
        publish(publication(tmp_path, name, "0a0a0a0a", save_latest=False), calls=FileCalls())
    (tmp_path / "global_step1").mkdir()  # no checkpoint: it has no index
    wanted = publication(tmp_path, tag, "0b0b0b0b", keep_last=last, keep_every=every)
    assert outlived(wanted) == expected
    (tmp_path / LATEST_FILE).write_text("global_step2")
    assert "global_step2" not in outlived(wanted)
