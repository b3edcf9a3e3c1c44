"""Frozen parameters by reference: written once, shared by name, and nobody's to take from another checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.checkpoint_files.folder.listing import list_tags
from dsrun.checkpoint_files.folder.publish import remove_unnamed
from dsrun.checkpoint_files.folder.remove import remove
from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.reference import is_frozen_name, sharers
from dsrun.checkpoint_files.storage.calls import FileCalls, try_lock
from dsrun.checkpoint_files.storage.tags import complete_tags
from dsrun.errors import CheckpointError
from dsrun.runtime.checkpoint.format.load import read
from dsrun.runtime.checkpoint.save.saver import Saver
from dsrun.runtime.protocols import StateEntry
from support.crashes import Recorder
from support.entries import entry_of
from support.savers import nothing, value_of, wanted, with_savers

SHAPE = (61, 37)


def base(value: float, *, rank: int, size: int) -> StateEntry:
    """A rank's slice of a frozen parameter."""
    numel = SHAPE[0] * SHAPE[1]
    start, stop = numel * rank // size, numel * (rank + 1) // size
    values = ((torch.arange(start, stop) % 251).to(torch.float32) + value).to(torch.bfloat16)
    return entry_of("base", values, shape=SHAPE, start=start)


def save(
    saver: Saver, folder: Path, step: int, rank: int, size: int, *, frozen: float = 1.0, tag: str | None = None
) -> None:
    def want() -> Any:
        return wanted(float(step), rank=rank, size=size, frozen=[base(frozen, rank=rank, size=size)])

    saver.save(folder, f"global_step{step}" if tag is None else tag, want, progress=nothing)


def save_steps(
    folder: Path, *steps: int, size: int = 1, frozen: float = 1.0, calls: FileCalls | None = None, **policy: Any
) -> None:
    def body(saver: Saver, rank: int) -> None:
        for step in steps:
            save(saver, folder, step, rank, size, frozen=frozen)
        saver.finish(nothing)

    with_savers(size, body, calls=calls, **policy)


def frozen_files(folder: Path) -> dict[str, list[int]]:
    """Inodes of the frozen files that the index of each tag names."""
    return {
        tag: [
            (folder / tag / name).stat().st_ino
            for name in sorted(read_index(folder / tag).files)
            if is_frozen_name(name)
        ]
        for tag in complete_tags(folder)
    }


def frozen_value(target: Path, *, size: int) -> float:
    """Loads the frozen parameter on some ranks, checks all of it, and returns which it is."""
    index = read_index(target)
    found: set[float] = set()
    for rank in range(size):
        expected = base(0.0, rank=rank, size=size)
        values = torch.empty_like(expected.tensor)
        read(index, target, [entry_of("base", values, shape=SHAPE, start=expected.start)])
        value = float(values[0]) - float(expected.tensor[0])
        assert torch.equal(values, base(value, rank=rank, size=size).tensor)
        found.add(value)
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_frozen_parameters_are_written_once_and_are_in_every_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    save_steps(tmp_path, 1, 2, 3, size=2, asynchronous=asynchronous)
    inodes = frozen_files(tmp_path)
    assert inodes["global_step1"] == inodes["global_step2"] == inodes["global_step3"]
    assert len(set(inodes["global_step1"])) == 2, "a file a rank"
    for step in (1, 2, 3):
        target = tmp_path / f"global_step{step}"
        assert list(verify(target, read_index(target))) == []
        assert value_of(target, sizes=(1,)) == step
        assert frozen_value(target, size=3) == 1.0
    # Another run of as many ranks finds them too, and one whose parameters are others writes its own.
    save_steps(tmp_path, 4, size=2, asynchronous=asynchronous)
    save_steps(tmp_path, 5, size=2, frozen=2.0, asynchronous=asynchronous)
    inodes = frozen_files(tmp_path)
    assert inodes["global_step4"] == inodes["global_step1"]
    assert not set(inodes["global_step5"]) & set(inodes["global_step1"])
    assert frozen_value(tmp_path / "global_step5", size=1) == 2.0
    shared = {tag.name: tag.shared_bytes for tag in list_tags(tmp_path)}
    assert shared["global_step5"] == 0
    assert 2 * SHAPE[0] * SHAPE[1] < shared["global_step1"] < 2 * SHAPE[0] * SHAPE[1] + (1 << 14)


