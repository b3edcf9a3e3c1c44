"""How tensors are spread over files; that the files are read is shown in engine/saving/test_export.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsrun.runtime.checkpoint.export.model_files import StreamedModel, cut

TENSORS = {name: torch.ones(numel) for name, numel in (("a", 2), ("b", 1), ("c", 9), ("d", 0), ("e", 3))}


@pytest.mark.parametrize(
    ("shard_bytes", "expected"),
    [
        (None, ["abcde"]),
        (1000, ["abcde"]),
        (12, ["ab", "cd", "e"]),
        (11, ["a", "b", "cd", "e"]),
        (1, [*"ab", "cd", "e"]),
    ],
)
def test_a_file_has_what_fits_or_one_tensor(shard_bytes: int | None, expected: list[str]) -> None:
    assert cut(TENSORS, shard_bytes) == [list(names) for names in expected]


def test_a_model_without_tensors_is_one_file() -> None:
    assert cut({}, 5) == [[]]


def test_an_error_waits_for_the_end_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saving = StreamedModel(tmp_path / "file" / "model.safetensors", TENSORS)
    saving.put("a", TENSORS["a"])
    with pytest.raises(OSError, match="file"):
        saving.finish()
    saving = StreamedModel(tmp_path / "model.safetensors", TENSORS, shard_bytes=12)
    saving.put("a", TENSORS["a"])
    saving.abandon()
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
