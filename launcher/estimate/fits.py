"""Before a launch: refuses a run that provably cannot fit, with the numbers and what would fit. Says nothing otherwise.

Provably: model and config are known, and the model state alone, which is exact, is more than this machine has. What
activations take on top is not counted against a run, for it depends on the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.contract.environment import CONFIG_ENV, planned_axes
from dsrun.errors import UsageError
from dsrun.units import format_bytes

from .config_changes import format_value
from .launch_facts import machine_of, model_of
from .model import LAST_RUN

if TYPE_CHECKING:
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.run.machine import Machine
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
    from dsrun.estimate.run.settings import read_settings
    from dsrun.estimate.search.nearest import nearest

    loaded = load(config, planned=planned)
    if open_axes(loaded):
        return  # the script says how many ranks share its model out
    settings = read_settings(loaded, ranks=machine.ranks)
    state = predict(model, settings, machine).state.total
    if machine.on_cpu:
        limit, needed = machine.host_memory_bytes, state * machine.ranks_per_host
    else:
        limit, needed = machine.gpu_memory_bytes, state
    if limit is None or needed <= limit:
        return
    where = "this machine has free" if machine.on_cpu else "a rank has of GPU memory"
    ranks = f"{machine.ranks} rank{'s' if machine.ranks > 1 else ''}"
    hold = f"{format_bytes(state)} of model state a rank"
    total = f", {format_bytes(needed)} for {ranks}" if machine.on_cpu and machine.ranks > 1 else ""
    # Activations are left out of the other settings too: they are not known here, only what cannot fit is.
    fitting = nearest(replace(model, architecture=None), settings, machine, most_ranks=most_ranks)
    raise UsageError(
        f"{config}: {model.label}{_origin(model)} cannot fit at stage {settings.stage}: {hold}{total}; "
        f"{format_bytes(limit)} is what {where}",
        hint=f"{_way_out(fitting)}; `--no-plan` starts it anyway",
    )


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