def test_a_checkpoint_that_goes_takes_nothing_from_the_others(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, size=2, keep_last=2)
    assert complete_tags(tmp_path) == ["global_step3", "global_step4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "global_step4", "latest"]
    target = tmp_path / "global_step4"
    assert set(map(tuple, sharers(target, read_index(target)).values())) == {("global_step3",)}
    remove(tmp_path, ["global_step3"], calls=FileCalls())
    assert list(verify(target, read_index(target))) == []
    assert sharers(target, read_index(target)) == {}
    shutil.copytree(target, tmp_path / "elsewhere" / "t")
    assert frozen_value(tmp_path / "elsewhere" / "t", size=1) == 1.0


def test_a_tag_that_is_saved_again_keeps_one_file_and_no_stray(tmp_path: Path) -> None:
    def body(saver: Saver, rank: int) -> None:
        for value in (1, 2, 3):
            save(saver, tmp_path, value, rank, 1, tag="t", frozen=1.0 if value < 3 else 2.0)
        saver.finish(nothing)

    with_savers(1, body)
    assert value_of(tmp_path / "t") == 3.0
    assert frozen_value(tmp_path / "t", size=1) == 2.0
    assert len(list((tmp_path / "t").iterdir())) == 3


class NoLinks(FileCalls):
    """A file system without second names."""

    def link(self, old: Path, new: Path) -> None:
        raise PermissionError(1, "Operation not permitted")


def test_a_file_system_without_links_gets_them_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, calls=NoLinks())
    inodes = frozen_files(tmp_path)
    assert inodes["global_step1"] != inodes["global_step2"]
    assert frozen_value(tmp_path / "global_step2", size=1) == 1.0
    assert "cannot refer to" in caplog.text
    assert "frozen parameters are written again" in caplog.text


def test_what_is_damaged_or_missing_is_named_with_the_checkpoints_that_share_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    first, second = tmp_path / "global_step1", tmp_path / "global_step2"
    (name,) = filter(is_frozen_name, read_index(second).files)
    with (second / name).open("r+b") as file:
        file.seek(5000)
        file.write(b"\1\2\3\4\5\6")
    (problem,) = verify(second, read_index(second))
    assert f"{second / name}: bytes " in problem
    assert "param of `base`; it is one file with that of global_step1" in problem
    (second / name).unlink()
    (other,) = filter(is_frozen_name, read_index(first).files)
    (problem,) = verify(second, read_index(second))
    assert f"{second / name}: cannot be read: " in problem
    assert f"; {first / other} had the same bytes" in problem
    with pytest.raises(CheckpointError, match=r"cannot be read: .* had the same bytes"):
        frozen_value(second, size=1)


def test_a_damaged_file_of_another_size_is_not_referred_to(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (name,) = filter(is_frozen_name, read_index(tmp_path / "global_step1").files)
    os.truncate(tmp_path / "global_step1" / name, 1000)
    save_steps(tmp_path, 2)
    target = tmp_path / "global_step2"
    assert list(verify(target, read_index(target))) == []


def test_a_frozen_parameter_that_changes_while_it_is_written_fails_the_save_on_every_rank(tmp_path: Path) -> None:
    class Meddling(FileCalls):
        """Another thread's hand in the parameter, before its file is made."""

        def create(self, path: Path, *, direct: bool = False) -> int:
            if "00001-frozen" in path.name:
                changed.tensor[0] = 99.0
            return super().create(path, direct=direct)

    changed = base(1.0, rank=1, size=2)

    def body(saver: Saver, rank: int) -> str:
        frozen = changed if rank == 1 else base(1.0, rank=0, size=2)
        with pytest.raises(CheckpointError) as caught:
            saver.save(tmp_path, "t", lambda: wanted(1.0, rank=rank, size=2, frozen=[frozen]), progress=nothing)
        return str(caught.value)

    texts = with_savers(2, body, calls=Meddling())
    assert "a frozen parameter was changed while it was being saved" in texts[1]
    assert "rank 1 could not copy its part" in texts[0]
    assert not list(tmp_path.glob("t/*")), "neither rank leaves its file"


def test_a_second_name_stays_while_its_save_is_under_way_and_goes_after_a_killed_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (name,) = filter(is_frozen_name, read_index(tmp_path / "global_step1").files)
    target = tmp_path / "t"
    target.mkdir()
    own, shared = target / "rank-00000-00c0ffee.safetensors", target / "rank-00000-frozen-00c0ffee.safetensors"
    os.link(tmp_path / "global_step1" / name, shared)
    calls = FileCalls()
    descriptor = calls.create(own)
    assert try_lock(descriptor)
    remove_unnamed(target, calls=calls)
    assert shared.exists(), "another job's save is about to publish it"
    os.close(descriptor)
    remove_unnamed(target, calls=calls)
    assert not list(target.iterdir())
    assert frozen_value(tmp_path / "global_step1", size=1) == 1.0


def test_the_second_name_is_durable_before_the_index_is(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    recorder = Recorder()
    save_steps(tmp_path, 2, calls=recorder, asynchronous=False)
    steps = [(step.does, step.path.name) for step in recorder.steps]
    linked = next(number for number, (does, name) in enumerate(steps) if does == "link" and "frozen" in name)
    synced = steps.index(("sync folder", "global_step2"), linked)
    published = next(number for number, (does, name) in enumerate(steps) if does == "rename")
    assert linked < synced < published
