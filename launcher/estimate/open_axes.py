"""Sizes of axes that a config leaves to a plan: planned before a launch and for `dsrun plan`, and told in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.contract.environment import BACKEND_ENV, PLANNED_AXES_ENV, write_planned_axes
from dsrun.errors import Problem, UsageError

from .launch_facts import machine_of, model_of
from .settings import settings_of

if TYPE_CHECKING:
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.run.machine import Machine
    from dsrun.estimate.search.open_axes import PlannedAxes

    from ..launch.checked_launch import Launch


def with_planned_axes(
    launch: Launch, *, model: str | None, jobs: Sequence[Path], environ: Mapping[str, str], is_allowed: bool
) -> Launch:
    """Returns a launch whose ranks are told the sizes that their config leaves open, and a note on these.

    Stages are left to the script where the layers of its model are not known: 1, unless it has a PipelineModule.

    Args:
        launch: launch whose config leaves sizes of axes open.
        model: MODEL as for `dsrun plan`; None: what the same script trained with the same words when it last ran.
        jobs: folders of jobs.
        environ: the environment of the ranks.
        is_allowed: whether the user lets a plan be made.

    Raises:
        UsageError: the ranks that share a layer are left to a plan that cannot be made.
        ConfigError: the config takes no sizes at all.
    """
    from dsrun.config.axes import open_axes
    from dsrun.config.load import inspect, load
    from dsrun.estimate.prediction import predict
    from dsrun.estimate.search.open_axes import plan_open_axes

    source, ranks = launch.open_config, launch.allocation.world_size
    assert source is not None, "a config leaves sizes open"
    config = load(source)
    keys = open_axes(config)
    known = _facts(launch, model=model, jobs=jobs, environ=environ, is_allowed=is_allowed)
    if isinstance(known, Problem):
        if "tensor" not in keys:
            return launch
        raise UsageError(
            f'{config.source}: `{keys["tensor"]}` is "auto", and {known.message}',
            hint=f"{known.hint}, or write the number that `dsrun plan MODEL --fit` prints; 1 cuts no layer",
        )
    size, machine = known

    found = plan_open_axes(
        config,
        size,
        machine,
        reread=lambda sizes: inspect(source, world_size=ranks, planned=sizes).config,
        settings_of=partial(settings_of, model=size, ranks=ranks),
    )
    if found is None:
        # Both say what is wrong with the smallest sizes.
        smallest = load(source, world_size=ranks, planned=dict.fromkeys(keys, 1))
        predict(size, settings_of(smallest, size, ranks=ranks), machine)
        raise UsageError(
            f"{config.source}: no sizes go with {' and '.join(f'`{key}`' for key in keys.values())}",
            hint="write numbers in place of `auto`",
        )
    sizes = write_planned_axes(found.sizes)
    return replace(
        launch, env={**launch.env, PLANNED_AXES_ENV: sizes}, notes=(*launch.notes, planned_text(found, keys))
    )


def _facts(
    launch: Launch, *, model: str | None, jobs: Sequence[Path], environ: Mapping[str, str], is_allowed: bool
) -> tuple[ModelSize, Machine] | Problem:
    """Returns the model and the machine of a launch, or why they are not known well enough to plan."""
    if not is_allowed:
        return Problem("`--no-plan` makes no plan", "leave `--no-plan` out")
    if launch.placement.static is not None:
        return Problem(
            "every node starts dsrun by itself: their plans could differ", "name the hosts with `-H FILE` in one dsrun"
        )
    size = model_of(launch, model, jobs)
    if size is None:
        return Problem(
            "the model is not known before the script runs", "add `--model 7B`, a config.json or `module:callable`"
        )
    if size.architecture is None:
        return Problem(f"the shape of the layers of {size.label} is not known", "add `--model 7B` or a config.json")
    machine, _ = machine_of(launch, environ)
    if machine.on_cpu and launch.placement.remote_hosts and launch.env.get(BACKEND_ENV) != "gloo":
        return Problem("this machine has no GPU that tells of those of the other hosts", "start it on one that has")
    return size, machine


def planned_text(found: PlannedAxes, keys: Mapping[str, str]) -> str:
    """Returns a line that says which sizes were planned, and why these.

    Args:
        found: the sizes.
        keys: keys of a config that leave them open, by name of the axis.
    """
    from .text import taken_speeds_text

    prediction = found.prediction
    said = " and ".join(
        f'`{keys[axis]}` "auto" is {size} (of {", ".join(map(str, found.tried[axis]))})'
        for axis, size in found.sizes.items()
    )
    if prediction.model.architecture is None:
        reason = "the shape of its layers is not known"
    elif prediction.fits is False:
        reason = "none fits, and these need the least memory"
    else:
        among = "of those that fit" if prediction.fits else "of all, and whether they fit is not known"
        reason = f"the smallest {among}, for speeds are not known here"
        if "flops" not in prediction.unknown_speeds:
            reason = f"the fastest {among}{taken_speeds_text(prediction)}"
    module = "; a script's PipelineModule keeps its own number of stages" if "pipe" in found.sizes else ""
    tokens = f"{prediction.settings.sequence:,} tokens a sample"
    return f"{said}: {reason}, for {prediction.model.label} with {tokens} on {prediction.machine.label}{module}"
