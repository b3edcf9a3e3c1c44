"""Runs of MLflow, by the client of the package `mlflow`; `mlflow-skinny` does where a server has the runs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .tracker import TrackedRun, Tracker

#: What MLflow takes in a name.
_REFUSED = re.compile(r"[^\w\-. :/]")
#: Scalars that a server takes at once.
_MOST = 1000


def open_tracker(run: TrackedRun) -> Tracker:
    """Begins a run, or goes on with the one that this job began.

    Args:
        run: The run.
    """
    tracking: Any = importlib.import_module("mlflow.tracking")

    client: Any = tracking.MlflowClient(tracking_uri=run.options.get("tracking_uri"))
    if "run_id" not in run.kept:
        name = run.options["experiment_name"]
        found = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if found is None else found.experiment_id
        begun = client.create_run(experiment_id, run_name=run.options["run_name"] or run.job_id)
        run.kept["run_id"] = begun.info.run_id
    else:
        client.update_run(run.kept["run_id"], status="RUNNING")
    return MlflowRun(client, run.kept["run_id"])


class MlflowRun:
    """An open run.

    Args:
        client: Client of `mlflow`.
        run_id: Id of the run.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def write(self, points: Sequence[Point]) -> None:
        """Logs the points at their optimizer steps, as many at once as a server takes."""
        entities: Any = importlib.import_module("mlflow.entities")

        metrics = [
            entities.Metric(_name(tag), value, int(point.time * 1000), point.step)
            for point in points
            for tag, value in point.values.items()
        ]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST])

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run_id)


def _name(tag: str) -> str:
    """Returns a name that MLflow takes; it refuses paths that are absolute or have dots for a folder above."""
    parts = [part for part in _REFUSED.sub("_", tag).split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "_"
