"""Is every byte of a checkpoint what it was when it was saved? Reads all of it, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator

from dsrun.errors import CheckpointError

from ..blocks.read import BlockReader
from ..index.value import Index
from ..storage.places import Place
from ..tensors.header import read_header


def verify(folder: Place, index: Index, *, progress: Callable[[str], None] = lambda name: None) -> Generator[str]:
    """Yields everything that is wrong with the files of a tag, each with file and tensors.

    A flipped bit of the index is found when it is read, see `parse.read_index`. Checkpoints of format 1 have no
    checksums: of them, sizes and headers are compared.

    Args:
        folder: the tag's.
        index: its index.
        progress: callback that gets the name of each file before it is read.
    """
    reader = BlockReader(folder, index)
    for name in sorted(index.files):
        progress(name)
        damaged = False
        for problem in reader.check(name):
            damaged = True
            yield problem
        if not damaged:
            yield from _header_problems(folder, index, name)


def _header_problems(folder: Place, index: Index, name: str) -> Generator[str]:
    """Yields boxes that other tools, which read the header, would find elsewhere."""
    try:
        header = read_header(folder / name)
    except CheckpointError as error:
        yield str(error)
        return
    places = {(entry.first, entry.last): entry for entry in header.entries.values()}
    for (tensor, role), stored in index.tensors.items():
        for box in stored.boxes:
            if box.file != name:
                continue
            entry = places.get((box.first, box.last))
            if entry is None or (entry.dtype, entry.shape) != (stored.dtype, box.region.shape):
                yield f"{folder / name}: its header has no {role} of `{tensor}` at bytes {box.first} to {box.last}"
