"""The bus of an accelerator: which stream waits for what, in which order copies come, and whose device threads use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dsrun.runtime.memory.bus import StreamBus, make_current

DEVICE = torch.device("cuda", 3)
DEADLINE_S = 60.0


@dataclass(eq=False)
class FakeStream:
    """A stream that notes what it is given; an event is (stream, number of what was given so far)."""

    device: torch.device
    given: list[Any] = field(default_factory=list[Any])

    def record_event(self) -> tuple[FakeStream, int]:
        return self, len(self.given)

    def wait_event(self, event: tuple[FakeStream, int]) -> None:
        self.given.append(event)

    def synchronize(self) -> None:
        return


class FakeModule:
    """As `torch.cuda` behaves: a current device and stream a thread, and contexts of devices that were gone to."""

    def __init__(self) -> None:
        self.contexts = {3}
        self.used_with: list[int] = []
        self._of = threading.local()
        self._defaults = {index: FakeStream(torch.device("cuda", index)) for index in range(4)}

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(device)

    def current_device(self) -> int:
        return getattr(self._of, "device", 0)

    def set_device(self, device: torch.device) -> None:
        self._of.device = device.index
        self.contexts.add(device.index)

    def current_stream(self, device: torch.device) -> FakeStream:
        return getattr(self._of, "streams", {}).get(device.index, self._defaults[device.index])

    @contextmanager
    def device(self, device: torch.device) -> Generator[None]:
        before = self.current_device()
        self._of.device = device.index
        yield
        self._of.device = before  # torch puts off what would make a context

    @contextmanager
    def stream(self, stream: FakeStream) -> Generator[None]:
        before = self.current_stream(torch.device("cuda", self.current_device()))
        self.used_with.append(self.current_device())
        self._set_stream(stream)
        yield
        self._set_stream(before)

    def _set_stream(self, stream: FakeStream) -> None:
        self._of.streams = {**getattr(self._of, "streams", {}), stream.device.index: stream}
        self.set_device(stream.device)


def _in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not errors, errors


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

    _in_a_thread(copies)
    assert module.used_with == [3, 3, 3]
    assert module.contexts == {3}


def test_the_fake_makes_the_context_that_a_stream_alone_would_make() -> None:
    module = FakeModule()

    def uses_a_stream() -> None:
        with module.stream(FakeStream(DEVICE)):
            pass

    _in_a_thread(uses_a_stream)
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
    before = (FakeStream(DEVICE), 7)
    compute.given.append("backward")
    mark = bus.mark()
    compute.given.append("the next forward")
    bus.start_back(torch.ones(4), torch.zeros(4), kind="parameters", mark=mark)
    bus.start_out(torch.ones(4), torch.zeros(4), kind="gradients", mark=mark)
    bus.start_out(torch.ones(4), torch.zeros(4), kind="gradients", after=[before])  # pyright: ignore[reportArgumentType]
    back, out, _ = bus.lanes
    assert back.given == [(compute, 1)]
    assert out.given == [(compute, 1), (compute, 2), before]


@pytest.mark.cuda
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
