"""Which place a text means."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.checkpoint_files.storage.places import Address, Place
from dsrun.checkpoint_files.storage.posix import PosixStorage
from dsrun.checkpoint_files.storage.registry import absolute, check_writable_beside, place_of, storage_of
from dsrun.errors import CheckpointError, InputError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("checkpoints", Path("checkpoints")),
        ("/data/run", Path("/data/run")),
        (Path("a") / "b", Path("a/b")),
        ("a:b/c", Path("a:b/c")),
        ("file:///data/run", Path("/data/run")),
        ("s3://bucket/run", Address("s3", "bucket/run")),
        ("S3://bucket/run//", Address("s3", "bucket/run")),
        ("gs://bucket", Address("gs", "bucket")),
        ("memory://run", Address("memory", "run")),
    ],
)
def test_a_text_means_a_path_or_an_address(text: str | Path, place: Place) -> None:
    assert place_of(text) == place


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://", "it names no bucket and no folder"),
        ("s3:///", "it names no bucket and no folder"),
        ("file://host/data", "it names a host"),
        (Path("s3://bucket/run"), "an address was made a Path"),
    ],
)
def test_what_means_nothing_is_refused(text: str | Path, said: str) -> None:
    with pytest.raises(InputError, match=said):
        place_of(text)


def test_an_address_is_joined_and_taken_apart_as_a_path_is() -> None:
    run = place_of("s3://bucket/run")
    target = run / "t" / "index.json"
    assert str(target) == absolute(target) == "s3://bucket/run/t/index.json"
    assert (target.name, target.parent.name, target.parent.parent) == ("index.json", "t", run)
    assert str(Address("s3", "bucket").parent) == "s3://bucket"
    assert absolute(Path("run")) == str(Path.cwd() / "run")


def test_a_path_costs_nothing_of_object_stores() -> None:
    assert isinstance(storage_of(Path("run")), PosixStorage)


def test_the_memory_of_this_process_is_not_written_by_another_one() -> None:
    with pytest.raises(CheckpointError, match="does not see this one's memory"):
        check_writable_beside(place_of("memory://run"))
    check_writable_beside(place_of("s3://bucket/run"))
    check_writable_beside(Path("run"))
