"""The records that rank 0 writes on a host whose folder the front end does not see, read as they grow. Sends nothing.

Whole lines only, so that whoever appends them elsewhere never has a half of one: what a rank that was killed left
without an end of line is no record.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Read at once; a line that is longer is passed on in pieces.
MOST_BYTES = 1 << 20


class RecordLines:
    """Reads a file from where it was last read to its last whole line.

    Args:
        path: the file; there may be none yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> str:
        """Returns the next new lines, decoded with `surrogateescape`; empty if there are none yet."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        try:
            data = os.pread(descriptor, MOST_BYTES, self._offset)
        finally:
            os.close(descriptor)
        end = len(data) if len(data) == MOST_BYTES and b"\n" not in data else data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode("utf-8", "surrogateescape")
