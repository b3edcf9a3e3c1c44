"""The last step of a save: files that are on disk become a checkpoint, and what it replaces goes.

[Note: publishing]
A tag exists once its index does. Data files carry an id that is new with every save, so saving a tag again leaves the
old files and the old index valid until the new index takes its place by rename; only then are the old files removed. A
crash at any point leaves the old checkpoint or the new one. What is published has been read back as a stranger would.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import CheckpointError
from dsrun.regular_file import NotRegularError, open_regular

from .calls import FileCalls, try_lock
from .damage import DamageError, a_list, a_member, a_text, an_object, some_numbers
from .folder import LATEST_FILE, complete_tags, is_complete, read_latest
from .index import INDEX_FILE, Index, StoredBox, StoredFile, StoredTensor
from .latest import VALUE, next_number
from .parse import parse_index, read_index
from .reference import frozen_name, is_frozen_name
from .region import Region
from .storage import Address, Place, StorageError, small_content
from .storage_leftovers import clean, named_files, remove_all
from .storage_registry import storage_of
from .tensor_header import read_header

#: Key of a file's free part that says which box of which tensor each entry is.
BOXES_KEY = "dsrun.boxes"
_NUMBERED = re.compile(r"global_step(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What is to be published.

    Attributes:
        folder: of the run's checkpoints.
        tag: name of this one.
        identity: in the names of its files.
        files: of each rank in order; None for a rank that had nothing to write.
        frozen: likewise, those of frozen parameters, see `reference.py`; empty where they are in `files`.
        values: for the index, as JSON values.
        ranks: likewise, of each rank.
        aliases: names of tied parameters to the names they are stored under.
        save_latest: let `latest` name this tag.
        keep_last: of tags named `global_step<N>`, the so many newest are kept, and older ones removed; None: all.
        keep_every: those whose N is a multiple are kept whatever `keep_last` says; None: none.
    """

    folder: Place
    tag: str
    identity: str
    files: Sequence[StoredFile | None]
    values: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    aliases: Mapping[str, str]
    save_latest: bool
    keep_last: int | None
    keep_every: int | None
    frozen: Sequence[StoredFile | None] = ()


def file_name(rank: int, identity: str) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}-{identity}.safetensors"


def publish(publication: Publication, *, calls: FileCalls) -> int:
    """Writes the index, then `latest`, then removes what is older; returns the bytes of the checkpoint.

    Raises:
        CheckpointError: a file is not what its rank wrote, or the boxes of all do not make whole tensors.
        OSError: the file system refuses.
    """
    folder, mark = publication.folder, publication.identity
    target = folder / publication.tag
    index = _index(publication, target)
    text = index.to_bytes()
    parse_index(text, target)
    storage = storage_of(folder, calls)
    replaced = named_files(target) if isinstance(target, Address) else frozenset[str]()
    storage.write(target / INDEX_FILE, small_content(text), over=mark)
    if publication.save_latest:
        storage.write(folder / LATEST_FILE, small_content(publication.tag.encode()), over=mark)
    if isinstance(target, Address):
        clean(target, replaced=replaced)
    else:
        remove_unnamed(target, calls=calls)
    if isinstance(folder, Path):
        _remove_unfinished_latest(folder, calls=calls)
    if publication.keep_last is not None:
        for tag in outlived(publication):
            remove_tag(publication.folder / tag, calls=calls)
    return len(text) + sum(file.nbytes for file in index.files.values())


def is_published(target: Place, identity: str) -> bool:
    """Whether the index of a tag names files of this save; also where that cannot be known."""
    try:
        return any(name.endswith(f"-{identity}.safetensors") for name in read_index(target).files)
    except StorageError:
        return True
    except CheckpointError:
        return (target / INDEX_FILE).exists() if isinstance(target, Path) else is_complete(target)


def outlived(publication: Publication) -> list[str]:
    """Returns the tags that `keep_last` and `keep_every` keep no longer, oldest first."""
    found = [match for tag in complete_tags(publication.folder) if (match := _NUMBERED.fullmatch(tag))]
    steps = sorted({int(match[1]): match[0] for match in found if match[0] != publication.tag}.items())
    newer = 1 if _NUMBERED.fullmatch(publication.tag) else 0
    most = max(0, (publication.keep_last or 0) - newer)
    old = steps[: len(steps) - most] if most else steps
    every = publication.keep_every
    try:
        named = read_latest(publication.folder)
    except (FileNotFoundError, NotRegularError):
        named = None
    return [tag for step, tag in old if tag != named and not (every and step % every == 0)]


