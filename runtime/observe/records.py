"""What a run did, as JSON lines: one object an event, appended by rank 0. Nothing is printed or measured here."""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordWriter:
    """Appends records to a file; writes nothing where there is no file.

    The file stays open and nothing is buffered: a record costs one write, and a rank that is killed loses none.

    Args:
        path: the file, made with its folder at the first record; None: records go nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._descriptor: int | None = None

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Appends one record, with the event's name and the time in seconds since the epoch."""
        if self._path is None:
            return
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # With O_APPEND whole lines stay whole, whoever else writes.
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # Not at exit: the system closes it then, and what ends later may still have a record to write.
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        # JSON has no inf and nan: strict readers refuse a file that holds one.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        line = json.dumps({"event": event, "time": round(time.time(), 6), **finite}, allow_nan=False)
        try:
            os.write(self._descriptor, f"{line}\n".encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
