"""Ranks' files on the disk, and the publication that makes a checkpoint of them. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsrun.checkpoint_files.folder.publish import BOXES_KEY, Publication, file_name
from dsrun.checkpoint_files.index.value import StoredFile
from dsrun.checkpoint_files.tensors.header import header_bytes
from support.checkpoints import floats, sums


def part(tag: Path, rank: int, identity: str, *, rows: int = 2, shape: int = 4) -> StoredFile:
    """A rank's file with its rows of `w`."""
    box = {"key": "k", "name": "w", "role": "param", "shape": [shape, 3], "offset": [rows * rank, 0]}
    header, _ = header_bytes({"k": ("F32", (rows, 3))}, {BOXES_KEY: json.dumps([box])})
    content = header + floats([float(rank)] * 3 * rows)
    tag.mkdir(parents=True, exist_ok=True)
    (tag / file_name(rank, identity)).write_bytes(content)
    return StoredFile(len(content), sums(content))


def publication(folder: Path, tag: str, identity: str, **changes: Any) -> Publication:
    """What publishes a tag of two ranks, whose files are written."""
    files = changes.pop("files", None) or [part(folder / tag, rank, identity) for rank in range(2)]
    members: dict[str, Any] = {
        "folder": folder, "tag": tag, "identity": identity, "files": files, "values": {"a": 1}, "ranks": [],
        "aliases": {}, "save_latest": True, "keep_last": None, "keep_every": None,
    }  # fmt: skip
    return Publication(**{**members, **changes})
