"""Tensors of two checkpoints are compared by their elements, in every format, and values by their paths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import Index, StoredBox, StoredFile, StoredTensor
from dsrun.checkpoint_files.verbs.compare import TensorDifference, absent, tensor_differences, value_differences

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def written(folder: Path, whole: Tensor, columns: int) -> tuple[Path, Index]:
    """A matrix, cut after so many columns into two boxes of one file without a header."""
    folder.mkdir()
    stored = StoredTensor(tuple(whole.shape), NAMES[whole.dtype])
    content = b""
    for start, stop in ((0, columns), (columns, whole.shape[1])):
        if start < stop:
            data = bytes(whole[:, start:stop].contiguous().view(torch.uint8).numpy())
            region = Region((0, start), (whole.shape[0], stop - start))
            stored.boxes.append(StoredBox(region, "f", len(content), len(content) + len(data)))
            content += data
    (folder / "f").write_bytes(content)
    return folder, Index(1, {("w", "param"): stored}, {}, {"f": StoredFile(len(content), None)})


def compared(tmp_path: Path, first: Tensor, second: Tensor) -> list[TensorDifference]:
    a, b = written(tmp_path / "a", first, 1), written(tmp_path / "b", second, 3)
    return list(tensor_differences(a, b))


@pytest.mark.parametrize("dtype", list(NAMES))
def test_the_same_elements_in_other_boxes_are_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.arange(300 * 500) % 7).view(300, 500).to(dtype)
    assert compared(tmp_path, whole, whole) == []


@pytest.mark.parametrize("dtype", [dtype for dtype in NAMES if dtype not in (torch.bool, torch.float8_e4m3fn)])
def test_differences_are_counted_and_the_largest_is_told(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.ones(300, 500, dtype=dtype)
    other = whole.clone()
    other[0, 0], other[299, 499] = 3, 6
    assert compared(tmp_path, whole, other) == [TensorDifference("w", "param", "values", "", 2, 150000, 5.0)]


def test_what_is_no_number_and_formats_without_arithmetic_have_no_largest(tmp_path: Path) -> None:
    whole = torch.ones(2, 4)
    other = whole.clone()
    other[1, 1] = float("nan")
    for name, (a, b) in {"nan": (whole, other), "f8": (whole.to(torch.float8_e4m3fn), 2 * whole)}.items():
        (tmp_path / name).mkdir()
        (found,) = compared(tmp_path / name, a, b.to(a.dtype))
        assert math.isnan(found.largest)
        assert found.differing == (1 if name == "nan" else 8)


def test_infinities_of_one_sign_differ_by_nothing(tmp_path: Path) -> None:
    whole = torch.full((2, 4), float("inf"))
    other = whole.clone()
    whole[0, 0], other[0, 0] = 1, 1.5
    assert [(one.differing, one.largest) for one in compared(tmp_path, whole, other)] == [(1, 0.5)]


def test_values_are_compared_by_path() -> None:
    first = {"a": {"b": 1, "c": [1, {"d": math.nan}]}, "e": True, "only": 1}
    second = {"a": {"b": 2, "c": [1, {"d": math.nan}]}, "e": 1, "other": None}
    assert [(one.path, one.first, one.second) for one in value_differences(first, second)] == [
        ("a.b", 1, 2),
        ("e", True, 1),
        ("only", 1, absent),
        ("other", absent, None),
    ]
    assert [one.path for one in value_differences({"a": [1]}, {"a": [1, 2]})] == ["a"]
