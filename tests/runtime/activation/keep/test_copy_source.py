"""Rings whose copies are late give what was put, or an error with a name: whatever the script does to its tensors.

On the CPU a late copy is made when somebody waits for it; on CUDA it sleeps before it begins (support/slow_lanes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsrun.direct_io.extent_file import ExtentFile
from dsrun.direct_io.settings import IoSettings
from dsrun.errors import ModelError
from dsrun.runtime.activation.keep.disk_ring import DiskRing
from dsrun.runtime.activation.keep.host_ring import IN_FLIGHT, HostRing
from dsrun.runtime.activation.keep.keeper import Ticket
from dsrun.runtime.memory.bus import Bus, Event, StreamBus
from dsrun.runtime.memory.host_pool import host_pool_for
from support.devices import on_devices
from support.slow_lanes import CYCLES, LateBus, late_bus

CPU = torch.device("cpu")
NUMEL = 4096
Ring = HostRing | DiskRing
MakeRing = Callable[[torch.device, Bus], Ring]


def never(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture(params=["host memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeRing:
    def open_file() -> ExtentFile:
        return ExtentFile([str(tmp_path)], IoSettings(), what="activations of rank 0")

    def make_one(device: torch.device, bus: Bus) -> Ring:
        pool = host_pool_for(device, pin=True, say=never)
        if request.param == "host memory":
            return HostRing(device, bus, pool=pool)

        def memory(nbytes: int) -> Tensor:
            return pool.zeros(nbytes, dtype=torch.uint8)

        return DiskRing(device, bus, open_file=open_file, buffers=4, memory=memory)

    return make_one


class Noting(LateBus):
    """Knows where copies to the host read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def start_out(self, source_N: Tensor, host_N: Tensor, **more: Any) -> Event:
        self.read.append(source_N.data_ptr())
        return super().start_out(source_N, host_N, **more)


def ones(device: torch.device = CPU) -> Tensor:
    return torch.ones(NUMEL, device=device)


def leave(ring: Ring, device: torch.device = CPU) -> list[Ticket]:
    """Puts so many more that all before them have left the device."""
    return [ring.put(torch.zeros(NUMEL, device=device), label="others") for _ in range(IN_FLIGHT)]


def quiet_round(ring: Ring, tensor: Tensor, *, label: str = "blocks.3") -> None:
    """A step in which nothing changes."""
    tickets = [ring.put(tensor, label=label), *leave(ring, tensor.device)]
    while tickets:
        tickets.pop().take()


def change_a_view(x: Tensor) -> Tensor:
    return x.view(2, -1)[0].fill_(5.0)


def change_without_a_graph(x: Tensor) -> Tensor:
    return x.detach().add_(1)


def change_all(x: Tensor) -> Tensor:
    return x.zero_()


@pytest.mark.parametrize(
    ("device", "change", "others"),
    on_devices(
        product([change_all, change_a_view, change_without_a_graph], [False, True]),
        on_gpu=[(change_all, False), (change_a_view, True), (change_without_a_graph, False)],
    ),
    indirect=["device"],
)
def test_what_was_put_is_kept_though_the_tensor_changes_before_its_copy(
    make: MakeRing, device: torch.device, change: Callable[[Tensor], Tensor], *, others: bool
) -> None:
    ring = make(device, late_bus(device))
    for _step in range(3):
        x = ones(device)
        tickets = [ring.put(x, label="blocks.3")]
        change(x)
        tickets += leave(ring, device) if others else []
        while len(tickets) > 1:
            tickets.pop().take()
        assert torch.equal(tickets.pop().take(), ones(device))
    assert ring.device_bytes == 0


@pytest.mark.cuda
def test_a_large_tensor_on_a_gpu_comes_back_as_it_was_put(make: MakeRing) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring = make(device, StreamBus(device))
    x = torch.ones(64 << 20, device=device)
    ticket = ring.put(x)
    x.zero_()
    others = leave(ring, device)
    assert bool((ticket.take() == 1).all())
    del others


def test_tensors_that_stay_are_copied_from_where_they_are_from_the_second_step_on(make: MakeRing) -> None:
    bus = Noting()
    ring = make(CPU, bus)
    x = ones()
    for _step in range(3):
        quiet_round(ring, x)
    first, second, third = bus.read[0], bus.read[3], bus.read[6]
    assert first != x.data_ptr()
    assert second == third == x.data_ptr()


def test_a_kind_is_a_block_and_a_form(make: MakeRing) -> None:
    bus = Noting()
    ring = make(CPU, bus)
    quiet_round(ring, ones())
    for tensor, label in ((ones(), "blocks.4"), (torch.ones(NUMEL + 256), "blocks.3"), (ones().double(), "blocks.3")):
        bus.read.clear()
        quiet_round(ring, tensor, label=label)
        assert bus.read[0] != tensor.data_ptr()
        quiet_round(ring, tensor, label=label)
        assert bus.read[3] == tensor.data_ptr()


def test_within_a_step_nothing_is_learned_from_calls_of_the_same_label(make: MakeRing) -> None:
    bus = Noting()
    ring = make(CPU, bus)
    tensors = [ones() for _ in range(6)]
    tickets: list[Ticket] = []
    for tensor in tensors:
        tickets.append(ring.put(tensor, label="custom_forward"))
    tensors[5].zero_()
    assert not {tensor.data_ptr() for tensor in tensors} & set(bus.read)
    while tickets:
        assert torch.equal(tickets.pop().take(), ones())
    bus.read.clear()
    ticket = ring.put(tensors[0], label="custom_forward")
    assert bus.read[0] != tensors[0].data_ptr()  # one of them has changed: all are cloned from here on
    del ticket


