"""Reading an index that anybody may have written: every value is checked before it is used.

Format 2 carries its own checksum. Format 1 has none, and names boxes by keys of files, whose headers are read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from dsrun.errors import CheckpointError

from .index.coverage import wrong_cover
from .index.damage import LARGEST, DamageError, a_list, a_member, a_number, a_text, an_object, shown, some_numbers
from .index.dtypes import ITEMSIZE
from .index.region import Region
from .index.value import (
    BLOCK_BYTES,
    FORMAT,
    INDEX_FILE,
    Index,
    StoredBox,
    StoredFile,
    StoredTensor,
    block_count,
    is_summed_right,
)
from .index.values import check_values
from .storage.deepspeed_tags import is_deepspeed_tag
from .storage.places import Place, read_range
from .storage.registry import storage_of
from .storage.tags import is_plain_name, tags_hint
from .tensors.header import TensorHeader, read_header

#: Of 10,000 tensors on 100 ranks it has a third of a GiB.
_LARGEST_INDEX = 2 << 30
_MOST_DIMS = 64
_HINT = "load another tag"


def read_index(folder: Place) -> Index:
    """Reads the index of the tag folder `folder`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer dsrun wrote it.
    """
    path = folder / INDEX_FILE
    try:
        with storage_of(path).read(path) as file:
            if file.nbytes > _LARGEST_INDEX:
                raise CheckpointError(f"{path}: the index is damaged: it has {file.nbytes} bytes", hint=_HINT)
            text = read_range(file, 0, file.nbytes)
    except FileNotFoundError:
        hint = "the save was interrupted, or this is another tool's folder; load another tag"
        if is_deepspeed_tag(folder):
            hint = f"DeepSpeed saved it: `dsrun checkpoint import --trust-pickle {folder} OUT`, and load OUT"
        raise CheckpointError(
            f"{folder}: no complete checkpoint: {INDEX_FILE} is missing{tags_hint(folder.parent)}", hint=hint
        ) from None
    except (OSError, DamageError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", hint=_HINT) from error
    return parse_index(text, folder)


def parse_index(text: bytes, folder: Place) -> Index:
    """Returns the index of `folder` that `text` is.

    Args:
        text: the bytes of `index.json`.
        folder: the tag's, for messages; of format 1, its files' headers are read.

    Raises:
        CheckpointError: naming the place that is damaged.
    """
    path = folder / INDEX_FILE
    try:
        body = an_object(_load(text), "it")
        number = a_member(body, "format", "")
        if type(number) is int and number == 1:
            return _parse_first(body, folder)
        if type(number) is not int or number != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format is {shown(number)}; this version reads formats 1 and {FORMAT}",
                hint="load it with the dsrun version that wrote it",
            )
        if not is_summed_right(text):
            raise DamageError("its checksum does not fit: a bit has flipped, or somebody has changed it")
        return _parse_second(body)
    except DamageError as error:
        raise CheckpointError(f"{path}: the index is damaged: {error}", hint=_HINT) from error


def _load(text: bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"it is no JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise DamageError("an object has a key twice")
    return members


def _values(body: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(an_object(a_member(body, "values", ""), "`values`"))
    check_values(values)
    return values


# Format 2 -------------------------------------------------------------------------------------------------------------


def _parse_second(body: Mapping[str, Any]) -> Index:
    world_size = a_number(a_member(body, "world_size", ""), "`world_size`", at_least=1)
    block_bytes = a_number(a_member(body, "block_bytes", ""), "`block_bytes`", at_least=1)
    if block_bytes != BLOCK_BYTES:
        raise DamageError(f"`block_bytes` is {block_bytes}; expected {BLOCK_BYTES}")
    members = an_object(a_member(body, "files", ""), "`files`")
    files = {name: _file(name, value, f"`files` {shown(name)}") for name, value in members.items()}
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name, roles in an_object(a_member(body, "tensors", ""), "`tensors`").items():
        for role, value in an_object(roles, f"`tensors` {shown(name)}").items():
            tensors[name, role] = _tensor(value, f"{shown(role)} of {shown(name)}", files)
    _check_apart(tensors)
    ranks = a_list(a_member(body, "ranks", ""), "`ranks`")
    if len(ranks) not in (0, world_size):
        raise DamageError(f"`ranks` has {len(ranks)} entries for {world_size} ranks")
    return Index(
        world_size,
        tensors,
        _values(body),
        files,
        [dict(an_object(value, f"`ranks`[{rank}]")) for rank, value in enumerate(ranks)],
        _aliases(a_member(body, "aliases", ""), tensors),
    )


def _file(name: str, value: Any, place: str) -> StoredFile:
    if not is_plain_name(name):
        raise DamageError(f"{place} is no plain file name")
    members = an_object(value, place)
    nbytes = a_number(a_member(members, "bytes", place), f"`bytes` of {place}")
    sums = [a_text(one, f"`xxh3` of {place}") for one in a_list(a_member(members, "xxh3", place), f"`xxh3` of {place}")]
    if len(sums) != block_count(nbytes):
        raise DamageError(f"{place} has {len(sums)} checksums for {nbytes} bytes; expected {block_count(nbytes)}")
    for one in sums:
        if len(one) != 16 or not set(one) <= set("0123456789abcdef"):
            raise DamageError(f"`xxh3` of {place} has {shown(one)}; expected 16 hexadecimal digits")
    return StoredFile(nbytes, tuple(sums))


def _tensor(value: Any, place: str, files: Mapping[str, StoredFile]) -> StoredTensor:
    members = an_object(value, place)
    dtype = _dtype(a_member(members, "dtype", place), place)
    shape = _shape(a_member(members, "shape", place), place)
    boxes: list[StoredBox] = []
    for number, box in enumerate(a_list(a_member(members, "boxes", place), f"`boxes` of {place}")):
        boxes.append(_box(box, f"box {number} of {place}", len(shape), ITEMSIZE[dtype], files))
    wrong = wrong_cover(shape, [box.region for box in boxes])
    if wrong is not None:
        raise DamageError(f"{place}: {wrong}")
    return StoredTensor(shape, dtype, boxes)


def _dtype(value: Any, place: str) -> str:
    dtype = a_text(value, f"dtype of {place}")
    if dtype not in ITEMSIZE:
        raise DamageError(f"dtype of {place} is {shown(dtype)}, which this version does not know")
    return dtype


def _shape(value: Any, place: str) -> tuple[int, ...]:
    shape = some_numbers(value, f"shape of {place}")
    if len(shape) > _MOST_DIMS or prod(shape) > LARGEST:
        raise DamageError(f"shape of {place} is {shown(shape)}, which no tensor has")
    return shape


def _region(members: Mapping[str, Any], place: str, dims: int) -> Region:
    offset = some_numbers(a_member(members, "offset", place), f"offset of {place}")
    shape = some_numbers(a_member(members, "shape", place), f"shape of {place}")
    if not len(offset) == len(shape) == dims:
        raise DamageError(f"{place} has {len(offset)} offsets and {len(shape)} sizes for {dims} dims")
    return Region(offset, shape)


def _box(value: Any, place: str, dims: int, itemsize: int, files: Mapping[str, StoredFile]) -> StoredBox:
    members = an_object(value, place)
    region = _region(members, place, dims)
    name = a_text(a_member(members, "file", place), f"file of {place}")
    if name not in files:
        raise DamageError(f"file of {place} is {shown(name)}, which `files` does not list")
    span = some_numbers(a_member(members, "bytes", place), f"bytes of {place}")
    if len(span) != 2 or span[1] - span[0] != region.numel * itemsize:
        raise DamageError(f"bytes of {place} are {shown(span)}, for {region.numel} elements of {itemsize} bytes")
    if span[1] > files[name].nbytes:
        raise DamageError(f"{place} ends at byte {span[1]} of {shown(name)}, which has {files[name].nbytes}")
    return StoredBox(region, name, span[0], span[1])


def _check_apart(tensors: Mapping[tuple[str, str], StoredTensor]) -> None:
    """Refuses two boxes that lie on the same bytes."""
    spans = sorted(
        (box.file, box.first, box.last, name, role) for (name, role), stored in tensors.items() for box in stored.boxes
    )
    for before, after in pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            raise DamageError(
                f"boxes of {shown(before[3])} ({before[4]}) and {shown(after[3])} ({after[4]}) share bytes of "
                f"{shown(before[0])}, from {after[1]} on"
            )


def _aliases(value: Any, tensors: Mapping[tuple[str, str], StoredTensor]) -> dict[str, str]:
    names = {name for name, _ in tensors}
    aliases: dict[str, str] = {}
    for alias, name in an_object(value, "`aliases`").items():
        aliases[alias] = a_text(name, f"`aliases` {shown(alias)}")
        if aliases[alias] not in names or alias in names:
            raise DamageError(f"`aliases` {shown(alias)} is {shown(name)}; expected a tensor, for a name that is none")
    return aliases


# Format 1 -------------------------------------------------------------------------------------------------------------


def _parse_first(body: Mapping[str, Any], folder: Place) -> Index:
    headers: dict[str, TensorHeader] = {}
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name, roles in an_object(a_member(body, "tensors", ""), "`tensors`").items():
        for role, value in an_object(roles, f"`tensors` {shown(name)}").items():
            place = f"{shown(role)} of {shown(name)}"
            tensors[name, role] = _tensor_first(an_object(value, place), place, folder, headers)
    return Index(
        a_number(a_member(body, "world_size", ""), "`world_size`", at_least=1),
        tensors,
        _values(body),
        {name: StoredFile(header.nbytes, None) for name, header in headers.items()},
        format=1,
    )


def _tensor_first(
    members: Mapping[str, Any], place: str, folder: Place, headers: dict[str, TensorHeader]
) -> StoredTensor:
    shape = _shape(a_member(members, "shape", place), place)
    dtype = a_text(a_member(members, "dtype", place), f"dtype of {place}")
    boxes: list[StoredBox] = []
    for number, value in enumerate(a_list(a_member(members, "boxes", place), f"`boxes` of {place}")):
        at = f"box {number} of {place}"
        box = an_object(value, at)
        region = _region(box, at, len(shape))
        name = a_text(a_member(box, "file", at), f"file of {at}")
        key = a_text(a_member(box, "key", at), f"key of {at}")
        if not is_plain_name(name):
            raise DamageError(f"file of {at} is {shown(name)}, which is no plain file name")
        if name not in headers:
            headers[name] = read_header(folder / name)
        entry = headers[name].entries.get(key)
        if entry is None or entry.shape != region.shape or entry.dtype != dtype:
            raise DamageError(f"{name} holds no {shown(dtype)} of shape {shown(region.shape)} by the key {shown(key)}")
        boxes.append(StoredBox(region, name, entry.first, entry.last))
    wrong = wrong_cover(shape, [box.region for box in boxes])
    if wrong is not None:
        raise DamageError(f"{place}: {wrong}")
    return StoredTensor(shape, dtype, boxes)
