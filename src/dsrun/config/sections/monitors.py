"""Schema of monitors: trackers that are given the scalars of a run. The first four are DeepSpeed's, with its keys."""

from typing import Annotated

from dsrun.config.knob import Section, knob
from dsrun.config.values import Flag, Positive

_FOLDER = "Folder of the files; empty: the working folder of the job."
_JOB_NAME = "Name of the run's folder, below `output_path`."


class TensorBoard(Section):
    """Scalars for TensorBoard."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Write scalars for TensorBoard.")] = False
    output_path: Annotated[str, knob(_FOLDER)] = ""
    job_name: Annotated[str, knob(_JOB_NAME)] = "DeepSpeedJobName"


class CsvMonitor(Section):
    """Scalars as CSV files."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Write scalars as CSV files, one for each name.")] = False
    output_path: Annotated[str, knob(_FOLDER)] = ""
    job_name: Annotated[str, knob(_JOB_NAME)] = "DeepSpeedJobName"


class Wandb(Section):
    """Scalars for Weights & Biases."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Send scalars to Weights & Biases.")] = False
    group: Annotated[str | None, knob("Group of the run.")] = None
    team: Annotated[str | None, knob("Team that owns the project.")] = None
    project: Annotated[str, knob("Project of the run.")] = "deepspeed"


class Comet(Section):
    """Scalars for Comet."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Send scalars to Comet.")] = False
    samples_log_interval: Annotated[Positive, knob("Least samples between two points.", unit="samples")] = 100
    project: Annotated[str | None, knob("Project of the run.")] = None
    workspace: Annotated[str | None, knob("Workspace of the project.")] = None
    api_key: Annotated[str | None, knob("Key of the account; better set as environment variable `COMET_API_KEY`.")] = (
        None
    )
    experiment_name: Annotated[str | None, knob("Name of the run.")] = None
    experiment_key: Annotated[str | None, knob("Key of a run to go on with.")] = None
    online: Annotated[Flag | None, knob("Send at once, or keep for later.")] = None
    mode: Annotated[str | None, knob("Start a new run or go on with one.")] = None


class Mlflow(Section):
    """Scalars for MLflow."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Send scalars to MLflow.")] = False
    tracking_uri: Annotated[
        str | None, knob("Server or store of the runs; none: `MLFLOW_TRACKING_URI`, or MLflow's own default.")
    ] = None
    experiment_name: Annotated[str, knob("Experiment of the run.")] = "dsrun"
    run_name: Annotated[str | None, knob("Name of the run; none: the id of the job.")] = None


class Trackio(Section):
    """Scalars for trackio."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Write scalars for trackio.")] = False
    project: Annotated[str, knob("Project of the run.")] = "dsrun"
    name: Annotated[str | None, knob("Name of the run; none: the id of the job.")] = None
    space_id: Annotated[str | None, knob("Space of Hugging Face that shows the runs; none: this machine.")] = None


class Aim(Section):
    """Scalars for Aim."""

    switch = ("enabled", False)
    only_tells = True

    enabled: Annotated[Flag, knob("Write scalars for Aim.")] = False
    repo: Annotated[str, knob("Folder or server of the runs; empty: the working folder of the job.")] = ""
    experiment: Annotated[str, knob("Experiment of the run.")] = "dsrun"
