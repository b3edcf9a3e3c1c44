"""What a run did, as JSON lines: one object an event, appended by rank 0. Nothing is printed or measured here."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordWriter:
    """Appends records to a file; writes nothing where there is no file.

    Args:
        path: the file, made with its folder at the first record; None: records go nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Appends one record, with the event's name and the time in seconds since the epoch.

        The file is opened for each record: a run writes few, and every line is then on its way to the disk.
        """
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # JSON has no inf and nan: strict readers refuse a file that holds one.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        line = json.dumps({"event": event, "time": round(time.time(), 6), **finite}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
