"""Where checkpoints lie: a folder, or an address in an object store, as four things that can be done there.

Says what they are, and how a place is named. Who does them: `posix.py` and `objects.py`; which of these
is meant: `registry.py`. What is written, in which order and under which names is decided elsewhere.

[Note: four methods] Saving, loading and the verbs need four things of a place: a file appears there whole or not at
all, byte ranges of it are read, names are listed, names are removed. Folders, fsync, rename and locks are how a file
system comes to the first of them; object stores have none of these, and need none: a put is whole or not there.
Correctness rests on `write` and `read` alone: what a late `list` does not show is asked for by name, or stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeAlias

from dsrun.errors import CheckpointError

from ..index.damage import DamageError
from ..index.value import StoredFile

#: Blocks of a file in order: memory, and how many of its first bytes count. All of `BLOCK_BYTES` but the last one.
Blocks: TypeAlias = Iterator[tuple[memoryview, int]]


#: Requests to a store that wait for each other nowhere: it answers them side by side.
ASKED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file.

    Attributes:
        blocks: yields them from the beginning; a store that is tried again calls it again. Memory that was yielded is
            read until two more blocks were asked for.
        nbytes: size of all blocks together in bytes; None where it is not known beforehand.
        is_repeatable: `blocks` may be called more than once.
    """

    blocks: Callable[[], Blocks]
    nbytes: int | None
    is_repeatable: bool = True


def small_content(data: bytes) -> Content:
    """Returns the content of a file that is one block."""
    return Content(lambda: iter([(memoryview(data), len(data))]), len(data))


class StorageError(CheckpointError):
    """A store cannot be used: the text has address, operation and cause. Says nothing about what lies there."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place in an object store. Has what checkpoints need of a `Path`: names are joined and taken apart alike.

    Attributes:
        scheme: `s3` of `s3://bucket/run`.
        path: `bucket/run` of it.
    """

    scheme: str
    path: str

    def __truediv__(self, name: str) -> Address:
        return Address(self.scheme, f"{self.path}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """What the last part lies in; a bucket's is itself."""
        head = self.path.rpartition("/")[0]
        return Address(self.scheme, head) if head else self


Place: TypeAlias = Path | Address


@dataclass(frozen=True, slots=True)
class Entry:
    """What lies in a folder.

    Attributes:
        name: name of the file or folder, without the path of the folder that contains it.
        nbytes: 0 of a folder.
        modified: time of the last change in seconds since the epoch, by the storage's clock; 0 for a folder in an
            object store.
        is_folder: whether the entry is a folder; false for a link.
        names: number of names (hard links) of the entry; only a file of a file system may have several.
    """

    name: str
    nbytes: int
    modified: float
    is_folder: bool
    names: int = 1


class ReadPattern(Enum):
    """How a file is going to be read, where that makes a difference."""

    IN_ORDER = "in order"
    #: Several threads ask for several places.
    BY_BLOCKS = "by blocks"
    #: Likewise, past the page cache: memory, places and lengths are multiples of `DIRECT_BYTES`.
    DIRECT = "direct"


class OpenedFile(Protocol):
    """A file that is read; several threads may."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def read_into(self, buffer: memoryview, first: int) -> int:
        """Reads bytes of the file from `first` on into `buffer`, and returns how many came; 0 at its end."""
        ...


class WrittenFile(Protocol):
    """A file that is there, whole and durable, and belongs to nobody yet."""

    @property
    def path(self) -> Place:
        """The file."""
        ...

    @property
    def stored(self) -> StoredFile:
        """Its size and checksums."""
        ...

    def release(self, *, remove: bool) -> None:
        """Lets go of the file.

        Args:
            remove: no index names it.
        """
        ...


class Storage(Protocol):
    """What can be done at a place, see [Note: four methods]. OSError and `StorageError` say why it cannot."""

    def write(
        self, place: Place, content: Content, *, over: str | None, progress: Callable[[], None] = lambda: None
    ) -> WrittenFile:
        """Writes a file, whole or not at all: it is durable when this returns, and nothing is left where it raises.

        Args:
            place: the file.
            content: its bytes.
            over: None: nothing has that name, and no index names the file before it is released. Else it takes the
                place of what has the name in one step; a mark that nobody else uses, for the name it may have before.
            progress: callback that runs after each block; an exception from it ends the writing.
        """
        ...

    def read(self, place: Place, how: ReadPattern = ReadPattern.IN_ORDER) -> AbstractContextManager[OpenedFile]:
        """Opens a file to read ranges of it.

        Args:
            place: the file; FileNotFoundError where it is not there.
            how: expected order of the reads; any range can still be asked for.
        """
        ...

    def list(self, folder: Place) -> Sequence[Entry]:
        """Returns what lies directly in a folder; FileNotFoundError where nothing does."""
        ...

    def remove(self, places: Sequence[Place]) -> None:
        """Removes files, those that are there, and what was left unfinished under their names."""
        ...


def read_range(file: OpenedFile, first: int, nbytes: int) -> bytes:
    """Returns bytes [first, first + nbytes) of a file.

    Raises:
        DamageError: it ends before.
    """
    data = bytearray(nbytes)
    view, done = memoryview(data), 0
    while done < nbytes:
        count = file.read_into(view[done:], first + done)
        if not count:
            raise DamageError(f"it ends at byte {first + done}")
        done += count
    return bytes(data)
