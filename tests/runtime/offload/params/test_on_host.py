"""Slices in host memory: what crosses the bus, in which order, and that nothing waits for it before it must."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.memory.bus import Bus, CopyCounts, InstantBus, ThreadBus
from dsrun.runtime.memory.host_pool import HostPool
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.offload.params.on_host import HostShards

CPU = torch.device("cpu")
DEADLINE_S = 60.0
SHARD = 512


class Gate:
    """A pace that lets copies pass when it is told to."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)

    def __call__(self, nbytes: int) -> None:
        assert self._open.acquire(timeout=DEADLINE_S), "the gate was not opened"

    def let_pass(self, copies: int = 1) -> None:
        self._open.release(copies)


def silent(text: str) -> None:
    raise AssertionError(text)


def make(
    collectives: Any = None, *, bus: Bus | None = None, count: int = 2, leaving: int | None = None
) -> tuple[HostShards, Arenas]:
    """Slices 0 to `count` - 1 of bf16, the slice i of rank r filled with 10 r + i."""
    axis = AloneCollectives() if collectives is None else collectives
    arenas = Arenas()
    shards = HostShards(ThreadBus() if bus is None else bus, arenas, pool=HostPool(None, say=silent), device=CPU)
    shards.reserve("parameter shards", [SHARD] * count, torch.bfloat16, labels=[f"unit {i}" for i in range(count)])
    for index in range(count):
        shards.admit(index, torch.full((SHARD,), 10.0 * axis.rank + index))
    if leaving is not None:
        shards.reserve_leaving(leaving, torch.bfloat16)
    return shards, arenas


def flat(size: int = 1) -> Tensor:
    return torch.full((SHARD * size,), float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make_bus", [InstantBus, ThreadBus])
def test_every_rank_gets_the_slices_of_all(size: int, make_bus: Callable[[], Bus]) -> None:
    def body(collectives: LoopbackCollectives) -> tuple[list[Tensor], CopyCounts, dict[str, int]]:
        shards, _ = make(collectives, bus=make_bus())
        buffers = [flat(size), flat(size)]
        pending = [
            shards.gather(index, buffer, collectives, label=f"unit {index}") for index, buffer in enumerate(buffers)
        ]
        for work in pending:
            work.wait()
            work.wait()  # once more does nothing
        return buffers, shards.bus.counts.back["parameters"], dict(collectives.traffic.calls)

    for buffers, moved, calls in LoopbackWorld(size).run(body):
        for index, buffer in enumerate(buffers):
            expected = torch.cat([torch.full((SHARD,), 10.0 * rank + index) for rank in range(size)])
            assert torch.equal(buffer.float(), expected)
        assert moved == CopyCounts(2, 2 * SHARD * 2), "a rank's own slices cross, and nobody else's"
        assert calls == {"all_gather": 2}


def test_slices_lie_in_an_arena_of_the_host() -> None:
    _, arenas = make()
    (use,) = arenas.report().arenas
    assert (use.name, use.tier, use.dtype) == ("parameter shards", "host", "bfloat16")
    assert use.reserved_bytes == use.used_bytes == 2 * SHARD * 2


def test_a_gather_waits_for_its_slice_only_when_it_is_wanted() -> None:
    gate = Gate()
    shards, _ = make(bus=ThreadBus(back_pace=gate))
    first, second = flat(), flat()
    arriving = [
        shards.gather(0, first, AloneCollectives(), label="unit 0"),
        shards.gather(1, second, AloneCollectives(), label="unit 1"),
    ]
    assert first.isnan().all(), "both are on their way, and this thread goes on"
    gate.let_pass()
    arriving[0].wait()
    assert torch.equal(first.float(), torch.zeros(SHARD))
    assert second.isnan().all()
    gate.let_pass()
    arriving[1].wait()
    assert torch.equal(second.float(), torch.ones(SHARD))


def test_new_values_of_the_device_are_rounded_there_and_leave_in_pieces() -> None:
    shards, arenas = make(leaving=200)
    values = torch.linspace(-3, 3, SHARD)
    shards.write(1, values)
    buffer = flat()
    shards.gather(1, buffer, AloneCollectives(), label="unit 1").wait()
    assert torch.equal(buffer, values.bfloat16())
    assert shards.bus.counts.out["parameters"] == CopyCounts(3, SHARD * 2), "512 elements through buffers of 200"
    assert {use.name: use.reserved_bytes for use in arenas.report().arenas}["parameters leaving"] == 2 * 256 * 2


def test_a_gather_runs_behind_the_new_values_that_are_still_on_their_way() -> None:
    gate = Gate()
    shards, _ = make(bus=ThreadBus(out_pace=gate), leaving=SHARD)
    shards.write(0, torch.full((SHARD,), 5.0))
    buffer = flat()
    arriving = shards.gather(0, buffer, AloneCollectives(), label="unit 0")
    assert buffer.isnan().all()
    gate.let_pass()
    arriving.wait()
    assert torch.equal(buffer.float(), torch.full((SHARD,), 5.0))


def test_new_values_leave_behind_a_gather_of_the_old_ones() -> None:
    gate = Gate()
    shards, _ = make(bus=ThreadBus(back_pace=gate), leaving=SHARD)
    buffer = flat()
    arriving = shards.gather(1, buffer, AloneCollectives(), label="unit 1")
    shards.write(1, torch.full((SHARD,), 5.0))
    gate.let_pass()
    arriving.wait()
    assert torch.equal(buffer.float(), torch.ones(SHARD)), "it was asked for before"
    gate.let_pass()
    shards.gather(1, buffer, AloneCollectives(), label="unit 1").wait()
    assert torch.equal(buffer.float(), torch.full((SHARD,), 5.0))


def test_values_that_are_on_the_host_already_do_not_cross_the_bus() -> None:
    shards, _ = make()
    shards.write(0, torch.full((SHARD,), 7.0))
    assert shards.bus.counts.out["parameters"] == CopyCounts(0, 0)
    buffer = flat()
    shards.gather(0, buffer, AloneCollectives(), label="unit 0").wait()
    assert torch.equal(buffer.float(), torch.full((SHARD,), 7.0))


def test_values_on_the_host_wait_for_a_copy_that_reads_the_old_ones() -> None:
    gate = Gate()
    shards, _ = make(bus=ThreadBus(back_pace=gate))
    buffer = flat()
    arriving = shards.gather(1, buffer, AloneCollectives(), label="unit 1")
    writer = threading.Thread(target=partial(shards.write, 1, torch.full((SHARD,), 7.0)))
    writer.start()
    gate.let_pass()
    arriving.wait()
    writer.join(DEADLINE_S)
    assert torch.equal(buffer.float(), torch.ones(SHARD))


def test_settled_slices_may_be_read_where_they_lie() -> None:
    gate = Gate()
    shards = HostShards(ThreadBus(out_pace=gate), Arenas(), pool=HostPool(None, say=silent), device=CPU)
    shards.reserve("parameter shards", [SHARD], torch.bfloat16, labels=["unit 0"])
    slice_S = shards.admit(0, torch.zeros(SHARD))
    shards.reserve_leaving(SHARD, torch.bfloat16)
    shards.write(0, torch.full((SHARD,), 5.0))
    assert not slice_S.any()
    gate.let_pass()
    shards.settle()
    assert torch.equal(slice_S.float(), torch.full((SHARD,), 5.0))
