"""The trackers there are, by the names of their sections of the config: a table. A new one is a module and a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """One tracker.

    Attributes:
        opener: Function that opens it, as `module:name`; a name is no import, so that nothing is loaded early.
        package: Package that must be importable; None for those that need none.
        extra: Extra of dsrun that installs the package.
        writes_folder: Whether it writes into `output_path` and `job_name`.
        secrets: Environment variable by key of the config, for values that are secrets and come by the environment.
        again: Words for what the tracker does with steps that are taken again; None where that is as it should be.
    """

    opener: str
    package: str | None = None
    extra: str | None = None
    writes_folder: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    again: str | None = None


_HERE = "dsrun.launcher.monitors.trackers"
_BOTH = "it keeps the older points of these steps beside the new ones"

TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(
        opener=f"{_HERE}.event_file:open_tracker", package="tensorboard", extra="tensorboard", writes_folder=True
    ),
    "csv_monitor": TrackerKind(opener=f"{_HERE}.csv_files:open_tracker", writes_folder=True),
    "wandb": TrackerKind(
        opener=f"{_HERE}.wandb_run:open_tracker",
        package="wandb",
        extra="wandb",
        again="it takes no step that lies before its newest, and keeps the older points",
    ),
    "comet": TrackerKind(
        opener=f"{_HERE}.comet_experiment:open_tracker",
        package="comet_ml",
        extra="comet",
        secrets={"api_key": "COMET_API_KEY"},
        again=_BOTH,
    ),
    "mlflow": TrackerKind(
        opener=f"{_HERE}.mlflow_run:open_tracker",
        package="mlflow",
        extra="mlflow",
        secrets={"tracking_uri": "MLFLOW_TRACKING_URI"},
        again=_BOTH,
    ),
    "trackio": TrackerKind(opener=f"{_HERE}.trackio_run:open_tracker", package="trackio", extra="trackio", again=_BOTH),
    "aim": TrackerKind(
        opener=f"{_HERE}.aim_run:open_tracker",
        package="aim",
        extra="aim",
        again="new points take the older ones' place",
    ),
}
