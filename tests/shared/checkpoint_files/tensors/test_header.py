"""Headers of safetensors files: the library's are read, and what nobody may rely on is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.checkpoint_files.tensors.header import read_header
from dsrun.errors import CheckpointError
from support.checkpoints import floats, tensor_file


def test_entries_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(
        tensor_file({"a": ("F32", [2], floats([1, 2])), "none": ("F32", [0], b""), "b": ("U8", [3], b"xyz")})
    )
    header = read_header(path)
    content = path.read_bytes()
    assert content[header.entries["b"].first : header.entries["b"].last] == b"xyz"
    assert (header.entries["a"].dtype, header.entries["a"].shape) == ("F32", (2,))
    assert header.metadata == {"made": "by hand"}
    assert header.nbytes == len(content)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": entry(dtype="F1")}, "which this version does not know"),
        ({"a": entry(shape=[3])}, "for F32 of shape"),
        ({"a": entry(shape=[-2])}, "is -2; expected a whole number"),
        ({"a": entry(data_offsets=[-8, 0])}, "is -8"),
        ({"a": entry(), "b": entry()}, "begins at byte"),
        ({"a": entry(data_offsets=[8, 16])}, "ends at byte"),
        ({}, "its entries end at byte"),
        ({"a": 3}, "is 3; expected an object"),
        ([], "is a list; expected an object"),
        ({"__metadata__": {"x": 1}, "a": entry()}, "expected a text"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, header: Any, said: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=said):
        read_header(tmp_path / "x")


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, content: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-header"
    for start in (length.to_bytes(8, "little"), len(content).to_bytes(8, "little"), b""):
        path.write_bytes(start + content)
        with suppress(CheckpointError):
            assert not read_header(path).entries, "of a file without tensors, `{}`"


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(tensor_file({}))
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(CheckpointError, match="link: cannot be read"):
        read_header(tmp_path / "link")
