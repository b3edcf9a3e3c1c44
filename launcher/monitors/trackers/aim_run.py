"""Runs of Aim, by the package `aim`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .tracker import TrackedRun, Tracker


def open_tracker(run: TrackedRun) -> Tracker:
    """Begins a run, or goes on with the one that this job began.

    Args:
        run: The run.
    """
    aim: Any = importlib.import_module("aim")

    opened = aim.Run(
        run_hash=run.kept.get("hash"),
        repo=run.options["repo"] or run.folder,
        experiment=run.options["experiment"],
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )
    opened.name = run.job_id
    run.kept["hash"] = opened.hash
    return AimRun(opened)


class AimRun:
    """An open run.

    Args:
        run: Run of `aim`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, points: Sequence[Point]) -> None:
        """Tracks each point at its optimizer step."""
        for point in points:
            self._run.track(dict(point.values), step=point.step)

    def close(self) -> None:
        """Ends the run."""
        self._run.close()
