"""The last step of a save: files that are on disk become a checkpoint, and what it replaces goes.

[Note: publishing]
A tag exists once its index does. Data files carry an id that is new with every save, so saving a tag again leaves the
old files and the old index valid until the new index takes its place by rename; only then are the old files removed. A
crash at any point leaves the old checkpoint or the new one. What is published has been read back as a stranger would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import CheckpointError
from dsrun.files.regular import NotRegularError

from ..index.damage import DamageError, a_list, a_member, a_text, an_object, some_numbers
from ..index.region import Region
from ..index.value import INDEX_FILE, Index, StoredBox, StoredFile, StoredTensor
from ..parse import parse_index, read_index
from ..reference import frozen_name
from ..storage.calls import FileCalls
from ..storage.places import Address, Place, StorageError, small_content
from ..storage.registry import storage_of
from ..storage.tags import LATEST_FILE, complete_tags, is_complete, read_latest
from ..tensors.header import read_header
from .jobs import other_jobs
from .latest import VALUE, next_number
from .leftovers import clean, named_files
from .removal import remove_tag, remove_unfinished_latest, remove_unnamed

#: Key of a file's free part that says which box of which tensor each entry is.
BOXES_KEY = "dsrun.boxes"
_NUMBERED = re.compile(r"global_step(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What is to be published.

    Attributes:
        folder: folder of the run's checkpoints.
        tag: name of this one.
        identity: identifier of the save, a part of its file names.
        files: file of each rank, in rank order; None for a rank that had nothing to write.
        frozen: file of each rank's frozen parameters, in rank order, see `checkpoint_files/reference.py`; empty where
            these are in `files`.
        values: JSON values for the index that are the same for all ranks.
        ranks: JSON values for the index that differ by rank, one mapping for each rank.
        aliases: names of tied parameters to the names they are stored under.
        save_latest: whether `latest` is to name this tag.
        keep_last: number of the newest tags named `global_step<N>` that are kept, while older ones are removed; None
            for all.
        keep_every: divisor of N: tags with an N that is a multiple of it are kept whatever `keep_last` says; None for
            none.
        job: name of the job that saves, see `jobs.py`; checkpoints of other live jobs are kept too.
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
    job: str | None = None


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
        remove_unfinished_latest(folder, calls=calls)
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
    strange = _tags_of_others(publication)
    return [tag for step, tag in old if tag != named and tag not in strange and not (every and step % every == 0)]


def _tags_of_others(publication: Publication) -> frozenset[str]:
    """Returns the tags that other jobs have saved, which live."""
    if not isinstance(publication.folder, Path):
        return frozenset()
    return frozenset[str]().union(*(job.tags for job in other_jobs(publication.folder, publication.job)))


def remove_empty(target: Place, *, calls: FileCalls) -> None:
    """Removes the folder of a save that has failed, if nothing is in it; every rank that wrote there comes by here."""
    if isinstance(target, Path):
        calls.remove_folder(target)


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
