"""Tensors that come one by one make the file that all at once would make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.export.streamed_file import StreamedFile

ENTRIES = {
    "b": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a": torch.arange(24).view(4, 6).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
}


def test_the_order_in_which_tensors_come_does_not_show(tmp_path: Path) -> None:
    meta = {key: torch.empty_like(value, device="meta") for key, value in ENTRIES.items()}
    for name, order in (("one", ("scalar", "a", "empty", "b")), ("other", tuple(ENTRIES))):
        file = StreamedFile(tmp_path / name, meta, metadata={"format": "pt"})
        for key in order:
            file.put(key, ENTRIES[key])
        file.finish()
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    found = load_file(tmp_path / "one")
    assert found.keys() == ENTRIES.keys()
    assert all(torch.equal(found[key], value) for key, value in ENTRIES.items())


def test_what_is_incomplete_is_noticed_and_leaves_nothing(tmp_path: Path) -> None:
    file = StreamedFile(tmp_path / "file", ENTRIES, metadata={})
    with pytest.raises(AssertionError, match="`b` has 4 bytes and was to have 48"):
        file.put("b", torch.zeros(1))
    with pytest.raises(AssertionError, match="4 tensors were not put, `a` for one"):
        file.finish()
    file.abandon()
    with pytest.raises(CheckpointError, match=r"`x` is torch\.complex128"):
        StreamedFile(tmp_path / "file", {"x": torch.zeros(1, dtype=torch.complex128)}, metadata={})
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(FileExistsError):
        StreamedFile(tmp_path / "file", ENTRIES, metadata={})
    assert (tmp_path / "file").read_text() == "here"
