"""Runs of trackio, by the package `trackio`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .tracker import TrackedRun, Tracker


def open_tracker(run: TrackedRun) -> Tracker:
    """Begins a run, or goes on with the one that this job began.

    Args:
        run: The run.
    """
    trackio: Any = importlib.import_module("trackio")

    # What it measures of this machine would stand among the figures of the job, which may run on others.
    known = inspect.signature(trackio.init).parameters
    own = {name: False for name in ("auto_log_cpu", "auto_log_gpu") if name in known}
    opened = trackio.init(
        project=run.options["project"],
        name=run.options["name"] or run.job_id,
        space_id=run.options["space_id"],
        resume="allow",
        embed=False,
        **own,
    )
    return TrackioRun(opened)


class TrackioRun:
    """An open run.

    Args:
        run: Run of `trackio`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, points: Sequence[Point]) -> None:
        """Logs each point at its optimizer step."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