def test_a_tensor_that_changes_in_a_later_step_only_is_refused_by_name_and_then_cloned(
    make: MakeRing, device: torch.device
) -> None:
    ring = make(device, late_bus(device))
    for others in (True, False):
        label = f"blocks.{others:d}"
        quiet_round(ring, ones(device), label=label)
        x = ones(device)
        tickets = [ring.put(x, label=label)]
        x.zero_()
        tickets += leave(ring, device) if others else []
        with pytest.raises(ModelError, match=rf"of shape \({NUMEL},\) that `{label}` needs again was changed in") as e:
            tickets[0].take()
        assert "`activation_checkpointing.blocks`" in str(e.value.hint)
        del e
        tickets.clear()
        x = ones(device)
        ticket = ring.put(x, label=label)
        x.zero_()
        assert torch.equal(ticket.take(), ones(device))
        del ticket


@pytest.mark.cuda
def test_a_clone_is_not_overwritten_by_the_stream_it_was_made_on_when_another_one_puts(make: MakeRing) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring = make(device, late_bus(device))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    x = ones(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        ticket = ring.put(x, label="blocks.3")
    with torch.cuda.stream(two):
        others = leave(ring, device)
    with torch.cuda.stream(one):
        later = [torch.full((NUMEL,), 7.0, device=device) for _ in range(8)]  # one of them where the clone was
    torch.cuda.synchronize()
    found = ticket.take()
    torch.cuda.synchronize()
    assert bool((found == 1).all())
    del later, others


@pytest.mark.cuda
def test_what_is_taken_on_another_stream_is_not_overwritten_by_the_one_that_fetched_it(make: MakeRing) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring = make(device, late_bus(device))
    tickets = [ring.put(torch.full((NUMEL,), float(i), device=device), label=f"blocks.{i}") for i in range(7)]
    two = torch.cuda.Stream()
    tickets.pop().take()
    while len(tickets) > 3:
        tickets[-1].take()
        tickets.pop()
    with torch.cuda.stream(two):
        torch.cuda._sleep(CYCLES)
        found = tickets[-1].take()  # fetched ahead on the other stream, and read here later
        doubled = found * 2
        del found
    later = [torch.full((NUMEL,), 7.0, device=device) for _ in range(8)]
    torch.cuda.synchronize()
    assert bool((doubled == 4.0).all())
    del later


def test_a_change_after_a_copy_that_was_seen_done_does_no_harm(make: MakeRing) -> None:
    bus = LateBus()
    ring = make(CPU, bus)
    quiet_round(ring, ones())
    x = ones()
    ticket = ring.put(x, label="blocks.3")
    bus.finish()
    tickets = [ring.put(ones(), label="others")]  # looks at what is leaving
    x.zero_()
    tickets += leave(ring)
    assert torch.equal(ticket.take(), ones())


def test_a_change_after_the_tensor_has_left_is_no_change(make: MakeRing) -> None:
    bus = Noting()
    ring = make(CPU, bus)
    x = ones()
    for _step in range(2):
        x.fill_(1.0)
        tickets = [ring.put(x, label="blocks.3"), *leave(ring)]
        x.zero_()
        assert torch.equal(tickets[0].take(), ones())
        tickets.clear()
    assert bus.read[3] == x.data_ptr()


def test_a_tensor_with_gaps_which_has_a_line_of_its_own_may_change(make: MakeRing) -> None:
    ring = make(CPU, LateBus())
    for _step in range(3):
        x = torch.ones(2 * NUMEL)[::2]
        tickets = [ring.put(x, label="blocks.3"), *leave(ring)]
        x.zero_()
        assert torch.equal(tickets[0].take(), ones())
        tickets.clear()


def test_what_was_taken_may_be_written_to_and_is_taken_again_as_it_was_put(
    make: MakeRing, device: torch.device
) -> None:
    ring = make(device, late_bus(device))
    with_gaps = torch.ones(NUMEL, 2, device=device)[:, 0]
    for tensor in (ones(device), with_gaps):
        ticket = ring.put(tensor, label="blocks.3")
        ticket.take().mul_(3)
        assert torch.equal(ticket.take(), ones(device))


def test_the_tensor_itself_is_let_go_where_a_clone_is_copied(make: MakeRing) -> None:
    ring = make(CPU, LateBus())
    x = ones()
    there = StorageWeakRef(x.untyped_storage())
    ticket = ring.put(x, label="blocks.3")
    assert ring.device_bytes == x.nbytes
    del x
    assert there.expired()
    assert torch.equal(ticket.take(), ones())


def test_values_and_counts_over_steps_of_many_tensors(make: MakeRing, device: torch.device) -> None:
    ring = make(device, late_bus(device))
    for step in range(3):
        values: Sequence[Tensor] = [torch.full((NUMEL,), 10.0 * step + i, device=device) for i in range(7)]
        tickets = [ring.put(value.clone(), label=f"blocks.{i}") for i, value in enumerate(values)]
        assert ring.device_bytes == IN_FLIGHT * NUMEL * 4
        for value in reversed(values):
            assert torch.equal(tickets.pop().take(), value)
        assert ring.device_bytes == 0
