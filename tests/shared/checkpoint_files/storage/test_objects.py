"""A file of an object store is whole or not there, whatever fails on the way; ranges are read whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import fsspec
import pytest

from dsrun.checkpoint_files.blocks.write_file import Repeatable, write_image, write_pieces
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.objects import ObjectStorage
from dsrun.checkpoint_files.storage.places import (
    Address,
    Blocks,
    Content,
    OpenedFile,
    ReadPattern,
    StorageError,
    read_range,
    small_content,
)
from dsrun.checkpoint_files.storage.registry import storage_of
from dsrun.checkpoint_files.storage.tries import Tries
from support.checkpoints import sums
from support.stores import SCHEME, BusyError, Held, registered

FILE = Address(SCHEME, "bucket/run/t/rank-00000-0a0a0a0a.safetensors")
CONTENT = bytes(range(256)) * (BLOCK_BYTES // 256 * 2) + b"the rest"


@pytest.fixture
def held() -> Generator[Held]:
    with registered() as held:
        yield held


def storage(*, most: int = 4) -> ObjectStorage:
    """What addresses lead to, without waiting between tries."""
    return ObjectStorage(fsspec.filesystem(SCHEME, use_listings_cache=False), Tries(most, 0.0, lambda seconds: None))


def blocks_of(content: bytes) -> Callable[[], Blocks]:
    def blocks() -> Blocks:
        for first in range(0, len(content), BLOCK_BYTES):
            part = content[first : first + BLOCK_BYTES]
            yield memoryview(part), len(part)

    return blocks


def some_times(error: BaseException, times: int, *, what: str) -> Callable[[str, str], BaseException | None]:
    """Fails so many times where something is asked, and is well after that."""
    left = count(times, -1)
    return lambda asked, name: error if asked == what and next(left) > 0 else None


def nothing() -> None:
    """Progress that nobody watches."""


def test_a_file_goes_up_in_parts_of_a_block_and_has_the_checksums_it_has_on_a_disk(held: Held) -> None:
    steps: list[int] = []
    written = storage().write(
        FILE, Content(blocks_of(CONTENT), len(CONTENT)), over=None, progress=lambda: steps.append(1)
    )
    assert held.files[FILE.path][0] == CONTENT
    assert (written.stored.nbytes, written.stored.sums) == (len(CONTENT), sums(CONTENT))
    assert [what for what, _ in held.asked] == ["open", "part", "part", "part", "commit"]
    assert len(steps) == 3
    written.release(remove=False)
    assert held.names() == [FILE.path]
    written.release(remove=True)
    assert not held.names()


def test_pieces_and_images_are_written_to_an_address_as_to_a_path(held: Held) -> None:
    content = CONTENT[: (1 << 20) + 5]
    write_image(FILE, memoryview(content), len(content), calls=FileCalls(), progress=nothing)
    other = FILE.parent / "other"
    pieces = [memoryview(content)[:7], memoryview(content)[7:]]
    written = write_pieces(other, pieces, calls=FileCalls(), progress=nothing)
    assert held.files[FILE.path][0] == held.files[other.path][0] == content
    assert written.stored.sums == sums(content)


@pytest.mark.parametrize("what", ["open", "part", "commit"])
def test_a_store_that_is_busy_is_asked_again(held: Held, what: str) -> None:
    held.fails = some_times(BusyError(), 2, what=what)
    storage().write(FILE, Content(blocks_of(CONTENT), len(CONTENT)), over=None)
    assert held.files[FILE.path][0] == CONTENT
    assert not held.pending


@pytest.mark.parametrize("what", ["open", "part", "commit", "pipe"])
def test_a_store_that_does_not_get_well_is_told_of_with_address_operation_and_cause(held: Held, what: str) -> None:
    held.fails = some_times(BusyError(), 1000, what=what)
    over = "mark" if what == "pipe" else None
    with pytest.raises(StorageError) as caught:
        storage().write(FILE, Content(blocks_of(CONTENT), len(CONTENT)), over=over)
    assert str(caught.value) == f"{FILE}: cannot be written: [Errno 16] 503 Slow Down (asked 4 times)"
    assert caught.value.hint is not None
    assert not held.pending, "parts were given up"
    assert not held.files


def test_an_upload_that_cannot_even_be_given_up_is_told_of_by_its_first_error(held: Held) -> None:
    held.fails = lambda what, name: BusyError() if what == "part" else OSError("gone") if what == "discard" else None
    with pytest.raises(StorageError, match="503 Slow Down"):
        storage().write(FILE, Content(blocks_of(CONTENT), len(CONTENT)), over=None)
    assert not held.files


def test_what_may_not_be_done_is_tried_once(held: Held) -> None:
    held.fails = lambda what, name: PermissionError("Access Denied") if what == "commit" else None
    with pytest.raises(StorageError, match="cannot be written: Access Denied") as caught:
        storage().write(FILE, Content(blocks_of(CONTENT), len(CONTENT)), over=None)
    assert "environment" in (caught.value.hint or "")
    assert "asked" not in str(caught.value)
    assert [what for what, _ in held.asked].count("commit") == 1


def test_a_bucket_that_is_not_there_is_no_missing_checkpoint(held: Held) -> None:
    held.fails = lambda what, name: FileNotFoundError("The specified bucket does not exist")
    with pytest.raises(StorageError, match="cannot be written: The specified bucket does not exist") as caught:
        storage().write(FILE, small_content(b"x"), over="mark")
    assert "bucket" in (caught.value.hint or "")


def test_values_that_are_gone_through_once_are_sent_once(held: Held) -> None:
    held.fails = some_times(BusyError(), 1, what="part")
    pieces = [memoryview(b"abc"), memoryview(b"def")]
    content = Content(lambda: iter([(memoryview(b"abcdef"), 6)]), 6, is_repeatable=False)
    with pytest.raises(StorageError, match="503 Slow Down") as caught:
        storage().write(FILE, content, over=None)
    assert "asked" not in str(caught.value)
    assert not held.files
    write_pieces(FILE, iter(pieces), calls=FileCalls(), progress=nothing)
    assert held.files[FILE.path][0] == b"abcdef"
    assert list(Repeatable(lambda: iter(pieces))) == list(Repeatable(lambda: iter(pieces))) == pieces


@pytest.mark.parametrize("from_blocks", [False, True])
def test_what_the_caller_raises_ends_the_upload_and_is_no_failure_of_the_store(held: Held, from_blocks: bool) -> None:
    def progress() -> None:
        if not from_blocks:
            raise InterruptedError("nobody waits")

    def blocks() -> Blocks:
        yield from blocks_of(CONTENT[:BLOCK_BYTES])()
        raise InterruptedError("nobody waits")

    with pytest.raises(InterruptedError, match="nobody waits"):
        storage().write(FILE, Content(blocks, None), over=None, progress=progress)
    assert not held.files
    assert not held.pending
    assert [what for what, _ in held.asked].count("open") == 1


def test_a_small_file_takes_the_place_of_the_old_one_or_leaves_it(held: Held) -> None:
    storage().write(FILE, small_content(b"old"), over="mark")
    held.fails = some_times(BusyError(), 1000, what="pipe")
    with pytest.raises(StorageError):
        storage().write(FILE, small_content(b"new"), over="mark")
    assert held.files[FILE.path][0] == b"old"
    held.fails = some_times(BusyError(), 3, what="pipe")
    storage().write(FILE, small_content(b"new"), over="mark")
    assert held.files[FILE.path][0] == b"new"


def opened(body: Callable[[OpenedFile], bytes]) -> bytes:
    with storage().read(FILE) as file:
        assert file.nbytes == len(CONTENT)
        return body(file)


def test_ranges_are_read_by_ranges(held: Held) -> None:
    held.put(FILE.path, CONTENT)
    assert opened(lambda file: read_range(file, BLOCK_BYTES - 3, 2 << 20)) == CONTENT[BLOCK_BYTES - 3 :][: 2 << 20]
    assert opened(lambda file: read_range(file, len(CONTENT) - 8, 8)) == b"the rest"
    assert [what for what, _ in held.asked] == ["info", "cat", "info", "cat"]
    held.asked.clear()
    small = opened(lambda file: read_range(file, 0, 8) + read_range(file, 8, 100) + read_range(file, 300, 1))
    assert small == CONTENT[:108] + CONTENT[300:301]
    assert [what for what, _ in held.asked] == ["info", "cat"], "small ranges beside each other are one request"


def test_a_block_is_one_request_whatever_pieces_it_is_read_in(held: Held) -> None:
    held.put(FILE.path, CONTENT)
    with storage().read(FILE, ReadPattern.DIRECT) as file, ThreadPoolExecutor(2) as pool:
        piece = BLOCK_BYTES // 8

        def read_block(number: int) -> bytes:
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, len(CONTENT))
            return b"".join(read_range(file, start, min(piece, last - start)) for start in range(first, last, piece))

        assert b"".join(pool.map(read_block, range(3))) == CONTENT
        assert [what for what, _ in held.asked].count("cat") == 3


def test_a_read_that_comes_short_is_asked_again_and_then_told_of(held: Held) -> None:
    held.put(FILE.path, CONTENT)
    left = count(2, -1)
    held.cuts = lambda name, data: data[:-1] if next(left) > 0 else data
    assert opened(lambda file: read_range(file, 0, BLOCK_BYTES)) == CONTENT[:BLOCK_BYTES]
    held.cuts = lambda name, data: data[:-1]
    with pytest.raises(StorageError, match=f"cannot be read: of bytes 0 to {BLOCK_BYTES}, {BLOCK_BYTES - 1} came"):
        opened(lambda file: read_range(file, 0, BLOCK_BYTES))


def test_what_is_not_there_is_missing_and_not_asked_for_again(held: Held) -> None:
    with pytest.raises(FileNotFoundError, match="there is nothing"), storage().read(FILE):
        pass
    with pytest.raises(FileNotFoundError):
        storage().list(FILE.parent)
    assert [what for what, _ in held.asked] == ["info", "ls"]


def test_a_folder_is_listed_with_sizes_and_times(held: Held) -> None:
    held.put(FILE.path, b"abc")
    held.put("bucket/run/latest", b"t")
    held.put("bucket/running/other", b"t")
    files = {entry.name: (entry.nbytes, entry.modified) for entry in storage().list(FILE.parent)}
    assert files == {FILE.name: (3, 1001.0)}
    above = {entry.name: entry.is_folder for entry in storage().list(FILE.parent.parent)}
    assert above == {"t": True, "latest": False}


def test_an_unknown_store_and_a_missing_package_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="nowhere://: no such store is known") as caught:
        storage_of(Address("nowhere", "x"))
    assert "s3://" in (caught.value.hint or "")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StorageError, match="gs://: what is needed for it cannot be imported") as caught:
        storage_of(Address("gs", "bucket"))
    assert caught.value.hint == "pip install 'dsrun[gcs]', on every host"
