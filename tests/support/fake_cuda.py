"""Stand-ins for CUDA where there is none: a device module with torch's rules for threads, and a runtime that locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

#: The device of a rank that is not the first of its host.
DEVICE = torch.device("cuda", 3)
DEADLINE_S = 60.0


@dataclass(frozen=True)
class FakeEvent:
    """A point of a stream: behind so many of the things it was given."""

    stream: FakeStream
    number: int

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@dataclass(eq=False)
class FakeStream:
    """A stream that notes what it is given."""

    device: torch.device
    given: list[Any] = field(default_factory=list[Any])

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, len(self.given))

    def wait_event(self, event: FakeEvent) -> None:
        self.given.append(event)

    def synchronize(self) -> None:
        return


class FakeModule:
    """As `torch.cuda` behaves: a current device and stream a thread, and contexts of devices that were gone to."""

    def __init__(self) -> None:
        self.contexts = {DEVICE.index}
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


class FakeCuda:
    """`LockCalls` that remember the last error until they are asked to forget it, as CUDA does."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.refuses = refuses
        self.last_error = 0
        self.locked: dict[int, int] = {}
        self.lock_threads: list[str] = []

    def register(self, address: int, nbytes: int) -> int:
        self.lock_threads.append(threading.current_thread().name)
        self.last_error = self.refuses
        if not self.refuses:
            self.locked[address] = nbytes
        return self.refuses

    def unregister(self, address: int) -> int:
        self.last_error = 0 if self.locked.pop(address, None) else 713
        return self.last_error

    def text(self, status: int) -> str:
        return {2: "out of memory", 713: "not registered"}[status]

    def forget(self, status: int) -> None:
        assert status == self.last_error
        self.last_error = 0


def in_a_thread(work: Callable[[], None]) -> None:
    """Does `work` in a new thread, and raises what it raises."""
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
