"""Object stores as places of checkpoints, by way of fsspec: s3, gs, and every other one that it knows.

A put is whole or not there, so nothing has to be renamed, synced or locked. Files go up in parts, which become one when
all are there; parts of an upload that failed are given up. fsspec and what lies beneath are imported here, and only
where an address is used. Credentials and endpoints come from the environment, as these libraries read it.

[Note: nothing is remembered] fsspec keeps listings, and would show what another rank or job has changed since as it
was. So they are switched off; nothing here is asked of a listing that could be asked by name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from threading import local
from typing import Any, TypeVar

from xxhash import xxh3_64_hexdigest

from ..index.value import BLOCK_BYTES, StoredFile
from .places import Address, Content, Entry, Place, ReadPattern, StorageError
from .tries import ShortReadError, Tries, missing_package
from .uploads import uploads_below

T = TypeVar("T")

#: S3 has no more parts than these in a file.
_MOST_PARTS = 10_000
#: Parts of a file whose size is not known before: 625 GiB of it at most.
_LARGE_PART = 4 * BLOCK_BYTES
#: What is asked for at least where a file is read in order: headers and rows come in bits.
_WINDOW_BYTES = 1 << 20
#: Where fsspec's file systems say when a file was written, each in its way.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


@dataclass(frozen=True, slots=True)
class ObjectWrittenFile:
    """See `WrittenFile`."""

    path: Address
    stored: StoredFile
    _storage: ObjectStorage

    def release(self, *, remove: bool) -> None:
        """See `WrittenFile`."""
        if remove:
            self._storage.remove([self.path])


class ObjectStorage:
    """See `Storage`; every place is an Address.

    Args:
        system: file system object of fsspec that keeps no listings.
        tries: retry settings for requests to the store; None for the defaults of `Tries`.
    """

    def __init__(self, system: Any, tries: Tries | None = None) -> None:
        self._system = system
        self._tries = Tries() if tries is None else tries

    @classmethod
    def of(cls, scheme: str) -> ObjectStorage:
        """Returns the store of a scheme.

        Raises:
            StorageError: none is known, or its package is not installed.
        """
        try:
            import fsspec

            return cls(fsspec.filesystem(scheme, use_listings_cache=False))
        except ImportError as error:
            raise missing_package(scheme, error) from error
        except ValueError as error:
            raise StorageError(
                f"{scheme}://: no such store is known: {error}", hint="pass a folder, `s3://...` or `gs://...`"
            ) from error

    def write(
        self, place: Place, content: Content, *, over: str | None, progress: Callable[[], None] = lambda: None
    ) -> ObjectWrittenFile:
        """See `Storage`. All of a file is sent again where a part of it could not be, after the store's own tries."""
        address = _address(place)
        try:
            if over is None:
                tries = self._tries if content.is_repeatable else replace(self._tries, most=1)
                stored = tries.do("written", address, lambda: self._upload(address, content, progress))
            else:
                data = b"".join(bytes(block[:count]) for block, count in content.blocks())
                self._ask("written", address, lambda: self._system.pipe_file(str(address), data))
                stored = StoredFile(len(data), None)
        except FileNotFoundError as error:
            raise StorageError(
                f"{address}: cannot be written: {error.__cause__}", hint="make the bucket, or name one that is there"
            ) from error
        except _CallerEndsItError as ended:
            raise ended.cause from None
        return ObjectWrittenFile(address, stored, self)

    @contextmanager
    def read(self, place: Place, how: ReadPattern = ReadPattern.IN_ORDER) -> Generator[ObjectOpenedFile]:
        """See `Storage`."""
        address = _address(place)
        known = self._ask("read", address, lambda: self._system.info(str(address)))
        if known["type"] != "file":
            raise FileNotFoundError(f"{address}: there is nothing of that name")
        yield ObjectOpenedFile(int(known["size"]), partial(self._range, address), how)

    def list(self, folder: Place) -> Sequence[Entry]:
        """See `Storage`; what was left unfinished counts as a file without bytes."""
        address = _address(folder)
        try:
            found = self._ask("listed", address, lambda: self._system.ls(str(address), detail=True))
        except FileNotFoundError:
            found = []
        entries = {entry.name: entry for one in found if (entry := _entry(one, address)) is not None}
        for upload in self._ask("listed", address, lambda: uploads_below(self._system, address)):
            entries.setdefault(upload.entry.name, upload.entry)
        if not entries:
            raise FileNotFoundError(f"{address}: there is nothing")
        return list(entries.values())

    def remove(self, places: Sequence[Place]) -> None:
        """See `Storage`."""
        addresses = [_address(place) for place in places]
        for folder in dict.fromkeys(address.parent for address in addresses):
            for upload in self._ask("listed", folder, partial(uploads_below, self._system, folder)):
                if folder / upload.entry.name in addresses:
                    with suppress(FileNotFoundError):  # it has ended meanwhile
                        self._ask("removed", folder / upload.entry.name, upload.give_up)
        for address in addresses:
            with suppress(FileNotFoundError):
                self._ask("removed", address, partial(self._system.rm_file, str(address)))

    def _ask(self, what: str, address: Address, work: Callable[[], T]) -> T:
        return self._tries.do(what, address, work)

    def _upload(self, address: Address, content: Content, progress: Callable[[], None]) -> StoredFile:
        sums: list[str] = []
        nbytes = 0
        file = self._system.open(str(address), "wb", block_size=_part_bytes(content.nbytes), autocommit=False)
        try:
            with _callers_own():
                blocks = content.blocks()
            while True:
                with _callers_own():
                    block = next(blocks, None)
                if block is None:
                    break
                data = block[0][: block[1]]
                sums.append(xxh3_64_hexdigest(data))
                file.write(data)
                nbytes += len(data)
                with _callers_own():
                    progress()
            file.close()
            file.commit()
        except BaseException:
            self._give_up(file, address)
            raise
        return StoredFile(nbytes, tuple(sums))

    def _give_up(self, file: Any, address: Address) -> None:
        """Leaves nothing of an upload that failed. Where the store does not do that either, `remove` finds the rest."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):  # the first error is the one that is told
            file.discard()
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # else it would send what it still has when it is collected
        with suppress(Exception):
            self._system.rm_file(str(address))

    def _range(self, address: Address, first: int, nbytes: int) -> bytes:
        def fetch() -> bytes:
            data = self._system.cat_file(str(address), start=first, end=first + nbytes)
            if len(data) != nbytes:
                raise ShortReadError(f"of bytes {first} to {first + nbytes}, {len(data)} came")
            return data

        return self._ask("read", address, fetch)


class ObjectOpenedFile:
    """See `OpenedFile`. Asks for more than is wanted where the rest will be wanted next, once for each thread.

    Args:
        nbytes: its size.
        fetch: (first byte, how many) -> all of them.
        how: a thread that reads by blocks reads each of them to its end.
    """

    def __init__(self, nbytes: int, fetch: Callable[[int, int], bytes], how: ReadPattern) -> None:
        self.nbytes = nbytes
        self._fetch = fetch
        self._how = how
        self._mine = _Window()

    def read_into(self, buffer: memoryview, first: int) -> int:
        """See `OpenedFile`."""
        count = min(len(buffer), self.nbytes - first)
        if count <= 0:
            return 0
        mine = self._mine
        if not mine.first <= first <= first + count <= mine.first + len(mine.data):
            ahead = _WINDOW_BYTES if self._how is ReadPattern.IN_ORDER else BLOCK_BYTES - first % BLOCK_BYTES
            mine.data = b""  # before as much again is there
            mine.first, mine.data = first, self._fetch(first, min(max(count, ahead), self.nbytes - first))
        buffer[:count] = memoryview(mine.data)[first - mine.first :][:count]
        return count


class _Window(local):
    """What a thread has asked for last."""

    first = 0
    data = b""


class _CallerEndsItError(BaseException):
    """Who wants a file written has raised something: no reason to ask the store again, and no `Exception` therefore."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


@contextmanager
def _callers_own() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise _CallerEndsItError(error) from error


def _address(place: Place) -> Address:
    assert isinstance(place, Address), f"{place} is no place in an object store"
    return place


def _part_bytes(nbytes: int | None) -> int:
    if nbytes is None:
        return _LARGE_PART
    return max(1, -(-nbytes // (_MOST_PARTS * BLOCK_BYTES))) * BLOCK_BYTES


def _entry(found: Mapping[str, Any], folder: Address) -> Entry | None:
    """Returns what fsspec says of a name; None for the folder's own, which some tools leave as an empty file."""
    name = str(found["name"]).strip("/")
    if name == folder.path or not name.endswith(f"{folder.path}/{name.rpartition('/')[2]}"):
        return None
    is_folder = found["type"] == "directory"
    return Entry(name.rpartition("/")[2], int(found.get("size") or 0), _modified(found), is_folder)


def _modified(found: Mapping[str, Any]) -> float:
    for key in _TIMES:
        match found.get(key):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
            case _:
                pass
    return 0.0
