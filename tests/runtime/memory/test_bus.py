"""The bus on a CPU: what overlaps, in which order copies come, what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from dsrun.runtime.memory.bus import Bus, CopyCounts, InstantBus, ThreadBus, bus_for, instant_bus_for
from support.paced_bus import SteadyPace

CPU = torch.device("cpu")
NUMEL = 1000
DEADLINE_S = 60.0


class Gate:
    """A pace that lets copies pass one by one, when it is told to."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)

    def __call__(self, nbytes: int) -> None:
        assert self._open.acquire(timeout=DEADLINE_S), "the gate was not opened"

    def let_pass(self, copies: int = 1) -> None:
        self._open.release(copies)


@pytest.mark.parametrize("make", [InstantBus, ThreadBus])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_elements_go_out_and_come_back_as_they_are(make: Callable[[], Bus], dtype: torch.dtype) -> None:
    bus = make()
    source = torch.arange(NUMEL).to(dtype)
    host, target = torch.zeros_like(source), torch.zeros_like(source)
    bus.wait(bus.start_out(source, host, kind="states"))
    assert torch.equal(host, source)
    bus.wait(bus.start_back(host, target, kind="states"))
    assert torch.equal(target, source)


@pytest.mark.parametrize("make", [InstantBus, ThreadBus])
def test_copies_are_counted_each_way_by_kind(make: Callable[[], Bus]) -> None:
    bus = make()
    device, host = torch.zeros(NUMEL, dtype=torch.bfloat16), torch.zeros(NUMEL, dtype=torch.bfloat16)
    bus.start_out(device, host, kind="gradients")
    bus.start_out(device[:10], host[:10], kind="gradients")
    bus.start_back(host, device, kind="parameters")
    bus.finish()
    assert bus.counts.out["gradients"] == CopyCounts(2, 2 * NUMEL + 20)
    assert bus.counts.back["parameters"] == CopyCounts(1, 2 * NUMEL)
    assert bus.counts.out["parameters"] == bus.counts.back["gradients"] == CopyCounts(0, 0)
    assert (bus.counts.out_bytes, bus.counts.back_bytes) == (2 * NUMEL + 20, 2 * NUMEL)


def test_a_copy_runs_beside_the_thread_that_started_it() -> None:
    gate = Gate()
    bus = ThreadBus(back_pace=gate)
    host, target = torch.ones(NUMEL), torch.zeros(NUMEL)
    event = bus.start_back(host, target, kind="parameters")
    assert not event.query()
    assert not target.any()
    gate.let_pass()
    event.synchronize()
    assert event.query()
    assert target.all()


def test_the_ways_do_not_wait_for_each_other() -> None:
    gate = Gate()
    bus = ThreadBus(out_pace=gate)
    device, host = torch.zeros(NUMEL), torch.ones(NUMEL)
    leaving = bus.start_out(torch.ones(NUMEL), torch.zeros(NUMEL), kind="gradients")
    bus.start_back(host, device, kind="parameters").synchronize()
    assert device.all()
    assert not leaving.query()
    gate.let_pass()
    bus.finish()
    assert leaving.query()


def test_copies_of_one_way_come_in_the_order_in_which_they_started() -> None:
    gate = Gate()
    bus = ThreadBus(back_pace=gate)
    target = torch.zeros(NUMEL)
    events = [bus.start_back(torch.full((NUMEL,), float(i)), target, kind="parameters") for i in range(1, 4)]
    for i, event in enumerate(events, start=1):
        assert [later.query() for later in events[i:]] == [False] * (3 - i)
        gate.let_pass()
        event.synchronize()
        assert torch.equal(target, torch.full((NUMEL,), float(i)))


def test_a_copy_back_waits_for_the_copy_out_that_it_is_told_of() -> None:
    gate = Gate()
    bus = ThreadBus(out_pace=gate)
    host, target = torch.zeros(NUMEL), torch.zeros(NUMEL)
    leaving = bus.start_out(torch.ones(NUMEL), host, kind="parameters")
    arriving = bus.start_back(host, target, kind="parameters", after=[leaving])
    assert not arriving.query()
    gate.let_pass()
    bus.wait(arriving)
    assert target.all()


