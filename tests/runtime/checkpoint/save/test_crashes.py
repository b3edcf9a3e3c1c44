"""A crash after any step of a save leaves the old checkpoint or the new one, complete; never a mixture, never none."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from dsrun.checkpoint_files.folder.verify import verify
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.tags import complete_tags, latest_tag
from support.crashes import Disk, Recorder
from support.savers import nothing, save_one, value_of, wanted, with_savers

OLD, NEW = 1.0, 2.0


def left_of(folder: Path) -> dict[str, float]:
    """Every complete tag with the state it has; each must be whole to the last byte."""
    found: dict[str, float] = {}
    for tag in complete_tags(folder):
        assert list(verify(folder / tag, read_index(folder / tag))) == []
        found[tag] = value_of(folder / tag, sizes=(2,))
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("repeated", [False, True])
def test_C5_a_crash_after_any_step_leaves_the_old_or_the_new(tmp_path: Path, repeated: bool, size: int) -> None:
    run = tmp_path / "run"
    old_tag, new_tag = ("t", "t") if repeated else ("global_step1", "global_step2")
    save_one(run, old_tag, OLD, size=size)
    disk = Disk(run)
    disk.load()
    recorder = Recorder()
    save_one(run, new_tag, NEW, size=size, calls=recorder)
    assert len(recorder.steps) > 12
    for number in range(len(recorder.steps) + 1):
        for names_kept in (False, True):
            for bytes_kept in (False, True):
                crashed = tmp_path / "crashed"
                crashed.mkdir()
                disk.leave(crashed, names_kept=names_kept, bytes_kept=bytes_kept)
                found = left_of(crashed)
                if repeated:
                    assert found in ({"t": OLD}, {"t": NEW}), number
                else:
                    assert found in ({old_tag: OLD}, {old_tag: OLD, new_tag: NEW}), number
                latest = latest_tag(crashed)
                assert latest in found
                if number == len(recorder.steps):
                    assert found[new_tag] == NEW, "what was said to be saved is there after a power cut"
                    assert latest == new_tag
                elif number == 0:
                    assert NEW not in found.values()
                if names_kept and bytes_kept:
                    save_one(crashed, new_tag, 3.0)
                    assert value_of(crashed / new_tag, sizes=(1,)) == 3.0
                    assert len(list((crashed / new_tag).iterdir())) == 2, "what the crashed save left is gone"
                    assert not list(crashed.glob(".*"))
                shutil.rmtree(crashed)
        if number < len(recorder.steps):
            disk.take(recorder.steps[number])


@pytest.mark.parametrize("repeated", [False, True])
def test_C4_a_power_cut_leaves_the_old_or_the_new_whatever_it_takes_of_what_was_not_synced(
    tmp_path: Path, repeated: bool
) -> None:
    run = tmp_path / "run"
    old_tag, new_tag = ("t", "t") if repeated else ("global_step1", "global_step2")
    save_one(run, old_tag, OLD, size=2)
    disk = Disk(run)
    disk.load()
    recorder = Recorder()
    save_one(run, new_tag, NEW, size=2, calls=recorder)
    chance = random.Random(4)
    lost = 0
    for number in range(len(recorder.steps) + 1):
        for _ in range(20 if number == len(recorder.steps) else 4):
            crashed = tmp_path / "crashed"
            crashed.mkdir()
            disk.leave_some(crashed, chance)
            found = left_of(crashed)
            assert latest_tag(crashed) in found
            if number == len(recorder.steps):
                assert found == ({"t": NEW} if repeated else {old_tag: OLD, new_tag: NEW})
                assert latest_tag(crashed) == new_tag
            else:
                assert found[old_tag] in ((OLD, NEW) if repeated else (OLD,)), number
                assert found.get(new_tag, NEW) in ((OLD, NEW) if repeated else (NEW,)), number
                lost += NEW not in found.values()
            shutil.rmtree(crashed)
        if number < len(recorder.steps):
            disk.take(recorder.steps[number])
    assert lost > 10, "a power cut before the index was there took the new one"


def test_a_crash_while_old_ones_are_removed_leaves_no_part_of_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save_one(run, f"global_step{step}", float(step))
    disk = Disk(run)
    disk.load()
    recorder = Recorder()

    def save(saver: object, rank: int) -> None:
        saver.save(run, "global_step4", lambda: wanted(4.0, rank=rank, size=1), progress=nothing)  # type: ignore[attr-defined]

    with_savers(1, save, calls=recorder, asynchronous=False, keep_last=2)
    assert complete_tags(run) == ["global_step3", "global_step4"]
    for number in range(len(recorder.steps) + 1):
        for names_kept in (False, True):
            crashed = tmp_path / "crashed"
            crashed.mkdir()
            disk.leave(crashed, names_kept=names_kept, bytes_kept=False)
            found = left_of(crashed)
            assert found == {tag: float(tag[-1]) for tag in found}, number
            assert latest_tag(crashed) in found
            shutil.rmtree(crashed)
        if number < len(recorder.steps):
            disk.take(recorder.steps[number])
