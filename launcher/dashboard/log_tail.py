"""The last lines that ranks wrote, kept up to date beside a page that is drawn. Prints nothing."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from dsrun.contract.job_paths import JobPaths

from ..logs.reader import read_lines

#: Lines that are kept: more than any terminal shows.
_MOST_LINES = 200
#: Between two looks for new lines.
_LOOK_S = 0.5
#: Of an old log only what came so long before its last line.
_BEFORE_S = 600.0


class LogTail:
    """Reads a job's log on a thread of its own, for an index of hours takes a while; ends with the block.

    Args:
        folder: Folder of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, _type: object, _error: object, _stack: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LOOK_S)

    def lines(self) -> list[str]:
        """Returns the last lines, the newest at the end; begins to read with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()
        return list(self._lines)

    def _follow(self) -> None:
        try:
            since_s = JobPaths(self._folder).output_index.stat().st_mtime - _BEFORE_S
        except OSError:
            since_s = None
        try:
            for bunch in read_lines(self._folder, since_s=since_s, follow=self._goes_on):
                tag = "dsrun: " if bunch.rank is None else f"[{bunch.rank}] "
                self._lines.extend(f"{tag}{text}" for text in bunch.texts[-_MOST_LINES:])
                if self._is_over.is_set():
                    return
        except OSError as error:
            self._lines.append(f"dsrun: the log cannot be read: {(error.strerror or str(error)).lower()}")

    def _goes_on(self) -> bool:
        return not self._is_over.wait(_LOOK_S)
