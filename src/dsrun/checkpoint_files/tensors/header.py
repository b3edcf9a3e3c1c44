"""The header of a safetensors file: written, and read strictly. Entries outside of the file, or on others, are refused.

Source: the format as its README specifies it: 8 bytes little-endian length, JSON header, data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dsrun.errors import CheckpointError

from ..index.damage import LARGEST, DamageError, a_member, a_text, an_object, shown, some_numbers
from ..index.dtypes import ITEMSIZE
from ..storage.places import Place, read_range
from ..storage.registry import storage_of

#: The format's own bound.
_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file: bytes [first, last) of it, from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What stands at the beginning of a file.

    Attributes:
        entries: header entry of each tensor by its key, in the order of the file.
        metadata: the free part.
        data_first: byte of the file at which data begins.
        nbytes: size of the file.
    """

    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    data_first: int
    nbytes: int


def header_bytes(
    entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], *, aligned: int = 8
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Returns what stands before the data, with its length, and the bytes [first, last) of the file each entry has.

    Args:
        entries: (dtype, shape) by key, in the order of the file.
        metadata: the free part.
        aligned: data begins at a multiple of it; a multiple of 8.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    spans: dict[str, tuple[int, int]] = {}
    offset = 0
    for key, (dtype, shape) in entries.items():
        spans[key] = (offset, offset + prod(shape) * ITEMSIZE[dtype])
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": spans[key]}
        offset = spans[key][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % aligned)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {
        key: (start + first, start + last) for key, (first, last) in spans.items()
    }


def read_header(path: Place) -> TensorHeader:
    """Reads the header of one file; of the data it reads nothing.

    Raises:
        CheckpointError: the file cannot be read, or its header does not fit it.
    """
    try:
        with storage_of(path).read(path) as file:
            length = int.from_bytes(read_range(file, 0, 8), "little")
            if not 2 <= length <= min(file.nbytes - 8, _LARGEST_HEADER):
                raise DamageError(f"its header is to have {length} bytes, and the file has {file.nbytes}")
            return _parse(read_range(file, 8, length), size=file.nbytes)
    except (OSError, DamageError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint="load another tag") from error


def _parse(text: bytes, *, size: int) -> TensorHeader:
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"its header is no JSON: {error}") from None
    members = dict(an_object(body, "its header"))
    metadata = {
        key: a_text(value, f"`__metadata__` {shown(key)}")
        for key, value in an_object(members.pop("__metadata__", {}), "`__metadata__`").items()
    }
    start = 8 + len(text)
    entries = {key: _entry(value, f"entry {shown(key)}", start=start, size=size) for key, value in members.items()}
    end = start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].last)):
        if entry.first != end:
            raise DamageError(f"entry {shown(key)} begins at byte {entry.first}, and the one before it ends at {end}")
        end = entry.last
    if end != size:
        raise DamageError(f"its entries end at byte {end}, and the file has {size}")
    return TensorHeader(entries, metadata, start, size)


def _entry(value: Any, place: str, *, start: int, size: int) -> HeaderEntry:
    members = an_object(value, place)
    dtype = a_text(a_member(members, "dtype", place), f"dtype of {place}")
    if dtype not in ITEMSIZE:
        raise DamageError(f"dtype of {place} is {shown(dtype)}, which this version does not know")
    shape = some_numbers(a_member(members, "shape", place), f"shape of {place}")
    offsets = some_numbers(a_member(members, "data_offsets", place), f"data_offsets of {place}")
    numel = prod(shape) if len(shape) <= 64 else LARGEST
    if len(offsets) != 2 or offsets[1] - offsets[0] != numel * ITEMSIZE[dtype]:
        raise DamageError(f"data_offsets of {place} are {shown(list(offsets))}, for {dtype} of shape {shown(shape)}")
    if start + offsets[1] > size:
        raise DamageError(f"{place} ends at byte {start + offsets[1]}, and the file has {size}")
    return HeaderEntry(dtype, shape, start + offsets[0], start + offsets[1])
