"""What only S3's own protocol shows: uploads in parts by a process beside, what a killed one leaves, missing rights.

Against moto's server on this machine, which needs the extra `test-s3`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch

from dsrun.checkpoint_files.folder.listing import TagState, list_tags
from dsrun.checkpoint_files.folder.remove import check_removable, remove
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Address, Blocks, Content, Place, StorageError, read_range
from dsrun.checkpoint_files.storage.registry import place_of, storage_of
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import entry_of
from support.savers import nothing, value_of, wanted, with_savers

moto_server = pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[test-s3]'")
s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[test-s3]'")
# Its server leaves the socket that it listened on to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def s3() -> Generator[Any]:
    """The file system of s3fs over a server of moto's, with a bucket; its environment is what writers find too."""
    before = dict(os.environ)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="nobody",
        AWS_SECRET_ACCESS_KEY="nothing",
        AWS_DEFAULT_REGION="us-east-1",
    )
    try:
        system = s3fs.S3FileSystem(use_listings_cache=False)
        system.mkdir("bucket")
        yield system
    finally:
        os.environ.clear()
        os.environ.update(before)
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def uploads(s3: Any) -> list[str]:
    return [one["Key"] for one in s3.list_multipart_uploads("bucket")]


def save(saver: Saver, run: Place, tag: str, value: float, rank: int, size: int = 2) -> None:
    saver.save(run, tag, lambda: wanted(value, rank=rank, size=size), progress=nothing)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_loaded(s3: Any, asynchronous: bool) -> None:
    run = place_of(f"s3://bucket/saved-{asynchronous}")

    def body(saver: Saver, rank: int) -> None:
        for step in (2,) if asynchronous else (1, 2):
            save(saver, run, f"global_step{step}", float(step), rank)
        saver.finish(nothing)

    with_savers(2, body, asynchronous=asynchronous, keep_last=1)
    assert [(tag.name, tag.state) for tag in list_tags(run)] == [("global_step2", TagState.COMPLETE)]
    assert latest_tag(run) == "global_step2"
    assert value_of(run / "global_step2", sizes=(1, 3)) == 2.0  # type: ignore[arg-type]
    assert list(verify(run / "global_step2", read_index(run / "global_step2"))) == []
    assert len(s3.find(f"bucket/saved-{asynchronous}")) == 4, "one tag of two ranks, and `latest`"
    assert not uploads(s3)


def test_what_a_killed_writer_leaves_is_listed_and_removed(s3: Any) -> None:
    run = place_of("s3://bucket/killed")
    with_savers(1, lambda saver, rank: save(saver, run, "whole", 1.0, rank, 1), asynchronous=False)
    for tag in ("dead", "whole"):
        key = f"killed/{tag}/rank-00000-dddddddd.safetensors"
        begun = s3.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
        s3.call_s3("upload_part", Bucket="bucket", Key=key, PartNumber=1, UploadId=begun["UploadId"], Body=b"part")
    assert {tag.name: tag.state for tag in list_tags(run)} == {"dead": TagState.TORN, "whole": TagState.COMPLETE}
    assert complete_tags(run) == ["whole"]
    check_removable([run / "dead"])
    remove(run, ["dead"], calls=FileCalls())
    assert uploads(s3) == ["killed/whole/rank-00000-dddddddd.safetensors"], "it may be of a save that is under way"
    remove(run, ["whole"], calls=FileCalls())
    assert not uploads(s3)
    assert not s3.exists("bucket/killed")


def test_a_writer_that_is_killed_while_it_uploads_leaves_nothing(s3: Any) -> None:
    run = place_of("s3://bucket/interrupted")
    big = torch.arange(16 << 20, dtype=torch.float32)
    entry = entry_of("big", big)

    def body(saver: Saver, rank: int) -> str | None:
        saver.save(run, "t", lambda: wanted(1.0, rank=rank, size=1, entries=[entry]), progress=nothing)
        assert saver._beside._writer is not None
        under_way = saver._last.save
        assert under_way is not None
        while not uploads(s3) and under_way.is_under_way:
            pass
        saver._beside._writer.process.kill()
        try:
            saver.finish(nothing)
        except CheckpointError as error:
            return str(error)
        return None  # it was faster

    (told,) = with_savers(1, body)
    published = told is None
    assert published or "was killed by signal 9" in told
    assert not uploads(s3)
    assert complete_tags(run) == (["t"] if published else [])
    assert len(s3.find("bucket/interrupted")) == (3 if published else 0), "the index, `latest` and the file, or nothing"


def test_a_large_file_goes_up_in_parts_and_is_given_up_whole(s3: Any) -> None:
    place = place_of("s3://bucket/large/file")
    assert isinstance(place, Address)
    block = memoryview(os.urandom(BLOCK_BYTES))
    seen = threading.Event()

    def blocks() -> Blocks:
        yield block, BLOCK_BYTES
        yield block, BLOCK_BYTES
        assert uploads(s3) == ["large/file"], "parts are on their way before all of them are there"
        seen.set()
        yield block, 5

    nbytes = 2 * BLOCK_BYTES + 5
    storage_of(place).write(place, Content(blocks, nbytes), over=None)
    assert seen.is_set()
    with storage_of(place).read(place) as file:
        assert file.nbytes == nbytes
        assert read_range(file, BLOCK_BYTES - 1, BLOCK_BYTES + 6) == bytes(block[-1:]) + bytes(block) + bytes(block[:5])

    def broken() -> Blocks:
        yield block, BLOCK_BYTES
        yield block, BLOCK_BYTES
        raise InterruptedError("nobody waits")

    other = place.parent / "other"
    with pytest.raises(InterruptedError):
        storage_of(other).write(other, Content(broken, None), over=None)
    assert not uploads(s3)
    assert not s3.exists("bucket/large/other")


def test_a_bucket_that_is_not_there_is_told_of_on_every_rank_before_anything_is_copied(s3: Any) -> None:
    def body(saver: Saver, rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            save(saver, place_of("s3://nowhere/run"), "t", 1.0, rank)
        return caught.value.render()

    first, _ = with_savers(2, body)
    assert "s3://nowhere/run" in first
    assert "cannot be written: The specified bucket does not exist" in first
    assert "hint: make the bucket" in first
    assert list_tags(place_of("s3://nowhere/run")) == []


def test_nobody_s_credentials_are_asked_for_by_name(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    s3fs.S3FileSystem.clear_instance_cache()
    place = place_of("s3://bucket/secret")
    with pytest.raises(StorageError, match="Unable to locate credentials") as caught:
        storage_of(place).list(place)
    assert "environment of every host" in (caught.value.hint or "")
    s3fs.S3FileSystem.clear_instance_cache()
