"""Small checkpoints written by hand, of both formats, for tests of what reads them. No torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from dsrun.checkpoint_files.index.region import Region
from dsrun.checkpoint_files.index.value import BLOCK_BYTES, INDEX_FILE, Index, StoredBox, StoredFile, StoredTensor

FILES = ("rank-00000-0a0a0a0a.safetensors", "rank-00001-0a0a0a0a.safetensors")
#: Rows of a tensor of shape (3, 4); the first file has one of them, the second two.
ROWS = [[float(10 * row + column) for column in range(4)] for row in range(3)]


def tensor_file(entries: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """The bytes of a safetensors file: (dtype, shape, data) by key."""
    header: dict[str, Any] = {"__metadata__": {"made": "by hand"}}
    offset = 0
    for key, (dtype, shape, data) in entries.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in entries.values())


def floats(values: list[float]) -> bytes:
    """fp32, little-endian."""
    return struct.pack(f"<{len(values)}f", *values)


def sums(content: bytes) -> tuple[str, ...]:
    """Checksums of a file's blocks."""
    return tuple(
        xxh3_64_hexdigest(content[first : first + BLOCK_BYTES]) for first in range(0, len(content), BLOCK_BYTES)
    )


def write_two_files(tag: Path) -> Index:
    """Writes a tag of format 2: `w` (3, 4) in two files, and a number `s` in the first; returns its index."""
    tag.mkdir(parents=True)
    contents = [
        tensor_file({"w:param@0@0": ("F32", [1, 4], floats(ROWS[0])), "s:buffer": ("F32", [], floats([2.5]))}),
        tensor_file({"w:param@1@0": ("F32", [2, 4], floats(ROWS[1] + ROWS[2]))}),
    ]
    starts = [8 + int.from_bytes(content[:8], "little") for content in contents]
    for name, content in zip(FILES, contents, strict=True):
        (tag / name).write_bytes(content)
    index = Index(
        2,
        {
            ("w", "param"): StoredTensor(
                (3, 4),
                "F32",
                [
                    StoredBox(Region((0, 0), (1, 4)), FILES[0], starts[0], starts[0] + 16),
                    StoredBox(Region((1, 0), (2, 4)), FILES[1], starts[1], starts[1] + 32),
                ],
            ),
            ("s", "buffer"): StoredTensor(
                (), "F32", [StoredBox(Region((), ()), FILES[0], starts[0] + 16, starts[0] + 20)]
            ),
            ("none", "buffer"): StoredTensor((0,), "BOOL"),
        },
        {"counters": {"global_steps": 3}, "rate": float("inf")},
        {name: StoredFile(len(content), sums(content)) for name, content in zip(FILES, contents, strict=True)},
        [{"seed": 1}, {"seed": 2}],
        {"tied": "w"},
    )
    (tag / INDEX_FILE).write_bytes(index.to_bytes())
    return index


def write_first_format(tag: Path) -> None:
    """Writes the same tensors as format 1 had them."""
    tag.mkdir(parents=True)
    (tag / FILES[0]).write_bytes(
        tensor_file({"w:param@0@0": ("F32", [1, 4], floats(ROWS[0])), "s:buffer": ("F32", [], floats([2.5]))})
    )
    (tag / FILES[1]).write_bytes(tensor_file({"w:param@1@0": ("F32", [2, 4], floats(ROWS[1] + ROWS[2]))}))
    boxes = [
        {"offset": [0, 0], "shape": [1, 4], "file": FILES[0], "key": "w:param@0@0"},
        {"offset": [1, 0], "shape": [2, 4], "file": FILES[1], "key": "w:param@1@0"},
    ]
    body = {
        "format": 1,
        "world_size": 2,
        "values": {"counters": {"global_steps": 3}},
        "tensors": {
            "w": {"param": {"shape": [3, 4], "dtype": "F32", "boxes": boxes}},
            "s": {"buffer": {"shape": [], "dtype": "F32", "boxes": [
                {"offset": [], "shape": [], "file": FILES[0], "key": "s:buffer"}]}},
        },
    }  # fmt: skip
    (tag / INDEX_FILE).write_text(json.dumps(body, indent=1))
