"""Counts of a rank's collectives by kind, axis and size, with the seconds it has waited for them (`comms_logger`).

[Note: exposed seconds] Seconds are those for which the thread, or on CUDA the stream, stood still for a collective:
nobody synchronises the device to time it, so what is hidden behind computing costs none. Bandwidths are bytes by these
seconds, by the formulas of nccl-tests with the ranks of the axis: those that the step sees. They are above the wire's
where transfers are hidden, and below it where a rank waits for one that is late.

[Note: followed calls] Only a log that is on is in the way of calls: it puts itself in front of the methods of the
collectives objects, which stay what they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dsrun.units import format_bytes

from .collectives import Collectives, Pending
from .join.groups import ProcessGroupMesh
from .point_to_point.links import Incoming, Message, PointToPoint
from .point_to_point.packing import bytes_of
from .step_position import Where
from .wait_times import WaitTimes

#: More sizes of one kind and axis are counted by the next power of two.
_MOST_SIZES = 64
#: Place of the argument whose bytes count, by the call: what `Traffic` counts.
_BUFFERS = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "broadcast": 0, "all_to_all": 1}
_HERE = str(Path(__file__).parent)


class SizeKey(NamedTuple):
    """What calls are counted by.

    Attributes:
        kind: Kind of the collective, as `Traffic` names it.
        axis: Name of the axis.
        nbytes: Bytes of the whole buffer; rounded up to a power of two where there are many sizes.
    """

    kind: str
    axis: str
    nbytes: int


@dataclass(slots=True)
class Calls:
    """Calls of one kind, axis and size.

    Attributes:
        ranks: Number of ranks of the axis.
        calls: Number of calls.
        nbytes: Bytes of all calls together.
        seconds: Seconds that this rank has waited for them, see [Note: exposed seconds].
    """

    ranks: int
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def algorithm_bandwidth(self) -> float | None:
        """Bytes a second; None where nothing was waited for."""
        return self.nbytes / self.seconds if self.seconds > 0 else None

    def bus_bandwidth(self, kind: str) -> float | None:
        """Bytes a second that each rank's link would carry, see `bus_factor`."""
        algorithm = self.algorithm_bandwidth()
        return None if algorithm is None else algorithm * bus_factor(kind, self.ranks)


def bus_factor(kind: str, ranks: int) -> float:
    """Returns what the bandwidth of an algorithm is multiplied by to be that of the bus.

    Source: nccl-tests, doc/PERFORMANCE.md.

    Args:
        kind: Kind of the collective.
        ranks: Number of ranks of the group.
    """
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case _:
            return 1.0


class _Call:
    """One call, until its wait is over; a tag of `WaitTimes`."""

    def __init__(self, counted: Calls, tell: Callable[[float], None] | None) -> None:
        self._counted = counted
        self._tell = tell

    def add_wait(self, seconds: float) -> None:
        """See `WaitTag`."""
        self._counted.seconds += seconds
        if self._tell is not None:
            self._tell(seconds)


class _LoggedPending:
    def __init__(self, log: CommsLog, call: _Call, pending: Pending) -> None:
        self._log, self._call, self._pending = log, call, pending

    def wait(self) -> None:
        """See `Pending`."""
        with self._log.tagged(self._call):
            self._pending.wait()


class _LoggedIncoming:
    def __init__(self, log: CommsLog, axis: str, ranks: int, label: str, incoming: Incoming) -> None:
        self._log, self._axis, self._ranks, self._label, self._incoming = log, axis, ranks, label, incoming

    def wait(self) -> Message:
        """See `Incoming`; its bytes are known once it is there."""
        waited = Calls(self._ranks)
        with self._log.tagged(_Call(waited, None)):
            message = self._incoming.wait()
        call = self._log.begin("receive", self._axis, bytes_of(message.tensors), ranks=self._ranks, label=self._label)
        if call is not None:
            call.add_wait(waited.seconds)
        return message


