"""Checkpoints at an address: saved by several ranks, whole or not there, cleaned up, and loaded as from a folder."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch

from dsrun.checkpoint_files.folder.find import find_tag
from dsrun.checkpoint_files.folder.listing import TagState, is_checkpoint, list_tags
from dsrun.checkpoint_files.folder.publish import is_published
from dsrun.checkpoint_files.folder.remove import check_removable, remove
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.index.value import INDEX_FILE
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Place, StorageError
from dsrun.checkpoint_files.storage.registry import place_of
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.convert.foreign import ForeignCheckpoint
from dsrun.runtime.checkpoint.convert.foreign import held as held_tensor
from dsrun.runtime.checkpoint.convert.write import write
from dsrun.runtime.checkpoint.format.load import read_whole
from dsrun.runtime.checkpoint.save.saver import Saver
from support.entries import all_of, entry_of
from support.savers import nothing, value_of, wanted, with_savers
from support.stores import Held, registered

RUN = place_of("shaky://bucket/run")
DAY_S = 24 * 3600.0


@pytest.fixture
def held() -> Generator[Held]:
    with registered() as held:
        yield held


def save(tag: str, value: float, *, size: int = 2, run: Place = RUN, **policy: int) -> list[str | None]:
    """Saves one state, and returns what each rank was told where it failed."""

    def body(saver: Saver, rank: int) -> str | None:
        try:
            saver.save(run, tag, lambda: wanted(value, rank=rank, size=size), progress=nothing)
        except CheckpointError as error:
            return str(error)
        return None

    return with_savers(size, body, asynchronous=False, **policy)


def forbidden(*asked: str, at: str) -> Callable[[str, str], BaseException | None]:
    """Forbids something to be done with some names."""
    return lambda what, name: PermissionError("Access Denied") if what in asked and at in name else None


def test_what_is_saved_is_loaded_on_any_number_of_ranks(held: Held) -> None:
    assert save("a", 1.0, size=3) == [None] * 3
    assert save("b", 2.0, size=1) == [None]
    assert [value_of(RUN / tag, sizes=(1, 2, 4)) for tag in ("a", "b")] == [1.0, 2.0]
    assert latest_tag(RUN) == "b"
    assert complete_tags(RUN) == ["a", "b"]
    assert find_tag(RUN) == RUN / "b"
    assert list(verify(RUN / "a", read_index(RUN / "a"))) == []
    assert not [name for name in held.names() if "shared" in name], "marks are gone"
    asked = [name.rpartition("/")[2] for what, name in held.asked if what in ("commit", "pipe")]
    data, index = asked[1:4], asked[4:6]
    assert all(name.startswith("rank-") for name in data), asked
    assert index == [INDEX_FILE, "latest"], "an index comes when every file is there, `latest` after it"


def test_a_rank_that_cannot_put_its_file_fails_all_and_leaves_the_old_one(held: Held) -> None:
    save("t", 1.0)
    before = held.names()
    held.fails = forbidden("commit", at="rank-00001")
    texts = save("t", 2.0)
    for text in texts:
        assert text is not None
        assert text.startswith("shaky://bucket/run/t: could not be saved, nothing was published: rank 1: shaky://")
        assert "cannot be written: Access Denied" in text
    assert held.names() == before
    assert not held.pending
    assert value_of(RUN / "t") == 1.0
    held.fails = lambda what, name: None
    assert save("t", 3.0) == [None, None]
    assert value_of(RUN / "t") == 3.0
    assert len(held.names()) == 4, "files that the index before named are gone"


@pytest.mark.parametrize("at", [INDEX_FILE, "latest"])
def test_an_index_or_latest_that_cannot_be_put_is_told_of_to_all(held: Held, at: str) -> None:
    save("old", 1.0)
    held.fails = forbidden("pipe", at=at)
    for text in save("new", 2.0):
        assert text is not None
        assert "nothing was published" in text if at == INDEX_FILE else "it may not be durable" in text
    assert latest_tag(RUN) == "old"
    assert complete_tags(RUN) == (["old"] if at == INDEX_FILE else ["old", "new"])
    assert is_checkpoint(RUN / "new") == (at == "latest"), "nothing is left of what was not published"


def test_what_may_not_be_done_is_said_before_anything_is_written(held: Held) -> None:
    held.fails = forbidden("pipe", at=".shared")
    for text in save("t", 1.0, size=1):
        assert text is not None
        assert "cannot be written: Access Denied" in text
    assert not held.names()
    assert [what for what, _ in held.asked] == ["pipe", "rm"], "asked once, and nothing else"


def test_listings_that_are_late_harm_nothing(held: Held) -> None:
    held.hides = lambda name: True
    assert save("global_step1", 1.0) == [None, None]
    assert save("global_step1", 2.0, keep_last=1) == [None, None]
    assert value_of(RUN / "global_step1") == 2.0
    assert latest_tag(RUN) == "global_step1"
    held.hides = lambda name: "rank-00001" in name or name.endswith(INDEX_FILE)
    assert [(tag.name, tag.state) for tag in list_tags(RUN)] == [("global_step1", TagState.COMPLETE)]


def test_a_dead_save_has_no_index_and_is_cleaned_up_in_time_or_on_request(held: Held) -> None:
    save("t", 1.0)
    (dead, young) = (f"bucket/run/t/rank-0000{rank}-dddddddd.safetensors" for rank in range(2))
    held.put(dead, b"of a save that was killed")
    held.clock += DAY_S
    held.put(young, b"of one that may be under way")
    held.put("bucket/run/t/notes.txt", b"the user's own")
    save("t", 2.0)
    assert dead not in held.files
    assert young in held.files
    held.put("bucket/run/torn/rank-00000-eeeeeeee.safetensors", b"of a save that was killed")
    assert {tag.name: tag.state for tag in list_tags(RUN)} == {"t": TagState.COMPLETE, "torn": TagState.TORN}
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: index\.json is missing; complete tags here: t"):
        read_index(find_tag(RUN / "torn"))
    check_removable([RUN / "torn"])
    assert remove(RUN, ["torn"], calls=FileCalls()) is None
    with pytest.raises(CheckpointError, match=r"t: no checkpoint any more, but files are left .*: notes\.txt"):
        remove(RUN, ["t"], calls=FileCalls())
    assert held.names() == ["bucket/run/t/notes.txt"]
    with pytest.raises(CheckpointError, match="it is no checkpoint of dsrun"):
        check_removable([RUN / "t"])


def test_older_ones_go_as_from_a_folder(held: Held) -> None:
    for step in (1, 2, 3, 4):
        assert save(f"global_step{step}", float(step), keep_last=2, keep_every=3) == [None, None]
    save("best", 9.0, keep_last=1)
    assert sorted(complete_tags(RUN)) == ["best", "global_step4"]
    assert remove(RUN, ["best"], calls=FileCalls()) == "global_step4"
    assert latest_tag(RUN) == "global_step4"
    assert remove(RUN, ["global_step4"], calls=FileCalls()) == ""
    assert not held.names()


def test_damage_is_found_as_in_a_folder(held: Held) -> None:
    save("t", 1.0)
    name = next(name for name in held.names() if "rank-00001" in name)
    data, when = held.files[name]
    held.files[name] = (data[:-1] + bytes([data[-1] ^ 1]), when)
    (problem,) = verify(RUN / "t", read_index(RUN / "t"))
    assert problem.startswith(f"shaky://{name}: bytes 0 to {len(data)} are damaged, of the header, ")
    held.files[name] = (data[:-1], when)
    assert [tag.state for tag in list_tags(RUN)] == [TagState.DAMAGED]
    assert any("it has" in text for text in verify(RUN / "t", read_index(RUN / "t")))
    del held.files[name]
    assert "is missing" in (list_tags(RUN)[0].reason or "")


def test_a_store_that_cannot_be_asked_is_not_taken_for_damage_or_absence(held: Held) -> None:
    save("t", 1.0)
    held.fails = forbidden("info", "cat", "ls", at="bucket")
    for ask in (list_tags, latest_tag, complete_tags, find_tag):
        with pytest.raises(StorageError, match="Access Denied"):
            ask(RUN)
    assert is_published(RUN / "t", "0a0a0a0a"), "it cannot be known, so its files stay"


def test_a_rank_that_sees_another_store_is_found() -> None:
    def body(saver: Saver, rank: int) -> str:
        run = place_of("shaky://bucket/run") if rank == 0 else place_of("shaky://bucket/other")
        with pytest.raises(CheckpointError, match=r"see what rank 0 writes|is not the folder that rank 0") as caught:
            saver.save(run, "t", lambda: wanted(1.0, rank=rank, size=2), progress=nothing)
        return str(caught.value)

    with registered() as held:
        texts = with_savers(2, body, asynchronous=False)
        assert "shaky://bucket/other on " in texts[1], "it says which host"
        assert not held.names()


def test_another_tool_s_checkpoint_is_imported_to_an_address(held: Held) -> None:
    found = ForeignCheckpoint([held_tensor("w", "param", torch.arange(6.0).view(2, 3))], origin="a test")
    nbytes = write(found, RUN, "t")
    assert nbytes == sum(len(data) for data, _ in held.files.values()) - len("t")
    assert read_whole(read_index(RUN / "t"), RUN / "t", ["w"], role="param")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="t: it is there already"):
        write(found, RUN, "t")
    held.fails = forbidden("pipe", at=INDEX_FILE)
    before = held.names()
    with pytest.raises(StorageError, match="Access Denied"):
        write(found, RUN, "other")
    assert held.names() == before


def test_frozen_parameters_are_written_to_each_checkpoint_of_a_store(held: Held) -> None:
    frozen = entry_of("base", torch.tensor([1.0, 2.0, 3.0]), holders=all_of(1))

    def body(saver: Saver, rank: int) -> None:
        for tag in ("a", "b"):
            saver.save(RUN, tag, lambda: wanted(1.0, rank=rank, size=1, frozen=[frozen]), progress=nothing)

    with_savers(1, body, asynchronous=False)
    assert len([name for name in held.names() if "-frozen-" in name]) == 2
    remove(RUN, ["a"], calls=FileCalls())
    assert read_whole(read_index(RUN / "b"), RUN / "b", ["base"], role="param")["base"].tolist() == [1, 2, 3]


def test_memory_of_one_process_is_not_saved_to_from_another(held: Held) -> None:
    def body(saver: Saver, rank: int) -> None:
        with pytest.raises(CheckpointError, match="does not see this one's memory"):
            saver.save(place_of("memory://run"), "t", lambda: wanted(1.0, rank=rank, size=1), progress=nothing)

    with_savers(1, body)
