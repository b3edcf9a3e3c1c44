"""What a tracker's module offers: a function that opens it for a run. Knows no tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..points import Point


class TrackerProblem(Exception):
    """A tracker has not taken what it was given; it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker gets to know it.

    Attributes:
        job_id: Id of the job.
        folder: Working folder of the job, from which relative names of files count.
        options: Values of the tracker's section of the config.
        samples: Samples of the newest point that the tracker was given before; None where it was given none.
        kept: Values that the module finds again when the tracker is opened anew; filled by it.
    """

    job_id: str
    folder: str
    options: Mapping[str, Any]
    samples: int | None = None
    kept: dict[str, Any] = field(default_factory=dict[str, Any])


class Tracker(Protocol):
    """A tracker that is open."""

    def write(self, points: Sequence[Point]) -> None:
        """Gives it points, at least one; when this returns, they are not lost with this process."""
        ...

    def close(self) -> None:
        """Ends the run as the tracker sees it."""
        ...