def test_only_the_host_can_wait_for_a_thread() -> None:
    bus, instant = ThreadBus(), InstantBus()
    one, other = torch.ones(NUMEL), torch.zeros(NUMEL)
    assert bus.behind(bus.start_back(one, other, kind="parameters")) is None
    assert instant.behind(instant.start_back(one, other, kind="parameters")) is not None
    bus.finish()


def test_finish_waits_for_both_ways() -> None:
    gate = Gate()
    bus = ThreadBus(out_pace=gate, back_pace=gate)
    host, target = torch.zeros(NUMEL), torch.zeros(NUMEL)
    bus.start_out(torch.ones(NUMEL), host, kind="gradients")
    bus.start_back(torch.ones(NUMEL), target, kind="parameters")
    gate.let_pass(2)
    bus.finish()
    assert host.all()
    assert target.all()


@pytest.mark.parametrize("make", [InstantBus, ThreadBus])
def test_autograd_sees_no_new_version_of_what_a_copy_writes(make: Callable[[], Bus]) -> None:
    bus = make()
    slot = torch.ones(NUMEL)
    weight = slot.narrow(0, 0, NUMEL).requires_grad_()
    x = torch.ones(NUMEL, requires_grad=True)
    y = (x * weight).sum()  # saves `weight`
    bus.wait(bus.start_back(torch.full((NUMEL,), 3.0), slot, kind="parameters"))
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((NUMEL,), 3.0))


@pytest.mark.parametrize("make", [InstantBus, ThreadBus])
def test_a_bus_converts_nothing(make: Callable[[], Bus]) -> None:
    bus = make()
    with pytest.raises(AssertionError, match="carries elements as they are"):
        bus.start_back(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), kind="parameters")
    with pytest.raises(AssertionError, match="carries elements as they are"):
        bus.start_out(torch.zeros(4), torch.zeros(5), kind="gradients")
    assert (bus.counts.out_bytes, bus.counts.back_bytes) == (0, 0)


def test_what_goes_wrong_in_a_lane_is_raised_to_who_waits() -> None:
    def broken(nbytes: int) -> None:
        raise OSError("the link is down")

    bus = ThreadBus(out_pace=broken)
    event = bus.start_out(torch.ones(4), torch.zeros(4), kind="states")
    with pytest.raises(OSError, match="the link is down"):
        bus.wait(event)
    with pytest.raises(OSError, match="the link is down"):
        bus.finish()


def test_copies_of_several_threads_are_all_counted() -> None:
    bus = ThreadBus()
    source, host = torch.ones(1), torch.zeros(1)

    def start_many() -> None:
        for _ in range(200):
            bus.start_out(source, host, kind="states")

    threads = [threading.Thread(target=start_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    bus.finish()
    assert bus.counts.out["states"] == CopyCounts(800, 3200)


def test_a_steady_pace_carries_one_copy_after_the_other() -> None:
    now_s = 10.0
    slept_s: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept_s.append(seconds)
        now_s += seconds

    pace = SteadyPace(100.0, clock=lambda: now_s, sleep=sleep)
    pace(50)
    pace(100)
    now_s += 5.0  # an idle link saves nothing up
    pace(200)
    assert slept_s == [0.5, 1.0, 2.0]


def test_the_bus_of_a_cpu_overlaps_unless_an_instant_one_is_asked_for() -> None:
    assert isinstance(bus_for(CPU), ThreadBus)
    assert isinstance(instant_bus_for(CPU), InstantBus)


@pytest.mark.cuda
def test_streams_order_copies_behind_computation_and_computation_behind_copies() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bus = bus_for(device)
    host = torch.zeros(1 << 20, pin_memory=True)
    slot = torch.zeros(1 << 20, device=device)
    for step in range(1, 20):
        slot.fill_(float(step))
        event = bus.start_out(slot, host, kind="gradients")
        bus.wait(event)
        slot.fill_(-1.0)  # after the copy
        event.synchronize()
        assert torch.equal(host, torch.full_like(host, float(step)))
        bus.wait(bus.start_back(host, slot, kind="parameters"))
        assert torch.equal(slot * 2, torch.full_like(slot, 2.0 * step))
        beside = bus.behind(bus.start_back(host, slot, kind="parameters", after=[event]))
        assert beside is not None
        with beside:
            tripled = slot * 3
            done = torch.cuda.current_stream().record_event()
        bus.wait(done)
        assert torch.equal(tripled, torch.full_like(slot, 3.0 * step))
    bus.finish()
