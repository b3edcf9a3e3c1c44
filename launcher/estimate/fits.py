"""Before a launch: refuses a run that provably cannot fit, with the numbers and what would fit. Says nothing otherwise.

Provably: model and config are known, and the model state alone, which is exact, is more than this machine has. What
activations take on top is not counted against a run, for it depends on the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.contract.environment import CONFIG_ENV, planned_axes
from dsrun.errors import UsageError
from dsrun.units import format_bytes

from .config_changes import format_value
from .launch_facts import machine_of, model_of
from .model import LAST_RUN
from .settings import settings_of

if TYPE_CHECKING:
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.prediction import Prediction
    from dsrun.estimate.run.machine import Machine
    from dsrun.estimate.run.settings import RunSettings
    from dsrun.estimate.search.changes import Choice

    from ..launch.resolve import Launch


def check_fits(launch: Launch, *, model: str | None, jobs: Sequence[Path], environ: Mapping[str, str]) -> None:
    """Refuses a launch whose model state is larger than the memory that is there.

    Args:
        launch: launch on this machine alone that has passed all other checks.
        model: MODEL as for `dsrun plan`; None: what the same script trained with the same words when it last ran.
        jobs: folders of jobs.
        environ: the environment of the ranks.

    Raises:
        UsageError: it cannot fit, or `model` names no model.
    """
    config = launch.env.get(CONFIG_ENV)
    if config is None and model is None:
        return
    size = model_of(launch, model, jobs)
    if size is None or config is None:
        return
    here, most = machine_of(launch, environ)
    refuse_misfit(size, config, here, most_ranks=most, planned=planned_axes(launch.env))


def refuse_misfit(
    model: ModelSize, config: str, machine: Machine, *, most_ranks: int, planned: Mapping[str, int] | None = None
) -> None:
    """Raises where the model state alone does not fit.

    Args:
        model: size of the model that is trained.
        config: path of the config, which has been checked.
        machine: the only host.
        most_ranks: ranks it could have.
        planned: sizes of axes that a plan has found where the config leaves them open.

    Raises:
        UsageError: it cannot fit; the hint has the three nearest settings that do.
    """
    from dsrun.config.axes import open_axes
    from dsrun.config.load import load
    from dsrun.estimate.prediction import predict
    from dsrun.estimate.search.nearest import nearest

    loaded = load(config, planned=planned)
    is_open = bool(open_axes(loaded))
    if is_open and model.architecture is None:
        return  # the script says how many ranks share its model out
    settings = settings_of(loaded, model, ranks=machine.ranks)
    cuts = _cut_into_any_stages(model, settings, machine) if is_open else [settings]
    shortages = [_shortage(predict(model, cut, machine)) for cut in cuts]
    least = min((one for one in shortages if one is not None), key=lambda one: one.factor, default=None)
    if least is None or None in shortages:
        return
    stages = " with any number of pipeline stages" if is_open else ""
    # Of one token activations are next to nothing: they are not known here, only what cannot fit is.
    state = replace(settings, sequence=1)
    fitting = nearest(model, state, machine, most_ranks=most_ranks, free={"stage", "batch", "offload"})
    raise UsageError(
        f"{config}: {model.label}{_origin(model)} cannot fit at stage {settings.stage}{stages}: {least.text}",
        hint=f"{_way_out(fitting)}; `--no-plan` starts it anyway",
    )


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Memory that is too small: by which factor, and in words."""

    factor: float
    text: str


def _shortage(prediction: Prediction) -> _Shortage | None:
    """Returns the memory that the model state alone is too large for; None where it fits, or nothing is known."""
    machine = prediction.machine
    on_gpu = sum(tier.exact_bytes for tier in prediction.tiers if tier.name == "GPU")
    limit = machine.gpu_memory_bytes
    if limit is not None and on_gpu > limit:
        text = f"{format_bytes(on_gpu)} of model state a rank; {format_bytes(limit)} is what a rank has of GPU memory"
        return _Shortage(on_gpu / max(limit, 1), text)
    on_host = sum(tier.exact_bytes for tier in prediction.tiers if tier.is_host)
    limit, needed = machine.host_memory_bytes, prediction.host_state_bytes
    if limit is None or needed <= limit:
        return None
    kind = "model state" if machine.on_cpu else "model state in host memory"
    ranks = f", {format_bytes(needed)} for {machine.ranks_per_host} ranks" if machine.ranks_per_host > 1 else ""
    text = f"{format_bytes(on_host)} of {kind} a rank{ranks}; {format_bytes(limit)} is what this machine has free"
    return _Shortage(needed / max(limit, 1), text)


def _cut_into_any_stages(model: ModelSize, settings: RunSettings, machine: Machine) -> list[RunSettings]:
    """Returns the settings with every number of pipeline stages that there can be."""
    from dsrun.estimate.search.changes import stage_in, takes_offload, with_axes
    from dsrun.estimate.search.layouts import stage_counts

    counts = stage_counts(model, settings, machine)
    cuts = [with_axes(settings, tensor=settings.tensor_parallel, stages=count) for count in counts]
    made = [replace(cut, stage=stage_in(cut, cut.stage)) for cut in cuts if cut.fits_ranks(machine.ranks)]
    return [cut for cut in made if takes_offload(cut, cut.offload_optimizer, cut.offload_param)]


def _origin(model: ModelSize) -> str:
    """Names the run a model is known from, for the user did not name the model."""
    return next((f" ({note})" for note in model.notes if LAST_RUN in note), "")


def _way_out(choices: Sequence[Choice]) -> str:
    if not choices:
        return "no stage, precision or micro batch of this version fits here; see `dsrun plan --what-if`"
    return "the model state fits with " + ", or ".join(
        " and ".join(
            f"`{key} {value}`" if key.startswith("-") else f"`{key}` {format_value(value)}" for key, value in c.changes
        )
        for c in choices
    )
