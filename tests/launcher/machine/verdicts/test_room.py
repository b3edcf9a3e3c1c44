"""A folder without room is told by its name; only a job that is sure to write there fails of it."""

from __future__ import annotations

import pytest

from dsrun.launcher.machine.storage import Room
from dsrun.launcher.machine.verdict import Context, ProbeVerdict
from dsrun.launcher.machine.verdicts.room import fault_text, room_verdicts, working_folder_verdicts

MIB, GIB = 1 << 20, 1 << 30


def room(*, free: int | None = 900 * GIB, fault: str | None = None, there: str = "/nvme/0") -> Room:
    return Room(path="/nvme/0", there=there, free_bytes=free, fault=fault)


def said(one: Room, *, writes: bool) -> list[ProbeVerdict]:
    return [*room_verdicts(one, path="storage.paths.1", context=Context(writes=writes))]


@pytest.mark.parametrize(
    ("one", "levels", "text"),
    [
        (room(free=3 * GIB), ("amber", "amber"), "3.0 GiB free for /nvme/0"),
        (room(free=100 * MIB - 1), ("amber", "red"), "no space left for /nvme/0"),
        (room(fault="is read-only"), ("amber", "red"), "/nvme/0 is read-only"),
        (room(fault="is read-only", free=0), ("amber", "red"), "/nvme/0 is read-only"),
    ],
)
def test_a_folder_without_room_fails_a_job_that_writes_there(one: Room, levels: tuple[str, str], text: str) -> None:
    for writes, level in zip((False, True), levels, strict=True):
        (found,) = said(one, writes=writes)
        assert (found.level, found.text) == (level, text)
        assert found.fix
        assert found.path.startswith("storage.paths.1.")


@pytest.mark.parametrize("one", [room(), room(free=10 * GIB), room(free=None)])
def test_a_folder_with_room_is_not_spoken_of(one: Room) -> None:
    assert said(one, writes=True) == []


def test_a_folder_that_cannot_be_made_is_told_with_the_one_above_it() -> None:
    above = room(fault="cannot be written to", there="/nvme")
    assert fault_text(above) == "/nvme cannot be written to, and /nvme/0 is to be made below it"


@pytest.mark.parametrize(("free", "told"), [(GIB - 1, True), (GIB, False), (None, False)])
def test_a_working_folder_may_be_smaller_and_refuses_nothing(free: int | None, told: bool) -> None:
    found = [*working_folder_verdicts("/work", free_bytes=free, path="storage.paths.0")]
    assert [one.level for one in found] == ["amber"] * told
    assert all(one.text.endswith(" free in the working folder /work") for one in found)


def test_a_working_folder_that_takes_no_file_is_told_as_such_with_another_way_out() -> None:
    (found,) = working_folder_verdicts("/work", free_bytes=0, fault="is read-only", path="storage.paths.0")
    assert (found.level, found.text) == ("amber", "the working folder /work is read-only")
    assert found.fix == "`cd` to another folder, or write checkpoints elsewhere"
