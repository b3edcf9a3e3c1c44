"""Experiments of Comet, by the package `comet_ml`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..points import Point
from .tracker import TrackedRun, Tracker


def open_tracker(run: TrackedRun) -> Tracker:
    """Begins an experiment, or goes on with the one that this job began. The key is in the environment.

    Args:
        run: The run.
    """
    comet_ml: Any = importlib.import_module("comet_ml")

    options = run.options
    known = run.kept.get("experiment_key")
    experiment = comet_ml.start(
        workspace=options["workspace"],
        project=options["project"],
        experiment_key=known or options["experiment_key"],
        mode=options["mode"] if known is None else None,
        online=options["online"],
        experiment_config=comet_ml.ExperimentConfig(
            name=options["experiment_name"] or run.job_id,
            log_code=False,
            log_graph=False,
            auto_metric_logging=False,
            auto_param_logging=False,
            auto_output_logging=False,
            auto_log_co2=False,
            parse_args=False,
            log_git_metadata=False,
            log_git_patch=False,
            log_env_gpu=False,
            log_env_cpu=False,
            log_env_disk=False,
            log_env_network=False,
            log_env_details=False,
            display_summary_level=0,
        ),
    )
    run.kept["experiment_key"] = experiment.get_key()
    return CometExperiment(experiment, every_samples=options["samples_log_interval"])


class CometExperiment:
    """An open experiment.

    Args:
        experiment: Experiment of `comet_ml`.
        every_samples: Least samples between two points of a name.
    """

    def __init__(self, experiment: Any, *, every_samples: int) -> None:
        self._experiment = experiment
        self._every = every_samples
        #: Samples at which a name was logged last.
        self._logged: dict[str, int] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Logs each point at its samples, but for names that were logged too few samples ago."""
        for point in points:
            if point.after_samples is not None:
                self._logged = {tag: at for tag, at in self._logged.items() if at <= point.after_samples}
            due = {tag: value for tag, value in point.values.items() if self._is_due(tag, point.samples)}
            if due:
                self._experiment.log_metrics(due, step=point.samples)
            self._logged |= dict.fromkeys(due, point.samples)
        self._experiment.flush()

    def close(self) -> None:
        """Ends the experiment, once all is sent or kept."""
        self._experiment.end()

    def _is_due(self, tag: str, samples: int) -> bool:
        return tag not in self._logged or samples - self._logged[tag] >= self._every