def remove_tag(target: Place, *, calls: FileCalls) -> None:
    """Removes a checkpoint: its index first, so that no part of it is taken for a whole one; strangers' files stay."""
    if isinstance(target, Address):
        remove_all(target)
        return
    calls.remove(target / INDEX_FILE)
    calls.sync_folder(target)
    remove_unnamed(target, calls=calls)
    calls.remove_folder(target)
    calls.sync_folder(target.parent)


def remove_empty(target: Place, *, calls: FileCalls) -> None:
    """Removes the folder of a save that has failed, if nothing is in it; every rank that wrote there comes by here."""
    if isinstance(target, Path):
        calls.remove_folder(target)


def remove_unnamed(target: Path, *, calls: FileCalls) -> None:
    """Removes files of a tag that its index does not name and no save is writing.

    Another job may publish the same tag meanwhile. So files are locked first, and the index is read after that: what
    could be locked is of a save that is over, and if that one was published, the index is read as it left it. A second
    name of an earlier file has no lock of its own: it stays as long as another file of its save is locked.
    """
    present = [*target.glob("rank-*.safetensors"), *target.glob(f".{INDEX_FILE}.*")]
    with _locked(present) as files:
        try:
            named = set(read_index(target).files) if (target / INDEX_FILE).exists() else set[str]()
        except CheckpointError:
            return
        under_way = {_save_of(path) for path in set(present) - set(files) if path.exists()}
        for path in files:
            if path.name not in named and not (is_frozen_name(path.name) and _save_of(path) in under_way):
                calls.remove(path)


def _save_of(path: Path) -> str:
    """Returns the identity of the save that a data file is of."""
    return path.stem.rpartition("-")[2]


def _remove_unfinished_latest(folder: Path, *, calls: FileCalls) -> None:
    with _locked(folder.glob(f".{LATEST_FILE}.*")) as files:
        for path in files:
            calls.remove(path)


@contextmanager
def _locked(paths: Iterable[Path]) -> Generator[list[Path]]:
    """Yields the files whose locks could be taken, and holds these meanwhile; two names of a file have one lock."""
    locked: dict[Path, int] = {}
    held: set[tuple[int, int]] = set()
    try:
        for path in paths:
            try:
                descriptor = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:  # gone already, no file, or not ours to remove
                continue
            locked[path] = descriptor
            stat = os.fstat(descriptor)
            if (stat.st_dev, stat.st_ino) not in held and not try_lock(descriptor):
                os.close(locked.pop(path))
            else:
                held.add((stat.st_dev, stat.st_ino))
        yield list(locked)
    finally:
        for descriptor in locked.values():
            os.close(descriptor)


def _index(publication: Publication, target: Place) -> Index:
    index = Index(
        len(publication.files),
        {},
        {**publication.values, **({VALUE: next_number(publication.folder)} if publication.save_latest else {})},
        ranks=[dict(values) for values in publication.ranks],
        aliases=dict(publication.aliases),
    )
    written = [(rank, file_name, file) for rank, file in enumerate(publication.files)]
    written += [(rank, frozen_name, file) for rank, file in enumerate(publication.frozen)]
    for rank, name_of, file in written:
        if file is not None:
            name = name_of(rank, publication.identity)
            index.files[name] = file
            try:
                add_boxes(index, target / name, file)
            except DamageError as error:
                raise CheckpointError(f"{target / name}: it is not what rank {rank} wrote: {error}") from error
    return index


def add_boxes(index: Index, path: Place, file: StoredFile) -> None:
    """Adds what a rank's file holds to an index, as the file's header says.

    Raises:
        DamageError: the header does not fit the file, or what other files say.
        CheckpointError: it cannot be read.
    """
    header = read_header(path)
    if header.nbytes != file.nbytes:
        raise DamageError(f"it has {header.nbytes} bytes, and {file.nbytes} were written")
    boxes: Any = json.loads(header.metadata[BOXES_KEY])
    for number, value in enumerate(a_list(boxes, BOXES_KEY)):
        at = f"box {number}"
        box = an_object(value, at)
        key: str | None = a_member(box, "key", at)
        shape = some_numbers(a_member(box, "shape", at), at)
        name = a_text(a_member(box, "name", at), at), a_text(a_member(box, "role", at), at)
        if key is None:  # a tensor without elements has no box, but a shape
            index.tensors.setdefault(name, StoredTensor(shape, a_text(a_member(box, "dtype", at), at)))
            continue
        entry = header.entries[key]
        stored = index.tensors.setdefault(name, StoredTensor(shape, entry.dtype))
        if (stored.shape, stored.dtype) != (shape, entry.dtype):
            raise DamageError(f"{name[1]} of `{name[0]}` is {entry.dtype} {shape} there, and elsewhere {stored.shape}")
        region = Region(some_numbers(a_member(box, "offset", at), at), entry.shape)
        stored.boxes.append(StoredBox(region, path.name, entry.first, entry.last))
