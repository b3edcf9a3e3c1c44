"""What a run did, as JSON lines: one object an event, appended by rank 0. Nothing is printed or measured here.

[Note: records behind the step] What a step tells is written by a thread, so that no step waits for a disk: a network
drive that stands still holds up the records alone. The thread runs Python, which holds up the Python of the step, and
the first record after other work takes it several times what further ones take. So it writes those of a quarter of a
second together. A rank that is killed loses what is not written yet: the last step, or fast steps of that quarter.
Events that others act upon, such as a checkpoint that a restart goes on from, are on the disk when `write` returns,
behind the records of the steps before them. A disk that is full ends no run that it was to tell of: what is lost is
told instead.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: JSON has no inf and nan: strict readers refuse a file that holds one.
_ENCODER = json.JSONEncoder(allow_nan=False)
#: Records that may wait for the disk: some minutes of fast steps, in 10 MB. Further ones are dropped, and counted.
_MOST_WAITING = 16384
#: Records that come so soon after one that waits are written with it.
_GATHER_S = 0.25
#: What is told where the file takes no records that are written behind the step.
_STEPS_LOST = "steps are not recorded"
#: A process that ends waits so long for the disk to take what is left.
_END_PATIENCE_S = 5.0


class RecordWriter:
    """Appends records to a file; writes nothing where there is no file.

    Args:
        path: the file, made with its folder at the first record; None: records go nowhere.
        engine: number of the engine among those of this process that train; told in its records but for the first.
    """

    def __init__(self, path: Path | None, *, engine: int = 0) -> None:
        self._file = None if path is None else _File(path)
        self._told: dict[str, Any] = {"engine": engine} if engine else {}
        self._behind: _WritesBehind | None = None

    @property
    def is_kept(self) -> bool:
        """Whether records are kept."""
        return self._file is not None

    def write(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Appends one record, with the event's name and the time in seconds since the epoch.

        Returns:
            Whether it is written, or there is no file; where the file cannot be written, that is told once an event.
        """
        if self._file is None:
            return True
        self.flush()
        return self._file.append([_line(self._record(event, fields))], f"`{event}` is not recorded")

    def write_behind(self, event: str, fields: Callable[[], Mapping[str, Any]]) -> None:
        """Appends one record soon, see [Note: records behind the step]; a file that cannot be written is told once.

        Args:
            event: name of the event.
            fields: function that makes the fields, of values that do not change any more; called by the thread.
        """
        if self._file is None:
            return
        if self._behind is None:
            try:
                self._behind = _WritesBehind(self._file)
            except RuntimeError:
                # No thread begins while an interpreter ends, from Python 3.12 on.
                self.write(event, fields())
                return
            weakref.finalize(self, self._behind.end)
        time_s = time.time()
        self._behind.put(event, lambda: _line({**self._record(event, fields()), "time": round(time_s, 6)}))

    def flush(self) -> None:
        """Returns when all records are written, or after some seconds where the disk does not take them."""
        if self._behind is not None:
            self._behind.flush()

    def _record(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"event": event, "time": round(time.time(), 6), **self._told, **fields}


class _File:
    """A file that is appended to, whole lines at a time, by any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._opening = threading.Lock()
        self._losses: set[str] = set()  # that have been told
        self._is_torn = False  # its last line is a part of one, as a full disk leaves it, or a process that was killed

    def append(self, lines: Sequence[bytes], loss: str) -> bool:
        """Appends lines, each with its end; where the file cannot be written, prints once what is lost by it.

        Returns:
            Whether they are written.
        """
        try:
            self._write(lines)
        except OSError as error:
            if loss not in self._losses:
                self._losses.add(loss)
                print(f"dsrun: records: {self._path}: {error.strerror or error}; {loss}", flush=True)
            return False
        return True

    def _write(self, lines: Sequence[bytes]) -> None:
        descriptor = self._open()
        # Else the first of them would be lost with the torn one.
        data = b"".join([b"\n", *lines] if self._is_torn else lines)
        written = os.write(descriptor, data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> int:
        with self._opening:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._is_torn = _ends_torn(self._path)
                # With O_APPEND whole lines stay whole, whoever else writes.
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
                # Not at exit: the system closes it then, and what ends later may still have a record to write.
                weakref.finalize(self, os.close, self._descriptor).atexit = False
            return self._descriptor


def _line(record: Mapping[str, Any]) -> bytes:
    """Returns a record as a line.

    Raises:
        TypeError: a value is none of JSON's.
    """
    try:
        text = _ENCODER.encode(record)
    except (TypeError, ValueError):
        # Seldom, so not looked for in each record: a number that is not finite, or a mapping that is no dict.
        text = _ENCODER.encode(_finite(record))
    return f"{text}\n".encode()


def _finite(value: Any) -> Any:
    """Returns a value without numbers that are not finite, in whatever it holds."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _ends_torn(path: Path) -> bool:
    """Whether a file that is there does not end with the end of a line."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class _WritesBehind:
    """Records on their way to a file, and the thread that writes them; it begins with the first one.

    A script that forks takes a copy of this object along, without the thread: there, records are written at once, and
    what waits is the first process's to write.
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self._waiting: list[tuple[str, Callable[[], bytes]]] = []
        self._changed = threading.Condition()
        self._is_idle = True
        self._flushes = 0  # callers that wait for the file
        self._has_ended = False
        self._dropped = 0
        self._process = os.getpid()
        # A daemon: an interpreter that ends waits in `end`, and not for a disk that stands still.
        threading.Thread(target=self._run, name="dsrun-records", daemon=True).start()

    def put(self, event: str, line: Callable[[], bytes]) -> None:
        """Takes the line of an event to write; after the end it is written at once."""
        if self._is_copy():
            self._file.append([line()], _STEPS_LOST)
            return
        with self._changed:
            if self._has_ended:
                self._file.append([line()], _STEPS_LOST)
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._dropped += 1
                return
            self._waiting.append((event, line))
            if self._is_idle:
                self._is_idle = False
                self._changed.notify_all()

    def flush(self) -> None:
        """Returns when all is written, or when the disk has had time enough."""
        if self._is_copy():
            return
        with self._changed:
            self._flushes += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_idle, _END_PATIENCE_S)
            finally:
                self._flushes -= 1

    def end(self) -> None:
        """Writes what is left, and has the thread end."""
        if self._is_copy():
            return
        self.flush()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _is_copy(self) -> bool:
        # Asked before the lock, which the thread may have held as the process forked.
        return self._process != os.getpid()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = not self._waiting
                if self._is_idle:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: bool(self._waiting) or self._has_ended)
                self._changed.wait_for(lambda: self._flushes > 0 or self._has_ended, _GATHER_S)
                if not self._waiting:
                    return
                waiting, self._waiting = self._waiting, []
                dropped, self._dropped = self._dropped, 0
            lines = _made(waiting)
            # Not kept while the thread waits: at the end of the interpreter it would outlive what it refers to.
            waiting.clear()
            self._file.append(lines, _STEPS_LOST)
            if dropped:
                print(f"dsrun: records: the disk was too slow; {dropped} steps are not recorded", flush=True)


def _made(records: Iterable[tuple[str, Callable[[], bytes]]]) -> list[bytes]:
    """Returns the lines of records by event; one that cannot be made is told, and left out."""
    lines: list[bytes] = []
    for event, line in records:
        try:
            lines.append(line())
        except Exception as error:
            # Whoever made it is at fault; the records behind it are not.
            print(f"dsrun: records: a record of {event!r} is not written: {error}", flush=True)
    return lines