class CommsLog:
    """Counts the collectives of one rank.

    Args:
        waits: Clock of this rank's waits.
        kinds: Kinds that are counted; None for all.
        say: Function that prints a line for each call; None for none.
        names_callers: Whether such a line names the line of code that called.
    """

    def __init__(
        self,
        waits: WaitTimes,
        *,
        kinds: Collection[str] | None = None,
        say: Callable[[str], None] | None = None,
        names_callers: bool = False,
    ) -> None:
        self._waits = waits
        self._kinds = None if kinds is None else frozenset(kinds)
        self._say = say
        self._names_callers = names_callers
        self._calls: dict[SizeKey, Calls] = {}
        self._sizes: dict[tuple[str, str], int] = {}

    @property
    def calls(self) -> Mapping[SizeKey, Calls]:
        """Calls so far, by kind, axis and size."""
        return self._calls

    def tagged(self, call: _Call | None) -> _Tagged:
        """Returns what has the waits inside of a `with` counted for a call."""
        return _Tagged(self._waits, call)

    def begin(self, kind: str, axis: str, nbytes: int, *, ranks: int, label: str) -> _Call | None:
        """Counts a call; returns it for its waits, or None where its kind is not counted.

        Args:
            kind: Kind of the collective.
            axis: Name of the axis.
            nbytes: Bytes of the whole buffer.
            ranks: Number of ranks of the axis.
            label: Name of the data that is moved.
        """
        if self._kinds is not None and kind not in self._kinds:
            return None
        counted = self._counted(kind, axis, nbytes, ranks)
        counted.calls += 1
        counted.nbytes += nbytes
        say = self._say
        if say is None:
            return _Call(counted, None)
        data = f" of {label}" if label else ""
        caller = f", called in {_caller()}" if self._names_callers else ""
        line = f"{kind}{data} over {axis} ({ranks} ranks), {format_bytes(nbytes)}{caller}"
        say(f"dsrun: comms: {line}")
        return _Call(counted, lambda seconds: say(f"dsrun: comms: {kind}{data}: waited {seconds * 1e3:.3f} ms"))

    def follow(self, collectives: Collectives, axis: str) -> None:
        """Counts all that goes through an axis from now on, see [Note: followed calls].

        Args:
            collectives: Collectives of the axis.
            axis: Name of the axis.
        """
        for kind, place in _BUFFERS.items():
            setattr(collectives, kind, self._logged(getattr(collectives, kind), kind, axis, place, collectives.size))
        barrier: Callable[[], None] = collectives.barrier

        def logged_barrier() -> None:
            with self.tagged(self.begin("barrier", axis, 0, ranks=collectives.size, label="")):
                barrier()

        collectives.barrier = logged_barrier

    def follow_links(self, links: PointToPoint, axis: str) -> None:
        """Counts the messages along an axis from now on.

        Args:
            links: Messages of the axis.
            axis: Name of the axis.
        """
        receive: Callable[..., Incoming] = links.receive
        send: Callable[..., Pending] = links.send

        def logged_send(tensors: Sequence[Tensor], *, label: str = "", **more: Any) -> Pending:
            call = self.begin("send", axis, bytes_of(tensors), ranks=links.size, label=label)
            with self.tagged(call):
                pending = send(tensors, label=label, **more)
            return pending if call is None else _LoggedPending(self, call, pending)

        def logged_receive(*, label: str = "", **more: Any) -> Incoming:
            return _LoggedIncoming(self, axis, links.size, label, receive(label=label, **more))

        links.send = logged_send
        links.receive = logged_receive

    def lines(self) -> list[str]:
        """Returns the table of all calls, each kind and axis together, large messages first."""
        head = ("collective", "axis", "ranks", "size", "calls", "bytes", "waited", "a call", "algbw", "busbw")
        rows = [head, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return ["dsrun: collectives of rank 0; waited: seconds that the step stood still for them", *text]

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Returns the figures by kind and bytes, those of all axes together."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for key, counted in self._calls.items():
            sums = found.setdefault(key.kind, {}).setdefault(key.nbytes, {"calls": 0, "bytes": 0, "seconds": 0.0})
            sums["calls"] += counted.calls
            sums["bytes"] += counted.nbytes
            sums["seconds"] += counted.seconds
            algorithm = sums["bytes"] / sums["seconds"] if sums["seconds"] else None
            bus = None if algorithm is None else algorithm * bus_factor(key.kind, counted.ranks)
            sums |= {"algbw": algorithm, "busbw": bus}
        return found

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for key in sorted(self._calls, key=lambda key: (key.kind, key.axis, -key.nbytes)):
            counted = self._calls[key]
            yield (
                key.kind,
                key.axis,
                str(counted.ranks),
                format_bytes(key.nbytes),
                str(counted.calls),
                format_bytes(counted.nbytes),
                f"{counted.seconds:.3f} s",
                f"{counted.seconds / counted.calls * 1e3:.3f} ms",
                _rate(counted.algorithm_bandwidth()),
                _rate(counted.bus_bandwidth(key.kind)),
            )

    def _counted(self, kind: str, axis: str, nbytes: int, ranks: int) -> Calls:
        key = SizeKey(kind, axis, nbytes)
        counted = self._calls.get(key)
        if counted is not None:
            return counted
        sizes = self._sizes[kind, axis] = self._sizes.get((kind, axis), 0) + 1
        if sizes > _MOST_SIZES:
            key = key._replace(nbytes=1 << max(0, nbytes - 1).bit_length())
        return self._calls.setdefault(key, Calls(ranks))

    def _logged(
        self, call: Callable[..., Pending], kind: str, axis: str, place: int, ranks: int
    ) -> Callable[..., Pending]:
        def logged(*args: Any, label: str = "", **more: Any) -> Pending:
            buffer: Tensor = args[place]
            begun = self.begin(kind, axis, buffer.numel() * buffer.element_size(), ranks=ranks, label=label)
            with self.tagged(begun):
                pending = call(*args, label=label, **more)
            return pending if begun is None else _LoggedPending(self, begun, pending)

        return logged


class _Tagged:
    """Has waits counted for a call; the one that was counted for before goes on afterwards."""

    def __init__(self, waits: WaitTimes, call: _Call | None) -> None:
        self._waits, self._call = waits, call

    def __enter__(self) -> None:
        self._before, self._waits.tag = self._waits.tag, self._call

    def __exit__(self, *error: object) -> None:
        self._waits.tag = self._before


#: Logs of the meshes of this process, each by the mesh's own place in training, the newest last.
_logs: weakref.WeakKeyDictionary[Where, CommsLog] = weakref.WeakKeyDictionary()


def follow_mesh(mesh: ProcessGroupMesh, log: CommsLog) -> ProcessGroupMesh:
    """Returns a mesh whose collectives are counted, those too that are made later.

    Args:
        mesh: Ranks whose collectives are not used yet.
        log: Log that counts.
    """
    _logs[mesh.where] = log
    names = {id(collectives): "+".join(view) or "alone" for view, collectives in mesh.views.items()}
    for collectives in {id(each): each for each in mesh.views.values()}.values():
        log.follow(collectives, names[id(collectives)])
    log.follow_links(mesh.links, "pipe")

    def among(ranks: tuple[int, ...]) -> Collectives:
        made = mesh.among(ranks)
        log.follow(made, f"ranks {','.join(map(str, ranks))}")
        return made

    return replace(mesh, among=among)


def log_of(mesh: ProcessGroupMesh) -> CommsLog | None:
    """Returns the log that counts a mesh's collectives; None where none does."""
    return _logs.get(mesh.where)


def newest_log() -> CommsLog | None:
    """Returns the log of this process's newest engine that has one; None where none has."""
    return next(reversed(list(_logs.values())), None)


def _rate(bandwidth: float | None) -> str:
    return "-" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s"


def _caller() -> str:
    """Returns the innermost line outside of the collectives."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
