"""The bus between a device and its host's memory: copies that run beside computation, counted by what they carry.

Only starts copies and orders what comes after them; whose memory it is, and when it is wanted, their owners know.

[Note: the bus]
Each way has a lane of its own, because a bus carries both ways at once: a stream on an accelerator, and a thread where
the device is the CPU itself. There "device" and "host" are two pools of the same memory, and the copies between them
keep the schedule of an accelerator, so that it can be tested. Copies of one lane run in the order in which they were
started; between lanes only events tell what comes first.

A copy begins behind what the current stream has been given by then, unless it is told a mark: a point of a compute
stream that lies further back. So a copy that a thread starts late, while the next forward has been enqueued already,
runs beside that forward. Who gives a mark knows that nothing enqueued behind it uses what the copy reads or writes; and
a thread's own current stream is no script's, so without a mark it orders nothing.

Autograd is told nothing: a copy changes no version of the tensor it writes, as a kernel that fills a slot does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

#: What a copy carries.
Kind = Literal["gradients", "parameters", "states", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(slots=True)
class CopyCounts:
    """Copies one way: how many, and their bytes."""

    calls: int = 0
    nbytes: int = 0


def _nothing_moved() -> dict[Kind, CopyCounts]:
    return {kind: CopyCounts() for kind in KINDS}


def _difference(now: dict[Kind, CopyCounts], earlier: dict[Kind, CopyCounts]) -> dict[Kind, CopyCounts]:
    return {
        kind: CopyCounts(moved.calls - earlier[kind].calls, moved.nbytes - earlier[kind].nbytes)
        for kind, moved in now.items()
    }


@dataclass(frozen=True, slots=True)
class BusCounts:
    """What was copied since the beginning, by kind; counted when a copy starts."""

    out: dict[Kind, CopyCounts] = field(default_factory=_nothing_moved)
    back: dict[Kind, CopyCounts] = field(default_factory=_nothing_moved)

    def since(self, earlier: BusCounts) -> BusCounts:
        """Returns what was copied after `earlier` was taken; these numbers stand still."""
        return BusCounts(_difference(self.out, earlier.out), _difference(self.back, earlier.back))

    @property
    def out_bytes(self) -> int:
        """Bytes of all kinds that left the device."""
        return sum(moved.nbytes for moved in self.out.values())

    @property
    def back_bytes(self) -> int:
        """Bytes of all kinds that came to the device."""
        return sum(moved.nbytes for moved in self.back.values())


class Event(Protocol):
    """The end of one copy, or a point of a compute stream; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the copy is done."""
        ...

    def synchronize(self) -> None:
        """Waits on the host until the copy is done, for who reads or overwrites the host's side of it."""
        ...


