"""What happened to a job, in a line each, and how often it was started again. Reads its events as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.units import format_duration

from ..records.follow import RecordFollower

#: Events that are kept.
_MOST = 20


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened.

    Attributes:
        time_s: seconds since the epoch.
        text: words for it.
    """

    time_s: float
    text: str


class JobEvents:
    """Events of a job that a person should see; its ordinary start and end are none.

    Args:
        folder: Folder of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._follower = RecordFollower(JobPaths(folder).events)
        #: Newest events, the last one at the end.
        self.recent: deque[JobEvent] = deque(maxlen=_MOST)
        #: Times the job was started again.
        self.restarts = 0

    def read(self) -> bool:
        """Takes what is new; returns whether anything was.

        Raises:
            OSError: the events cannot be read, but for events that do not exist yet.
        """
        is_new = False
        for event in self._follower.read():
            is_new = True
            self.restarts += event.get("event") == "restart"
            text, time_s = event_text(event), event.get("time")
            if text is not None and isinstance(time_s, int | float):
                self.recent.append(JobEvent(float(time_s), text))
        return is_new


def event_text(event: Mapping[str, Any]) -> str | None:
    """Returns an event in words; None for one that is ordinary, or of a form that this version does not know."""
    match event:
        case {"event": "restart", "attempt": int(attempt), "wait_s": int() | float() as wait_s, "why": str(why)}:
            return f"restart {attempt}, {format_duration(wait_s)} after: {why}"
        case {"event": "straggler", "rank": int(rank), "ratio": int() | float() as ratio}:
            return f"rank {rank} is steadily slower than the others: {ratio:.2f} x their own time a step"
        case {"event": "hang", "lines": [str(line), *_]}:
            return line.removeprefix("error: ")
        case {"event": "host_lost", "host": str(host), "reason": str(reason)}:
            return f"host {host} was lost: {reason}"
        case {"event": "rank_exit", "rank": int(rank), "status": int(status)} if status != 0:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
            return f"rank {rank} {how}{', out of memory' if event.get('oom') else ''}"
        case {"event": "stop", "why": str(why)}:
            return f"ranks are asked to stop: {why}"
        case {"event": "kill", "why": str(why)}:
            return f"ranks are killed: {why}"
        case _:
            return None
