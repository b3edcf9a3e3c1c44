"""What was moved to and from disks: bytes, calls, and how long some were under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IoCounts:
    """What was moved since the files were opened.

    Attributes:
        read_bytes: bytes read from the disk, with the padding of extents.
        read_calls: number of read calls to the operating system.
        read_s: seconds during which a read was under way.
        written_bytes: bytes written to the disk, with the padding of extents.
        write_calls: number of write calls to the operating system.
        write_s: seconds during which a write was under way.
    """

    read_bytes: int = 0
    read_calls: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    write_calls: int = 0
    write_s: float = 0.0

    def since(self, earlier: IoCounts) -> IoCounts:
        """Returns what was moved after `earlier` was taken."""
        return IoCounts(
            self.read_bytes - earlier.read_bytes,
            self.read_calls - earlier.read_calls,
            self.read_s - earlier.read_s,
            self.written_bytes - earlier.written_bytes,
            self.write_calls - earlier.write_calls,
            self.write_s - earlier.write_s,
        )


def added_up(counts: Sequence[IoCounts]) -> IoCounts:
    """Returns the counts of several files together."""
    return IoCounts(
        read_bytes=sum(c.read_bytes for c in counts),
        read_calls=sum(c.read_calls for c in counts),
        read_s=sum(c.read_s for c in counts),
        written_bytes=sum(c.written_bytes for c in counts),
        write_calls=sum(c.write_calls for c in counts),
        write_s=sum(c.write_s for c in counts),
    )


class IoTally:
    """Bytes and calls of one direction, counted by several threads.

    Attributes:
        moved: bytes.
        calls: number of calls that moved the bytes.
        earlier_s: seconds of queues that have ended.
    """

    def __init__(self) -> None:
        self.moved = 0
        self.calls = 0
        self.earlier_s = 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Counts one call."""
        with self._lock:
            self.moved += nbytes
            self.calls += 1
