"""`output.index`: which bytes of which rank's log came when, in order of arrival. Knows no lines and reads no logs.

[Note: index] One fixed record for each run of bytes: its time, its offset in the rank's whole log, its length, and
the rank and stream in one number. A record is written after its bytes, so a record can be trusted; bytes without a
record (the front end was killed in between, the disk was full) lie in gaps between offsets, or after the last one.
A torn record can only be the last and is left out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError

#: `dsrun`: what dsrun itself put into a rank's log, like the line that begins another attempt.
LogStream = Literal["stdout", "stderr", "dsrun"]

_STREAMS: tuple[LogStream, ...] = ("stdout", "stderr", "dsrun")
_NUMBER_OF = {name: number for number, name in enumerate(_STREAMS)}
#: Time (seconds since the epoch), offset, length, 4 * rank + stream; little endian on every machine.
_RECORD = struct.Struct("<dQII")
RECORD_BYTES = _RECORD.size
_CHUNK_BYTES = RECORD_BYTES * 4096


class IndexRecord(NamedTuple):
    """Bytes that came together.

    Attributes:
        time_s: time when the bytes came, seconds since the epoch.
        rank: rank that wrote the bytes.
        stream: stream to which the bytes were written.
        offset: offset of the first of these bytes in the rank's whole log.
        length: number of bytes.
    """

    time_s: float
    rank: int
    stream: LogStream
    offset: int
    length: int


class IndexWriter:
    """Appends records.

    Args:
        folder: the job's; it must exist.

    Raises:
        LaunchError: the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        path = JobPaths(folder).output_index
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor: int | None = os.open(path, flags, 0o600)
        except OSError as error:
            raise LaunchError(f"index file {path}: cannot be made: {error.strerror}") from error

    def add(self, time_s: float, rank: int, stream: LogStream, offset: int, length: int) -> None:
        """Records bytes that were just written; nothing after `close`. See `IndexRecord`.

        Raises:
            OSError: the record could not be written; the index is closed, for what follows a torn one is unreadable.
        """
        if self._descriptor is None:
            return
        record = _RECORD.pack(time_s, offset, length, 4 * rank + _NUMBER_OF[stream])
        try:
            while record:
                record = record[os.write(self._descriptor, record) :]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the index."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class IndexReader:
    """Reads records as far as they are written; call again for those that came since.

    Args:
        folder: the job's; without an index there are no records, yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path = JobPaths(folder).output_index
        self._position = 0

    def read(self) -> Iterator[IndexRecord]:
        """Yields the records that were not yielded before."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            while chunk := os.pread(descriptor, _CHUNK_BYTES, self._position):
                whole = len(chunk) - len(chunk) % RECORD_BYTES
                if not whole:
                    return
                for time_s, offset, length, source in _RECORD.iter_unpack(chunk[:whole]):
                    self._position += RECORD_BYTES
                    # 3 is written by no version; a damaged record must not end the reader.
                    yield IndexRecord(time_s, source >> 2, _STREAMS[min(source & 3, 2)], offset, length)
        finally:
            os.close(descriptor)
