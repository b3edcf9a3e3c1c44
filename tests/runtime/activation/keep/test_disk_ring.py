"""The ring over a file: what is read and written when, how much memory it takes, and what it says of a bad disk."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsrun.direct_io.calls import DiskCalls
from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import ALIGN, IoSettings
from dsrun.errors import OffloadError
from dsrun.runtime.activation.keep.disk_ring import DiskRing
from dsrun.runtime.activation.keep.host_ring import IN_FLIGHT
from dsrun.runtime.activation.keep.keeper import Ticket
from dsrun.runtime.memory.bus import Bus, InstantBus, ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from support.disks import FailingDisk, failure

CPU = torch.device("cpu")
NUMEL = 2048
NBYTES = NUMEL * 4


def all_of_it(at: int, nbytes: int) -> None:
    """The rule of a disk that works."""


def no_answer(at: int, nbytes: int) -> OSError:
    return failure(errno.EIO)


def never(text: str) -> None:
    raise AssertionError(text)


def memory(nbytes: int) -> Tensor:
    return HostPool(None, say=never).zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., DiskRing]:
    def ring(*, calls: DiskCalls | None = None, bus: Bus | None = None, buffers: int = 4) -> DiskRing:
        def open_file() -> ExtentFile:
            return ExtentFile([str(tmp_path)], IoSettings(), what="activations of rank 0", calls=calls)

        return DiskRing(CPU, bus or InstantBus(), open_file=open_file, buffers=buffers, memory=memory)

    return ring


def tensors(count: int, numel: int = NUMEL) -> list[Tensor]:
    return [torch.full((numel,), float(i)) for i in range(count)]


def put_all(ring: DiskRing, values: list[Tensor]) -> list[Ticket]:
    return [ring.put(tensor, label=f"blocks.{i}") for i, tensor in enumerate(values)]


def take_all(tickets: list[Ticket], values: list[Tensor]) -> None:
    while tickets:
        found = tickets[-1].take()
        assert torch.equal(found, values[len(tickets) - 1])
        tickets.pop()


@pytest.mark.parametrize("bus", [InstantBus, ThreadBus])
@pytest.mark.parametrize("buffers", [3, 4, 7])
def test_what_was_put_comes_back_bit_for_bit_over_several_steps(
    make: Callable[..., DiskRing], bus: Callable[[], Bus], buffers: int
) -> None:
    ring = make(bus=bus(), buffers=buffers)
    for step in range(3):
        values = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(step * 99 + i)) for i in range(11)]
        take_all(put_all(ring, values), values)
    assert ring.device_bytes == 0


@pytest.mark.parametrize("count", [6, 40])
def test_host_memory_holds_so_many_inputs_whatever_the_depth(make: Callable[..., DiskRing], count: int) -> None:
    ring = make()
    values = tensors(count)
    tickets = put_all(ring, values)
    assert ring.host_bytes == 4 * NBYTES
    assert ring.disk_bytes == (count - IN_FLIGHT) * NBYTES
    take_all(tickets, values)
    assert ring.host_bytes == 4 * NBYTES


def test_bytes_are_counted_and_those_still_in_memory_are_not_read(make: Callable[..., DiskRing]) -> None:
    ring, count = make(), 10
    values = tensors(count)
    tickets = put_all(ring, values)
    take_all(tickets, values)
    moved = ring.counts()
    assert moved.written_bytes == (count - IN_FLIGHT) * NBYTES
    assert moved.read_bytes == (count - 4) * NBYTES  # four were in buffers when backward began


def test_reads_begin_before_they_are_wanted(make: Callable[..., DiskRing]) -> None:
    begun = threading.Event()
    disk = FailingDisk()
    ring = make(calls=disk)
    tickets = put_all(ring, tensors(8))

    def note(at: int, nbytes: int) -> None:
        begun.set()

    disk.on_read = note
    tickets.pop().take()  # the buffer is free from here on
    tickets.pop().take()
    assert begun.wait(60)  # of the fourth, while the third of four in memory is still to be taken


def test_the_file_is_used_again_and_has_no_name(make: Callable[..., DiskRing], tmp_path: Path) -> None:
    ring = make()
    sizes: list[int] = []
    for _step in range(4):
        values = tensors(9)
        take_all(put_all(ring, values), values)
        sizes.append(ring.disk_bytes)
    assert sizes == [(9 - IN_FLIGHT) * NBYTES] * 4
    assert os.listdir(tmp_path) == []


def test_inputs_of_ever_other_sizes_do_not_make_the_file_grow_on(make: Callable[..., DiskRing]) -> None:
    ring = make()
    for step in range(1, 20):
        values = tensors(8, ALIGN * step)
        take_all(put_all(ring, values), values)
        # Room of this round and of one before it, at most.
        assert ring.disk_bytes <= 2 * (8 - IN_FLIGHT) * ALIGN * 4 * step + 8 * ALIGN * 4 * step
    assert ring.counts().written_bytes == sum((8 - IN_FLIGHT) * ALIGN * 4 * step for step in range(1, 20))


def test_tickets_that_are_dropped_without_a_backward_give_room_back(make: Callable[..., DiskRing]) -> None:
    ring = make()
    for _ in range(3):
        tickets = put_all(ring, tensors(8))
        del tickets
    assert ring.disk_bytes == (8 - IN_FLIGHT) * NBYTES
    assert ring.device_bytes == 0


def test_a_tensor_that_changes_after_it_was_put_comes_back_as_it_was(make: Callable[..., DiskRing]) -> None:
    ring = make()
    tensor = torch.ones(NUMEL)
    ticket = ring.put(tensor)
    tensor.zero_()
    assert torch.equal(ticket.take(), torch.ones(NUMEL))


def test_taking_twice_and_in_any_order_gives_the_same(make: Callable[..., DiskRing]) -> None:
    ring = make(buffers=3)
    values = tensors(9)
    tickets = put_all(ring, values)
    for i in (0, 8, 4, 4, 1, 7, 0, 3, 8):
        assert torch.equal(tickets[i].take(), values[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_dtypes_shapes_strides_and_odd_sizes_come_back(make: Callable[..., DiskRing], dtype: torch.dtype) -> None:
    ring = make()
    tensor = torch.randint(0, 2, (5, 7, 3)).to(dtype).transpose(0, 2)
    tickets = [ring.put(tensor), ring.put(torch.empty(0, 3)), *put_all(ring, tensors(6))]
    found = tickets[0].take()
    assert torch.equal(found, tensor)
    assert (found.dtype, found.stride()) == (dtype, tensor.stride())
    assert tickets[1].take().shape == (0, 3)


def test_a_full_disk_names_path_and_block(make: Callable[..., DiskRing], tmp_path: Path) -> None:
    ring = make(calls=FailingDisk(free=0))
    with pytest.raises(OffloadError, match=re.escape(f"activations of `blocks.0`: {tmp_path}")) as caught:
        put_all(ring, tensors(8))
    assert "are free" in str(caught.value)
    assert caught.value.hint is not None


def test_a_write_that_fails_names_path_and_block_when_the_memory_is_wanted(
    make: Callable[..., DiskRing], tmp_path: Path
) -> None:
    ring = make(calls=FailingDisk(write=lambda at, nbytes: failure(errno.EIO)))
    wanted = re.escape(f"activations of `blocks.0`: {tmp_path}") + ".*cannot be written: Input/output error"
    with pytest.raises(OffloadError, match=wanted):
        put_all(ring, tensors(8))


def test_a_read_that_fails_names_path_and_block(make: Callable[..., DiskRing], tmp_path: Path) -> None:
    disk = FailingDisk()
    ring = make(calls=disk)
    tickets = put_all(ring, tensors(8))
    disk.on_read = no_answer
    wanted = re.escape(f"activations of `blocks.3`: {tmp_path}") + ".*cannot be read: Input/output error"
    with pytest.raises(OffloadError, match=wanted):
        take_all(tickets, tensors(8))


def test_a_file_that_was_cut_short_is_an_error_and_never_zeros(make: Callable[..., DiskRing], tmp_path: Path) -> None:
    opened: list[int] = []
    done: list[int] = []
    all_written = threading.Event()

    class Disk(FailingDisk):
        def open(self, path: str, flags: int, mode: int) -> int:
            opened.append(super().open(path, flags, mode))
            return opened[-1]

        def write(self, fd: int, data: memoryview, at: int) -> int:
            moved = super().write(fd, data, at)
            done.append(at)
            if len(done) == 8 - IN_FLIGHT:
                all_written.set()
            return moved

    ring = make(calls=Disk())
    values = [torch.ones(NUMEL) for _ in range(8)]
    tickets = put_all(ring, values)
    assert all_written.wait(60)  # a later write would make the file long again
    os.ftruncate(opened[-1], 0)
    wanted = re.escape(f"activations of `blocks.3`: {tmp_path}") + ".*it was cut short"
    with pytest.raises(OffloadError, match=wanted):
        take_all(tickets, values)


def test_nothing_is_computed_on_after_an_error_but_all_is_let_go(make: Callable[..., DiskRing]) -> None:
    disk = FailingDisk(write=lambda at, nbytes: failure(errno.ENOSPC))
    ring = make(calls=disk)
    failed = False
    try:
        put_all(ring, tensors(8))
    except OffloadError:  # and not pytest.raises, which keeps the frames and so the tickets
        failed = True
    assert failed
    disk.on_write = all_of_it
    values = tensors(8)
    take_all(put_all(ring, values), values)
    assert ring.device_bytes == 0
