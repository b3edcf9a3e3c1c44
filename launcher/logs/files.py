"""The files that hold what ranks wrote: `rank<N>.log`, continued when it grows large. Knows bytes, no lines.

Nothing is ever dropped: a log above the limit is renamed to `rank<N>.1.log`, the next to `rank<N>.2.log`, and
`rank<N>.log` is always the newest part. Joined in that order the parts are the whole log, and every offset here counts
from its beginning. Files are made at the start; only the descriptors of those written to lately stay open.
"""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError

#: A part of a log that is larger is continued in the next.
PART_BYTES = 256 << 20
#: Most descriptors kept open; a lower limit of the user's is shared with everything else dsrun opens.
_MOST_OPEN = 256

# Not through a link that somebody planted, and for this user only.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def older_parts(folder: Path, rank: int) -> list[Path]:
    """Returns the parts of a rank's log that are complete, oldest first."""
    paths = JobPaths(folder)
    parts: list[Path] = []
    while (path := paths.log_part(rank, len(parts) + 1)).is_file():
        parts.append(path)
    return parts


@dataclass(slots=True)
class _Log:
    """Where one rank's log stands: complete parts, the bytes in them, and the bytes in the newest."""

    parts: int = 0
    older_bytes: int = 0
    part_bytes: int = 0


class LogFiles:
    """Appends to the logs of a job's ranks.

    Args:
        folder: folder for the logs; it must exist.
        ranks: number of ranks.
        first_rank: the lowest.
        part_bytes: bytes above which a log is continued in another file; see `PART_BYTES`.
        most_open: descriptors to keep; None for what this process's limit leaves.

    Raises:
        LaunchError: a file cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *,
        first_rank: int = 0,
        part_bytes: int = PART_BYTES,
        most_open: int | None = None,
    ) -> None:
        self._paths = JobPaths(folder)
        self._part_bytes = part_bytes
        self._most_open = most_open or _fair_share()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._logs: dict[int, _Log] = {}
        for rank in range(first_rank, first_rank + ranks):
            path = self.path(rank)
            try:
                descriptor = os.open(path, _FLAGS | os.O_TRUNC, 0o600)
            except OSError as error:
                raise LaunchError(f"log file {path}: cannot be made: {error.strerror}") from error
            os.close(descriptor)
            self._logs[rank] = _Log()

    def path(self, rank: int) -> Path:
        """Returns where the newest part of a rank's log is."""
        return self._paths.log(rank)

    def append(self, rank: int, data: bytes) -> int:
        """Writes bytes to the end of a rank's log.

        Args:
            rank: rank that wrote the bytes.
            data: any bytes; where they overfill a part they are divided after a line.

        Returns:
            offset of their first byte in the whole log.

        Raises:
            OSError: they could not be written in full; the log is incomplete from here on.
        """
        log = self._logs[rank]
        offset = log.older_bytes + log.part_bytes
        if log.part_bytes + len(data) > self._part_bytes:
            # A part ends with a line, if there is one before it has twice the size.
            end = data.rfind(b"\n") + 1
            if end or log.part_bytes >= 2 * self._part_bytes:
                self._write(rank, log, data[:end])
                self._continue(rank, log)
                data = data[end:]
        if data:
            self._write(rank, log, data)
        return offset

    def close(self, rank: int) -> None:
        """Gives the rank's descriptor back; the next `append` opens the log again."""
        descriptor = self._open.pop(rank, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Gives all descriptors back."""
        for rank in list(self._open):
            self.close(rank)

    def _write(self, rank: int, log: _Log, data: bytes) -> None:
        descriptor = self._descriptor(rank)
        written = 0
        while written < len(data):
            # The first write takes the bytes as they are; only what a full disk left is copied.
            count = os.write(descriptor, data[written:] if written else data)
            written += count
            log.part_bytes += count

    def _continue(self, rank: int, log: _Log) -> None:
        self.close(rank)
        os.rename(self.path(rank), self._paths.log_part(rank, log.parts + 1))
        log.parts += 1
        log.older_bytes += log.part_bytes
        log.part_bytes = 0
        # At once, so that there is a newest part for whoever reads.
        self._descriptor(rank)

    def _descriptor(self, rank: int) -> int:
        descriptor = self._open.get(rank)
        if descriptor is not None:
            self._open.move_to_end(rank)
            return descriptor
        while len(self._open) >= self._most_open:
            self._close_oldest()
        while True:
            try:
                descriptor = os.open(self.path(rank), _FLAGS, 0o600)
            except OSError as error:
                # The rest of dsrun has taken what the user's limit allows: one of ours is worth least.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                    raise
                self._close_oldest()
                continue
            self._open[rank] = descriptor
            return descriptor

    def _close_oldest(self) -> None:
        os.close(self._open.popitem(last=False)[1])


def _fair_share() -> int:
    """Returns how many of the descriptors that the user's limit allows may be logs."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else max(4, min(_MOST_OPEN, limit // 4))
