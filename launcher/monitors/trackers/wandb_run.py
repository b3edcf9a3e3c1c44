"""Runs of Weights & Biases, by the package `wandb`, which has a process of its own for what it sends."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .tracker import TrackedRun, Tracker


def open_tracker(run: TrackedRun) -> Tracker:
    """Begins a run, or goes on with the one that this job began. Where the key comes from is `wandb`'s own affair.

    Args:
        run: The run.
    """
    wandb: Any = importlib.import_module("wandb")

    known = run.kept.setdefault("id", f"{run.job_id}-{secrets.token_hex(3)}")
    opened = wandb.init(
        project=run.options["project"],
        group=run.options["group"],
        entity=run.options["team"],
        id=known,
        name=run.job_id,
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbRun(opened)


class WandbRun:
    """An open run.

    Args:
        run: Run of `wandb`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, points: Sequence[Point]) -> None:
        """Logs each point at its samples, as DeepSpeed does; `wandb` keeps them in a file until they are sent."""
        for point in points:
            self._run.log(dict(point.values), step=point.samples)

    def close(self) -> None:
        """Ends the run, once all is sent or kept."""
        self._run.finish()
