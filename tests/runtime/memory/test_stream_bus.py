"""The bus of an accelerator: which stream waits for what, in which order copies come, and whose device threads use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.runtime.memory.bus import StreamBus, make_current
from support.fake_cuda import DEVICE, FakeEvent, FakeModule, FakeStream, in_a_thread


def test_copies_that_a_thread_starts_make_no_context_on_another_device() -> None:
    module = FakeModule()
    bus = StreamBus(DEVICE, module=module)

    def copies() -> None:
        bus.wait(bus.start_out(torch.ones(4), torch.zeros(4), kind="gradients"))
        event = bus.start_back(torch.ones(4), torch.zeros(4), kind="parameters")
        beside = bus.behind(event)
        assert beside is not None
        with beside:
            assert module.current_device() == 3
        assert module.current_device() == 0

    in_a_thread(copies)
    assert module.used_with == [3, 3, 3]
    assert module.contexts == {3}


def test_the_fake_makes_the_context_that_a_stream_alone_would_make() -> None:
    module = FakeModule()

    def uses_a_stream() -> None:
        with module.stream(FakeStream(DEVICE)):
            pass

    in_a_thread(uses_a_stream)
    assert module.contexts == {0, 3}


class _Lanes(StreamBus):
    """Shows what its copies were started behind."""

    def __init__(self, module: FakeModule) -> None:
        super().__init__(DEVICE, module=module)
        self.lanes: list[FakeStream] = []

    def _start(self, lane: Any, source_N: torch.Tensor, target_N: torch.Tensor, **options: Any) -> Any:
        self.lanes.append(lane)
        return super()._start(lane, source_N, target_N, **options)


def test_a_copy_begins_behind_the_current_stream_or_behind_the_mark_in_its_place() -> None:
    module = FakeModule()
    bus, compute = _Lanes(module), module.current_stream(DEVICE)
    before = FakeEvent(FakeStream(DEVICE), 7)
    compute.given.append("backward")
    mark = bus.mark()
    compute.given.append("the next forward")
    bus.start_back(torch.ones(4), torch.zeros(4), kind="parameters", mark=mark)
    bus.start_out(torch.ones(4), torch.zeros(4), kind="gradients", mark=mark)
    bus.start_out(torch.ones(4), torch.zeros(4), kind="gradients", after=[before])
    back, out, _ = bus.lanes
    assert back.given == [FakeEvent(compute, 1)]
    assert out.given == [FakeEvent(compute, 1), FakeEvent(compute, 2), before]


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1)
def test_a_copy_behind_a_mark_ends_before_what_was_computed_after_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bus = StreamBus(device)
    host = torch.arange(1 << 16, dtype=torch.float32).pin_memory()
    first, second = torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    sums: list[torch.Tensor] = []
    torch.cuda.synchronize()
    first.fill_(-1.0)  # the last use of the old values
    second.fill_(-1.0)
    mark = bus.mark()
    torch.cuda._sleep(1 << 28)
    bus.wait(bus.start_back(host, first, kind="parameters", mark=mark))
    sums.append(first.sum())
    torch.cuda._sleep(1 << 30)  # the first unit computes
    ends[1].record()
    arrived = bus.start_back(host, second, kind="parameters", mark=mark)
    with torch.cuda.stream(bus._back):
        ends[0].record()
    bus.wait(arrived)
    sums.append(second.sum())
    torch.cuda.synchronize()
    assert ends[0].elapsed_time(ends[1]) > 0, "the second unit's copy has waited for the first unit's compute"
    assert [float(found) for found in sums] == [float(host.to(device).sum())] * 2


def test_a_thread_is_given_the_device_that_it_belongs_to(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.device] = []
    monkeypatch.setattr(torch.get_device_module(device), "set_device", given.append)
    make_current(device)
    assert given == [device]
