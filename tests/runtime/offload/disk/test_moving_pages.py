"""Pages keep what they hold wherever they go, and where they are not, nobody reads a number."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.runtime.offload.disk.moving_pages import HUGE_BYTES, AddressSpace, Frame, cut_frames, room_for_frames

PAGE = mmap.PAGESIZE


def pages(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def test_pages_go_and_come_back_with_what_they_hold() -> None:
    space, memory = AddressSpace(4 * PAGE), pages(2 * PAGE)
    frame = Frame(memory)
    memory[:3] = b"abc"
    there = space.view(PAGE, 2 * PAGE)
    frame.go_to(space.address + PAGE, 2 * PAGE)
    assert bytes(there[:3]) == b"abc"
    there[2 * PAGE - 1 :] = b"z"
    frame.come_back()
    assert (bytes(memory[:3]), bytes(memory[-1:])) == (b"abc", b"z")


def test_a_part_of_a_frame_may_go_alone() -> None:
    space, memory = AddressSpace(PAGE), pages(2 * PAGE)
    frame = Frame(memory)
    memory[:1], memory[PAGE : PAGE + 1] = b"a", b"b"
    frame.go_to(space.address, PAGE)
    assert (bytes(space.view(0, 1)), bytes(memory[PAGE : PAGE + 1])) == (b"a", b"b")
    frame.come_back()
    assert bytes(memory[:1]) == b"a"


def test_two_frames_take_turns_at_one_address() -> None:
    space = AddressSpace(PAGE)
    memories = [pages(PAGE), pages(PAGE)]
    frames = [Frame(memory) for memory in memories]
    for number, memory in enumerate(memories):
        memory[:1] = bytes([65 + number])
    seen: list[bytes] = []
    for frame in (*frames, *frames):
        frame.go_to(space.address, PAGE)
        seen.append(bytes(space.view(0, 1)))
        frame.come_back()
    assert seen == [b"A", b"B", b"A", b"B"]


def test_a_frame_is_at_one_place() -> None:
    space = AddressSpace(2 * PAGE)
    frame = Frame(pages(PAGE))
    with pytest.raises(AssertionError, match="the frame is here"):
        frame.come_back()
    frame.go_to(space.address, PAGE)
    with pytest.raises(AssertionError, match="the frame is elsewhere"):
        frame.go_to(space.address + PAGE, PAGE)
    frame.come_back()


@pytest.mark.parametrize("where", ["space.view(0, 1)[0]", "memory[0]"])
def test_memory_that_is_elsewhere_ends_the_process_that_reads_it(where: str) -> None:
    # `memory` while the frame is away, and the space while it is not there.
    code = (
        "import mmap\n"
        "from dsrun.runtime.offload.disk.moving_pages import AddressSpace, Frame\n"
        "space, memory = AddressSpace(mmap.PAGESIZE), memoryview(mmap.mmap(-1, mmap.PAGESIZE, flags=34))\n"
        "frame = Frame(memory)\n"
        "frame.go_to(space.address, mmap.PAGESIZE)\n"
        "if 'space' in WHERE: frame.come_back()\n"
        "print('up', flush=True)\n"
        f"{where}\n"
        "print('read', flush=True)\n"
    ).replace("WHERE", repr(where))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "up\n")


@pytest.mark.parametrize("nbytes", [PAGE, HUGE_BYTES - PAGE, HUGE_BYTES, HUGE_BYTES + PAGE])
def test_frames_are_whole_pages_and_large_ones_begin_where_huge_pages_do(nbytes: int) -> None:
    memory = pages(room_for_frames(3, nbytes))
    frames = cut_frames(memory, nbytes)
    assert len(frames) >= 3
    space = AddressSpace(3 * (nbytes + HUGE_BYTES))
    for number, frame in enumerate(frames[:3]):
        frame.go_to(space.address + number * (nbytes + HUGE_BYTES) // PAGE * PAGE, nbytes)
    for frame in frames[:3]:
        frame.come_back()


def test_no_frames_need_no_memory() -> None:
    assert cut_frames(memoryview(b""), PAGE) == []


def test_a_file_is_shown_both_ways_until_the_space_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE) + b"a" * PAGE)
    space = AddressSpace(3 * PAGE)
    with path.open("r+b") as file:
        space.show_file(PAGE, PAGE, file.fileno(), PAGE)
        there = space.view(PAGE, PAGE)
        assert bytes(there[:2]) == b"aa"
        there[:1] = b"b"
        space.empty()
    assert path.read_bytes()[PAGE : PAGE + 2] == b"ba"
    frame = Frame(pages(PAGE))
    frame.go_to(space.address + PAGE, PAGE)
    assert bytes(space.view(PAGE, 1)) == b"\0"
    frame.come_back()


def test_what_was_written_is_known_to_be_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 64 * PAGE)
    space = AddressSpace(64 * PAGE)
    with path.open("r+b") as file:
        space.show_file(0, 64 * PAGE, file.fileno(), 0)
        space.view(PAGE, 1)[:] = b"b"
        assert space.was_touched(PAGE, PAGE)
