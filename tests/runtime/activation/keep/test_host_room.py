"""Room in host memory: how many bytes are locked, in how many pieces, and that none goes while a copy is at work."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from dsrun.runtime.activation.keep.host_ring import HostRing
from dsrun.runtime.activation.keep.host_room import HostRoom
from dsrun.runtime.memory.bus import InstantBus, bus_for
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.memory.page_lock import CudaLock, Lock
from support.slow_lanes import SleepyBus

CPU = torch.device("cpu")
MIB = 1 << 20


class Locks:
    """Knows what is locked.

    Args:
        seen: gets a line when memory is unlocked.
        inner: locks; None: nobody does.
    """

    def __init__(self, seen: list[str] | None = None, *, inner: Lock | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.calls = 0
        self.seen = [] if seen is None else seen
        self.inner = inner

    @property
    def nbytes(self) -> int:
        return sum(self.locked.values())

    def __call__(self, address: int, nbytes: int) -> Callable[[], object]:
        self.calls += 1
        end = None if self.inner is None else self.inner(address, nbytes)
        self.locked[address] = nbytes

        def unlock() -> None:
            self.seen.append("unlocked")
            del self.locked[address]
            if end is not None:
                end()

        return unlock


class Finishing(InstantBus):
    """Notes when its copies are waited for."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def finish(self) -> None:
        self._seen.append("finished")


def nothing() -> None:
    """Copies are done."""


def never() -> None:
    raise AssertionError("no memory goes")


def one_round(room: HostRoom, sizes: list[int], settle: Callable[[], None] = nothing) -> None:
    room.begin_round(settle)
    taken = [room.take(size) for size in sizes]
    while taken:
        room.give_back(taken.pop())


@pytest.mark.parametrize("nbytes", [64 << 10, 700_000, 5 * MIB])
def test_after_the_first_round_as_much_is_locked_as_was_in_use_at_once(nbytes: int) -> None:
    locks = Locks()
    room = HostRoom(HostPool(locks, say=print))
    sizes = [nbytes] * 64
    one_round(room, sizes)
    assert locks.nbytes == room.nbytes
    assert room.nbytes <= 1.25 * sum(sizes) + 2 * nbytes + 2 * MIB
    assert locks.calls <= 24, "pieces of one tensor each would be 64"
    one_round(room, sizes)
    assert sum(sizes) <= locks.nbytes == room.nbytes <= sum(sizes) + 64 * 256
    calls = locks.calls
    for _ in range(3):
        one_round(room, sizes, never)
    assert locks.calls == calls
    del room
    gc.collect()
    assert locks.nbytes == 0


def test_a_round_that_needs_more_gets_pieces_and_then_a_larger_whole() -> None:
    locks = Locks()
    room = HostRoom(HostPool(locks, say=print))
    for count in (8, 8, 12):
        one_round(room, [5 * MIB] * count)
    assert 60 * MIB <= locks.nbytes <= 63 * MIB
    one_round(room, [5 * MIB] * 12)
    one_round(room, [5 * MIB] * 12, never)
    assert locks.nbytes == room.nbytes == 60 * MIB


def test_holes_that_lifetimes_leave_do_not_make_it_anew_each_round() -> None:
    locks = Locks()
    room = HostRoom(HostPool(locks, say=print))
    calls: list[int] = []
    for _ in range(6):
        room.begin_round(nothing)
        first, second = room.take(8 * MIB), room.take(8 * MIB)
        room.give_back(first)
        third = room.take(12 * MIB)  # 20 MiB at once, which do not fit in 20
        room.give_back(second)
        room.give_back(third)
        calls.append(locks.calls)
    assert calls[-1] == calls[-2] == calls[-3]
    assert locks.nbytes == room.nbytes == 32 * MIB


def test_memory_that_is_not_locked_is_taken_as_it_is_needed() -> None:
    room = HostRoom(HostPool(None, say=print))
    one_round(room, [256] * 5)
    assert room.nbytes == 5 * 256


def test_memory_goes_after_the_copies_that_are_at_work_on_it() -> None:
    seen: list[str] = []
    ring = HostRing(CPU, Finishing(seen), pool=HostPool(Locks(seen), say=print))
    for _step in range(2):
        tickets = [ring.put(torch.ones(2 * MIB)) for _ in range(2)]
        tickets.clear()
    assert seen == ["finished", "unlocked", "unlocked"]
    seen.clear()
    del ring
    gc.collect()
    assert seen == ["finished", "unlocked"]


def test_the_rings_bytes_are_those_that_are_locked() -> None:
    locks = Locks()
    ring = HostRing(CPU, InstantBus(), pool=HostPool(locks, say=print))
    for _step in range(2):
        tickets = [ring.put(torch.ones(700_000)) for _ in range(20)]
        assert locks.nbytes == ring.host_bytes
        del tickets
    assert locks.nbytes <= 1.1 * 20 * 700_000 * 4
    del ring
    gc.collect()
    assert locks.nbytes == 0


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_a_gpus_ring_takes_nothing_of_torchs_own_locked_memory_and_gives_all_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(3 * MIB, device=device)

    def torchs_bytes() -> int:
        stats = getattr(torch.cuda, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0))

    locks = Locks(inner=CudaLock(device))
    pool = HostPool(locks, say=print)
    assert torch.equal(x, x.clone())  # which takes the memory that answers come through; of itself, torch asks nothing
    before = torchs_bytes()
    for _ring in range(2):
        ring = HostRing(device, bus_for(device), pool=pool)
        for _step in range(2):
            tickets = [ring.put(x) for _ in range(20)]
            assert torch.equal(tickets[0].take(), x)
            tickets.clear()
        assert pool.pins, "the memory could be locked"
        assert 20 * x.nbytes <= locks.nbytes == ring.host_bytes <= 1.01 * 20 * x.nbytes
        del ring
        gc.collect()
        assert locks.nbytes == 0
    assert torchs_bytes() == before


@pytest.mark.cuda
def test_a_gpus_ring_that_is_dropped_lets_its_copies_end_before_its_memory_goes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bus = SleepyBus(device, cycles=200_000_000)
    ended: list[bool] = []
    lock = CudaLock(device)

    def noting(address: int, nbytes: int) -> Callable[[], object]:
        unlock = lock(address, nbytes)

        def unlock_noting() -> None:
            ended.append(bus._out.query())
            unlock()

        return unlock_noting

    ring = HostRing(device, bus, pool=HostPool(noting, say=print))
    ring.put(torch.ones(MIB, device=device))
    assert not bus._out.query()
    del ring
    gc.collect()
    assert ended == [True]
