"""Files that the safetensors library reads back bit for bit, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.tensor_file import write_tensor_file


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32)
    entries = {
        "view": whole[5:17].view(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": whole.view(4, 6).t(),
        "bool": torch.tensor([True, False, True]),
        "ünïcode": torch.zeros(1),
        **{
            str(dtype): torch.arange(7).to(dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                          torch.int8, torch.uint8, torch.uint16, torch.complex64, torch.float8_e4m3fn)
        },
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, entries, metadata={"a": "b"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "b"}
    found = load_file(path)
    assert found.keys() == entries.keys()
    for key, value in entries.items():
        assert found[key].dtype == value.dtype
        assert found[key].shape == value.shape
        assert bytes_of(found[key]) == bytes_of(value)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`z` is torch\.complex128"):
        write_tensor_file(tmp_path / "a", {"z": torch.zeros(2, dtype=torch.complex128)}, metadata={})
    with pytest.raises(OSError, match="No such file"):
        write_tensor_file(tmp_path / "missing" / "a", {}, metadata={})
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensor_file(path, {"x": torch.ones(2)}, metadata={})
    with pytest.raises(FileExistsError):
        write_tensor_file(path, {"x": torch.zeros(2)}, metadata={})
    assert load_file(path)["x"].tolist() == [1.0, 1.0]


def test_every_tensor_written_is_progress(tmp_path: Path) -> None:
    calls: list[int] = []
    entries = {"x": torch.ones(2), "none": torch.ones(0), "y": torch.ones(3)}
    write_tensor_file(tmp_path / "a", entries, metadata={}, progress=lambda: calls.append(1))
    assert len(calls) == 2
