"""All output of one job on the front end: each rank's complete file, whole lines to the console, events to a file.

Lives as long as the job, over restarts too. Knows nothing of processes and decides nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from dsrun.errors import LaunchError

from .job_folder import EVENTS_FILE
from .plan import LaunchPlan
from .protocol import Output, RankPulse, StreamName
from .rank_output import RankOutput


class Console(Protocol):
    """What a person sees of a job; nothing here may raise."""

    def lines(self, rank: int, stream: StreamName, texts: Sequence[str]) -> None:
        """Whole lines of a rank, without their ends; undecodable bytes are surrogate escapes."""
        ...

    def note(self, text: str) -> None:
        """One line about the job itself."""
        ...


class JobOutput:
    """Implements the session's `Sink`.

    Args:
        plan: the job; its run_dir must exist.
        console: where lines and notes are shown.

    Raises:
        LaunchError: a file cannot be made.
    """

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._console = console
        self._ranks = {
            rank: RankOutput(rank, plan.run_dir, show=console.lines, warn=console.note)
            for rank in range(plan.world_size)
        }
        path = Path(plan.run_dir) / EVENTS_FILE
        try:
            self._events_fd: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise LaunchError(f"event file {path}: cannot be made: {error.strerror}") from error

    def take(self, frame: Output) -> None:
        """See `Sink`."""
        self._ranks[frame.rank].take(frame)

    def ended(self, rank: int, last_word: str | None) -> None:
        """See `Sink`."""
        self._ranks[rank].finish(last_word=last_word)

    def tail(self, rank: int) -> tuple[str, ...]:
        """See `Sink`."""
        return tuple(self._ranks[rank].tail)

    def log(self, rank: int) -> str:
        """See `Sink`."""
        return os.fspath(self._ranks[rank].path)

    def note(self, text: str) -> None:
        """See `Sink`."""
        self._console.note(text)

    def event(self, name: str, **fields: Any) -> None:
        """Appends a line to the event file. See `Sink`."""
        if self._events_fd is None:
            return
        line = json.dumps({"event": name, "time": round(time.time(), 6), **fields}) + "\n"
        try:
            os.write(self._events_fd, line.encode())
        except OSError as error:
            self.close()
            self.note(f"{EVENTS_FILE} is incomplete from here on: {error.strerror}")

    def pulse(self, ranks: Sequence[RankPulse]) -> None:
        """See `Sink`."""

    def tick(self, now_s: float) -> float | None:
        """See `Sink`."""
        return None

    def close(self) -> None:
        """Closes the event file; what comes later is shown and not recorded."""
        if self._events_fd is not None:
            os.close(self._events_fd)
            self._events_fd = None
