"""The lines of a job's records, read as the file grows. Knows no event.

A job that runs appends to the file, so it may end with half a line, which is read once it is whole. A line that is no
JSON object, torn by a full disk or by a rank that was killed, is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

#: Event with which rank 0 of each attempt begins.
START_EVENT = "start"
#: Read at once, so that a file of gigabytes is never in memory as a whole.
_CHUNK_BYTES = 1 << 20
#: The year 9999, nearly: in no zone of time is it a later one.
_MOST_TIME_S = 253_000_000_000


class RecordFollower:
    """Reads records from where they were last read to the last whole line; there may be no file yet.

    Args:
        path: File of the records.
        offset: Byte to begin at, the end of a line.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    @property
    def offset(self) -> int:
        """Byte behind the last line that was read: where another reader goes on."""
        return self._offset

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the next records, each once its line is whole; `offset` stands behind the one that was yielded last.

        Raises:
            OSError: the file cannot be read, but for one that does not exist yet.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    record = read_line(line)
                    if record is not None:
                        yield record


def is_date(time_s: object) -> bool:
    """Returns whether seconds since the epoch are of a year that a calendar has, wherever they are shown."""
    return isinstance(time_s, int | float) and 0 <= time_s < _MOST_TIME_S


def last_record(path: Path, event: str, *, with_number: str, tail_bytes: int = 1 << 16) -> dict[str, Any] | None:
    """Returns the newest record of an event near the end of a file; None where there is none, or no file.

    Those of a process's further engines are passed over.

    Args:
        path: File of the records.
        event: Name of the event.
        with_number: Name of a field that the record must have, a whole number.
        tail_bytes: Bytes at the end of the file in which it must stand.
    """
    wanted = f'"{event}"'.encode()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):
        record = read_line(line) if wanted in line else None
        if record is None or record.get("event") != event or record.get("engine"):
            continue
        if isinstance(record.get(with_number), int):
            return record
    return None


def records_of(path: Path, events: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields the records of some events in a file, in order; other lines are not parsed.

    Those of a process's further engines are passed over: their start is no new attempt.

    Args:
        path: File of the records.
        events: Names of the events.

    Raises:
        FileNotFoundError: there is no such file.
    """
    wanted = [f'"{event}"'.encode() for event in events]
    with path.open("rb") as file:
        for line in file:
            if not any(word in line for word in wanted):
                continue
            record = read_line(line)
            if record is not None and record.get("event") in events and not record.get("engine"):
                yield record


def read_line(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; None where it is none, such as half a line.

    Args:
        line: Line of a file of records.
    """
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
