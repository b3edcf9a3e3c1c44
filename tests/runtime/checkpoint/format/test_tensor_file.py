"""Names of dtypes go both ways, and headers are those that the safetensors library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dsrun.checkpoint_files.index.dtypes import ITEMSIZE
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.tensor_file import bytes_of, dtype_name, dtype_named, header_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_has_a_name_and_an_itemsize(dtype: torch.dtype) -> None:
    name = dtype_name(torch.zeros(1, dtype=dtype), "x")
    assert dtype_named(name) == dtype
    assert ITEMSIZE[name] == dtype.itemsize


def test_dtypes_without_a_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"`z` is torch\.complex128"):
        dtype_name(torch.zeros(2, dtype=torch.complex128), "z")
    with pytest.raises(CheckpointError, match="dtype F8_E8M0 is one"):
        dtype_named("F8_E8M0")


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32)
    entries = {
        "view": whole[5:17].view(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": whole.view(4, 6).t(),
        "ünïcode": torch.zeros(1),
        **{str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
    }
    text, places = header_of(entries, {"a": "b"})
    path = tmp_path / "x.safetensors"
    content = bytearray(text) + bytes(max(last for _, last in places.values()) - len(text))
    for key, (first, last) in places.items():
        content[first:last] = bytes_of(entries[key])
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "b"}
    found = load_file(path)
    assert found.keys() == entries.keys()
    for key, value in entries.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert bytes(bytes_of(found[key])) == bytes(bytes_of(value))