class Bus(Protocol):
    """Copies between one device and its host's memory, see [Note: the bus]. May be used from several threads."""

    @property
    def counts(self) -> BusCounts:
        """What was copied so far."""
        ...

    @property
    def is_instant(self) -> bool:
        """Whether each copy is done when its start returns, so that the source may change at once."""
        ...

    def mark(self) -> Event:
        """Returns the point that the current stream has come to: done when all that it was given so far is done."""
        ...

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """Starts a copy to host memory.

        Args:
            source_N: tensor on the device, [N], contiguous; it must live and stay unchanged until the event has been
                waited for.
            host_N: host memory to copy to, [N], same dtype: a bus converts nothing.
            kind: kind of the elements, such as `gradients`.
            after: copies of this bus that must be done before: they read or wrote the same memory.
            mark: point of a compute stream that the copy begins behind; what computes `source_N` lies before it. None
                for all that the current stream has been given.
        """
        ...

    def start_back(
        self, host_N: Tensor, target_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """Starts a copy to the device.

        Args:
            host_N: host memory to copy from, [N], contiguous; it must stay unchanged until the event is done.
            target_N: tensor on the device, [N], same dtype; allocated before the call, read after `wait`.
            kind: kind of the elements, such as `parameters`.
            after: copies of this bus that must be done before, as one that brings `host_N` its values.
            mark: point of a compute stream that the copy begins behind; what uses the old values of `target_N` lies
                before it. None for all that the current stream has been given.
        """
        ...

    def behind(self, event: Event) -> AbstractContextManager[None] | None:
        """Returns a context in which the device is given work that runs after a copy, beside the current stream.

        None where only the host can wait for the copy, so that such work is best begun when its result is wanted.
        """
        ...

    def wait(self, event: Event) -> None:
        """What the current stream is given from now on runs after the copy; an accelerator's host does not stop."""
        ...

    def finish(self) -> None:
        """Waits on the host for all copies that were started."""
        ...


#: Called in a lane's thread with the bytes of each copy before it is done: holds it up as long as a bus would take.
Pace = Callable[[int], None]


class InstantBus:
    """Where the device is the CPU and nothing is to overlap: each copy is done when its start returns."""

    def __init__(self) -> None:
        self._counter = _Counter()

    @property
    def counts(self) -> BusCounts:
        """See `Bus`."""
        return self._counter.counts

    @property
    def is_instant(self) -> bool:
        """See `Bus`."""
        return True

    def mark(self) -> Event:
        """See `Bus`: the CPU's stream is the thread that calls."""
        return _DONE

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        _copy(*self._counter.out(source_N, host_N, kind))
        return _DONE

    def start_back(
        self, host_N: Tensor, target_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        _copy(*self._counter.back(host_N, target_N, kind))
        return _DONE

    def behind(self, event: Event) -> AbstractContextManager[None] | None:
        """See `Bus`: there is nothing to wait for."""
        return nullcontext()

    def wait(self, event: Event) -> None:
        """See `Bus`."""

    def finish(self) -> None:
        """See `Bus`."""


class ThreadBus:
    """Where the device is the CPU: a thread each way, which begins with the first copy and ends with the bus.

    Args:
        out_pace: callback that delays each copy to the host; None for no delay.
        back_pace: callback that delays each copy to the device; None for no delay.
    """

    def __init__(self, *, out_pace: Pace | None = None, back_pace: Pace | None = None) -> None:
        self._counter = _Counter()
        self._out = _Lane("bus-out", out_pace)
        self._back = _Lane("bus-back", back_pace)

    @property
    def counts(self) -> BusCounts:
        """See `Bus`."""
        return self._counter.counts

    @property
    def is_instant(self) -> bool:
        """See `Bus`."""
        return False

    def mark(self) -> Event:
        """See `Bus`: the CPU's stream is the thread that calls."""
        return _DONE

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        return self._out.start(*self._counter.out(source_N, host_N, kind), after=after)

    def start_back(
        self, host_N: Tensor, target_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        return self._back.start(*self._counter.back(host_N, target_N, kind), after=after)

    def behind(self, event: Event) -> AbstractContextManager[None] | None:
        """See `Bus`: the CPU has no streams."""
        return None

    def wait(self, event: Event) -> None:
        """See `Bus`; the CPU's stream is the thread that calls."""
        event.synchronize()

    def finish(self) -> None:
        """See `Bus`."""
        self._out.finish()
        self._back.finish()


class StreamBus:
    """Copies on two streams of an accelerator, one each way.

    Memory is allocated and freed on the compute stream alone: a tensor that a copy reads is let go after the compute
    stream waits for the copy, and one that a copy writes is allocated before the copy stream waits for the compute
    stream. So the allocator's own order holds, without `record_stream`, whose frees come too late to plan with.

    Args:
        device: the accelerator.
        module: torch's for its kind; None: that.
    """

    def __init__(self, device: torch.device, *, module: Any = None) -> None:
        self._counter = _Counter()
        self._device = device
        self._module: Any = torch.get_device_module(device) if module is None else module
        self._out: Any = self._module.Stream(device=device)
        self._back: Any = self._module.Stream(device=device)
        self._beside: Any = self._module.Stream(device=device)

    @property
    def counts(self) -> BusCounts:
        """See `Bus`."""
        return self._counter.counts

    @property
    def is_instant(self) -> bool:
        """See `Bus`."""
        return False

    def mark(self) -> Event:
        """See `Bus`."""
        return self._module.current_stream(self._device).record_event()

    def start_out(
        self, source_N: Tensor, host_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        return self._start(self._out, *self._counter.out(source_N, host_N, kind), after=[mark or self.mark(), *after])

    def start_back(
        self, host_N: Tensor, target_N: Tensor, *, kind: Kind, after: Sequence[Event] = (), mark: Event | None = None
    ) -> Event:
        """See `Bus`."""
        return self._start(self._back, *self._counter.back(host_N, target_N, kind), after=[mark or self.mark(), *after])

    def behind(self, event: Event) -> AbstractContextManager[None] | None:
        """See `Bus`."""
        self._beside.wait_event(event)
        return self._on(self._beside)

    def wait(self, event: Event) -> None:
        """See `Bus`."""
        self._module.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """See `Bus`."""
        self._out.synchronize()
        self._back.synchronize()

    def _start(self, lane: Any, source_N: Tensor, target_N: Tensor, *, after: Sequence[Event]) -> Any:
        for event in after:
            lane.wait_event(event)
        with self._on(lane):
            target_N.copy_(source_N, non_blocking=True)
        return lane.record_event()

    @contextmanager
    def _on(self, stream: Any) -> Generator[None]:
        """Gives the device work on a stream.

        At its end a stream's context goes back to the stream that was current, of the current device. In a new thread
        that is device 0's, and going back to it would make this process a context there, of half a GB.
        """
        with self._module.device(self._device), self._module.stream(stream):
            yield


def make_current(device: torch.device) -> None:
    """Makes a device the calling thread's current one, as the thread that trains has it.

    Belongs at the head of each thread that starts copies: a new thread begins with device 0, whichever its process's
    is, and what it first does there would make a context on it.
    """
    torch.get_device_module(device).set_device(device)


def bus_for(device: torch.device) -> Bus:
    """Returns the bus of a device, on which copies overlap with what the device computes."""
    return ThreadBus() if device.type == "cpu" else StreamBus(device)


def instant_bus_for(device: torch.device) -> Bus:
    """Returns the bus of a device; where that is the CPU, one whose copies are done at once.

    For who puts out small tensors that others may write to meanwhile: without a second memory there is nothing to gain
    from a thread.
    """
    return InstantBus() if device.type == "cpu" else StreamBus(device)


class _Lane:
    """One way of a `ThreadBus`."""

    def __init__(self, name: str, pace: Pace | None) -> None:
        self._pace = pace
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: _Copy | None = None

    def start(self, source_N: Tensor, target_N: Tensor, *, after: Sequence[Event]) -> Event:
        self._last = _Copy(self._thread.submit(_paced_copy, source_N, target_N, self._pace, after))
        return self._last

    def finish(self) -> None:
        if self._last is not None:
            self._last.synchronize()


class _Copy:
    """A copy of a lane; an error of its pace is raised to who waits for it."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def query(self) -> bool:
        return self._future.done()

    def synchronize(self) -> None:
        self._future.result()


class _Done:
    """A copy that was done when it started."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


_DONE = _Done()


class _Counter:
    """Counts of several threads; passes on what is to be copied as tensors whose versions are their own."""

    def __init__(self) -> None:
        self.counts = BusCounts()
        self._lock = threading.Lock()

    def out(self, source_N: Tensor, host_N: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        return self._count(self.counts.out[kind], source_N, host_N)

    def back(self, host_N: Tensor, target_N: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        return self._count(self.counts.back[kind], host_N, target_N)

    def _count(self, moved: CopyCounts, source_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        assert (source_N.dtype, source_N.shape) == (target_N.dtype, target_N.shape), (
            f"a bus carries elements as they are: {source_N.dtype} {tuple(source_N.shape)} to "
            f"{target_N.dtype} {tuple(target_N.shape)}"
        )
        with self._lock:
            moved.calls += 1
            moved.nbytes += source_N.nbytes
        return source_N.data, target_N.data


def _paced_copy(source_N: Tensor, target_N: Tensor, pace: Pace | None, after: Sequence[Event]) -> None:
    for event in after:
        event.synchronize()
    if pace is not None:
        pace(source_N.nbytes)
    _copy(source_N, target_N)


def _copy(source_N: Tensor, target_N: Tensor) -> None:
    target_N.copy_(source_N)
