"""The index of a checkpoint as a value, and as the bytes of `index.json`. Read back in `checkpoint_files/parse.py`.

    <folder>/latest                              name of the newest complete tag
    <folder>/<tag>/index.json                    this index; a tag without it is no checkpoint
    <folder>/<tag>/rank-00000-<id>.safetensors   at most one a rank

See docs/internals/checkpoint-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_hexdigest

from .region import Region

#: Version that is written; older ones are read.
FORMAT = 2
INDEX_FILE = "index.json"
#: A checksum covers so many bytes of a file, from its start on; the last one what is left.
BLOCK_BYTES = 16 << 20
#: Roles that are no optimizer's.
ROLES_OF_NO_OPTIMIZER = frozenset({"param", "buffer", "rng", "client"})

_BEGIN = '{"format": 2, "xxh3": "'
_UNSUMMED = "0" * 16


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box of a tensor on disk: its elements in row-major order are bytes [first, last) of `file`."""

    region: Region
    file: str
    first: int
    last: int


@dataclass(slots=True)
class StoredTensor:
    """All boxes of one role of one tensor; together they cover `shape` once.

    Attributes:
        shape: shape of the whole tensor.
        dtype: name of the dtype in safetensors; see `dtypes.py`.
        boxes: boxes on disk, in any order; none for a tensor without elements.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: list[StoredBox] = field(default_factory=list[StoredBox])


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the tag's folder.

    Attributes:
        nbytes: its size.
        sums: xxh3-64 of each block of `BLOCK_BYTES`, in hexadecimal; None in format 1, which has none.
    """

    nbytes: int
    sums: tuple[str, ...] | None


@dataclass(slots=True)
class Index:
    """A checkpoint's index.

    Attributes:
        world_size: ranks that wrote it.
        tensors: (name, role) to what is stored. Roles: `param`, `buffer`, states of the optimizer by torch's names,
            `rng` (random-number states, a name for each rank), `client` (tensors of the script's client state).
        files: name to what is known of it; every file that a box names.
        values: JSON values that are no tensors and the same for all ranks, such as counters, optimizer, scheduler,
            data, client_state, config, versions and git.
        ranks: JSON values that are no tensors and differ by rank, one object for each rank; empty where no rank had
            any.
        aliases: name of a tied parameter to the name it is stored under.
        format: version it was read from.
    """

    world_size: int
    tensors: dict[tuple[str, str], StoredTensor]
    values: dict[str, Any]
    files: dict[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    ranks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    format: int = FORMAT

    def find(self, name: str, role: str) -> StoredTensor | None:
        """Returns what is stored of a tensor, also under the name that it was tied to."""
        found = self.tensors.get((name, role))
        return found if found is not None else self.tensors.get((self.aliases.get(name, name), role))

    def state_roles(self) -> set[str]:
        """Returns every role of an optimizer state that some tensor has."""
        return {role for _, role in self.tensors} - ROLES_OF_NO_OPTIMIZER

    def to_bytes(self) -> bytes:
        """Returns the index as JSON text of format 2, a tensor a line, with its own checksum; see `with_sum`."""
        by_name: dict[str, dict[str, Any]] = {}
        for (name, role), stored in self.tensors.items():
            by_name.setdefault(name, {})[role] = {
                "shape": stored.shape,
                "dtype": stored.dtype,
                "boxes": [
                    {
                        "offset": box.region.offset,
                        "shape": box.region.shape,
                        "file": box.file,
                        "bytes": (box.first, box.last),
                    }
                    for box in stored.boxes
                ],
            }
        files = {name: {"bytes": file.nbytes, "xxh3": file.sums} for name, file in self.files.items()}
        sections = [
            f'"world_size": {self.world_size}',
            f'"block_bytes": {BLOCK_BYTES}',
            *(
                f"{json.dumps(name)}: {json.dumps(value)}"
                for name, value in (
                    ("aliases", self.aliases),
                    ("values", self.values),
                    ("ranks", self.ranks),
                )
            ),
            f'"files": {_lines(files)}',
            f'"tensors": {_lines(by_name)}',
        ]
        return with_sum(f'{_BEGIN}{_UNSUMMED}",\n{_joined(sections)}}}\n'.encode())


def with_sum(text: bytes) -> bytes:
    """Returns the bytes of an index of format 2 with their checksum put in: taken as though its digits were zeros."""
    start = len(_BEGIN)
    zeros = b"".join((text[:start], _UNSUMMED.encode(), text[start + len(_UNSUMMED) :]))
    return b"".join((zeros[:start], xxh3_64_hexdigest(zeros).encode(), zeros[start + len(_UNSUMMED) :]))


def is_summed_right(text: bytes) -> bool:
    """Whether bytes are those of an index of format 2 as it was written."""
    return text.startswith(_BEGIN.encode()) and with_sum(text) == text


def block_count(nbytes: int) -> int:
    """Returns how many blocks a file of `nbytes` has."""
    return -(-nbytes // BLOCK_BYTES)


def _joined(sections: Sequence[str]) -> str:
    return ",\n".join(sections)


def _lines(values: dict[str, Any]) -> str:
    """Returns an object with a line for each of its keys."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "{}" if not lines else "{\n" + ",\n".join(lines) + "\n}"
