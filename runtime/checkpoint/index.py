"""The index of a checkpoint: which box of which tensor lies in which file. Reads and writes JSON values, no tensors.

    <folder>/latest                       name of the newest complete tag
    <folder>/<tag>/index.json             this index; a tag without it is no checkpoint
    <folder>/<tag>/rank-00000-<id>.safetensors   one a rank; each entry is one box

See docs/internals/checkpoint-format.md.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.checkpoint_files.region import Region
from dsrun.errors import CheckpointError

FORMAT = 1
INDEX_FILE = "index.json"
LATEST_FILE = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box of a tensor on disk: entry `key` of the safetensors file `file`."""

    region: Region
    file: str
    key: str


@dataclass(slots=True)
class StoredTensor:
    """All boxes of one role of one tensor; together they cover `shape` once."""

    shape: tuple[int, ...]
    dtype: str
    boxes: list[StoredBox] = field(default_factory=list[StoredBox])


@dataclass(slots=True)
class Index:
    """A checkpoint's index.

    Attributes:
        world_size: ranks that wrote it.
        tensors: (name, role) to what is stored.
        values: everything that is no tensor, as JSON values: counters, schedule, data position, client state, config.
    """

    world_size: int
    tensors: dict[tuple[str, str], StoredTensor]
    values: dict[str, Any]

    def to_bytes(self) -> bytes:
        """Returns the index as JSON text; `read_index` reads it back."""
        tensors: dict[str, dict[str, Any]] = {}
        for (name, role), stored in self.tensors.items():
            tensors.setdefault(name, {})[role] = {
                "shape": stored.shape,
                "dtype": stored.dtype,
                "boxes": [
                    {"offset": box.region.offset, "shape": box.region.shape, "file": box.file, "key": box.key}
                    for box in stored.boxes
                ],
            }
        body = {"format": FORMAT, "world_size": self.world_size, "values": self.values, "tensors": tensors}
        return json.dumps(body, indent=1).encode()

    def state_roles(self) -> set[str]:
        """Returns every role of an optimizer state that some tensor has."""
        return {role for _, role in self.tensors} - {"param", "buffer"}


def read_index(folder: Path) -> Index:
    """Reads the index of the tag folder `folder`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer dsrun wrote it.
    """
    path = folder / INDEX_FILE
    try:
        body: Any = json.loads(path.read_bytes())
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format is {body['format']!r}; this version reads format {FORMAT}",
                hint="load it with the dsrun version that wrote it",
            )
        tensors = {
            (name, role): StoredTensor(
                tuple(stored["shape"]),
                stored["dtype"],
                [
                    StoredBox(Region(tuple(b["offset"]), tuple(b["shape"])), b["file"], b["key"])
                    for b in stored["boxes"]
                ],
            )
            for name, roles in body["tensors"].items()
            for role, stored in roles.items()
        }
        return Index(int(body["world_size"]), tensors, body["values"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no complete checkpoint: {INDEX_FILE} is missing{_tags_hint(folder.parent)}",
            hint="the save was interrupted, or this is another tool's folder; load another tag",
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="load another tag") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the index is damaged: {error!r}", hint="load another tag") from error


def check_tag(tag: str) -> str:
    """Returns `tag` if it is one plain folder name.

    Raises:
        CheckpointError: it is empty, too long, or could leave the checkpoint folder.
    """
    if not _TAG.fullmatch(tag) or tag == LATEST_FILE:
        shown = tag if len(tag) <= 80 else f"{tag[:80]}..."
        raise CheckpointError(
            f"checkpoint tag is {shown!r}; expected 1 to 200 letters, digits, `_`, `.`, `+`, `=` or `-`, "
            f"not starting with a dot or dash, and not `{LATEST_FILE}`",
        )
    return tag


def latest_tag(folder: Path) -> str | None:
    """Returns the tag that `latest` names, or None where there is no `latest`.

    Raises:
        CheckpointError: `latest` names no checkpoint; the message lists the tags there are.
    """
    path = folder / LATEST_FILE
    try:
        text = path.read_bytes()[:300].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}{_tags_hint(folder)}", hint="pass tag=") from error
    if not _TAG.fullmatch(text) or not (folder / text / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{path}: it names {text!r}, which is no complete checkpoint{_tags_hint(folder)}",
            hint="pass tag= with one of the tags there are",
        )
    return text


def complete_tags(folder: Path) -> list[str]:
    """Returns the tags in `folder` that have an index, oldest first."""
    found = sorted(folder.glob(f"*/{INDEX_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    return [path.parent.name for path in found]


def _tags_hint(folder: Path) -> str:
    tags = complete_tags(folder)
    return f"; complete tags here: {', '.join(tags)}" if tags else "; there is no complete tag here"
