"""The index comes back from its bytes, and tags are plain folder names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredBox,
    StoredTensor,
    check_tag,
    complete_tags,
    latest_tag,
    read_index,
)
from dsrun.runtime.layout.region import Region


def index() -> Index:
    boxes = [StoredBox(Region((0, 0), (1, 3)), "a", "w@0@0"), StoredBox(Region((1, 0), (1, 3)), "b", "w@1@0")]
    tensors = {
        ("w", "param"): StoredTensor((2, 3), "F32", boxes),
        ("w", "exp_avg"): StoredTensor((2, 3), "F32"),
        ("s", "scalar:step"): StoredTensor((), "F32", [StoredBox(Region((), ()), "a", "s")]),
        ("none", "buffer"): StoredTensor((0,), "BOOL"),
    }
    return Index(2, tensors, {"counters": {"global_steps": 3}, "rate": float("inf")})


def test_an_index_comes_back(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_bytes(index().to_bytes())
    assert read_index(tmp_path) == index()
    assert index().state_roles() == {"exp_avg", "scalar:step"}


@pytest.mark.parametrize("tag", ["global_step10", "a", "5", "x=1,".rstrip(","), "v1.2+best", "a" * 200])
def test_plain_names_are_tags(tag: str) -> None:
    assert check_tag(tag) == tag


def test_only_folders_with_an_index_are_complete_tags_oldest_first(tmp_path: Path) -> None:
    assert complete_tags(tmp_path) == []
    assert latest_tag(tmp_path / "missing") is None
    for name in ("b", "a", "partial"):
        (tmp_path / name).mkdir()
    for seconds, name in enumerate(("b", "a")):
        (tmp_path / name / INDEX_FILE).write_bytes(index().to_bytes())
        os.utime(tmp_path / name / INDEX_FILE, (seconds, seconds))
    assert complete_tags(tmp_path) == ["b", "a"]
    (tmp_path / "latest").write_text("a\n")
    assert latest_tag(tmp_path) == "a"
    (tmp_path / "latest").write_text("partial")
    with pytest.raises(CheckpointError, match="names 'partial', which is no complete checkpoint"):
        latest_tag(tmp_path)
