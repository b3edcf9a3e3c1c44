"""What is known of a launch before it starts: the model that it trains, and the machine that it has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.contract.environment import BACKEND_ENV, digest_of
from dsrun.errors import InputError

from ..machine.read import probe
from .machine import machine_here
from .model import find_model, last_run

if TYPE_CHECKING:
    from dsrun.estimate.model.units import ModelSize
    from dsrun.estimate.run.machine import Machine

    from ..launch.checked_launch import Launch


def model_of(launch: Launch, model: str | None, jobs: Sequence[Path]) -> ModelSize | None:
    """Returns the model that is trained; None where nobody can tell before the script runs.

    Args:
        launch: the launch.
        model: MODEL as for `dsrun plan`; None: what the same script trained with the same words when it last ran.
        jobs: folders of jobs.

    Raises:
        UsageError: `model` names no model.
    """
    if model is not None:
        return find_model(model, jobs=jobs)
    if launch.program.kind != "script":
        return None
    script = Path(launch.program.target)
    try:
        run = last_run(script, jobs=jobs, arguments=digest_of(launch.program.args))
        unchanged = run is not None and os.stat(script).st_mtime <= run.time_s
    except (OSError, InputError):
        return None
    return run.model if run is not None and unchanged else None


def machine_of(launch: Launch, environ: Mapping[str, str]) -> tuple[Machine, int]:
    """Returns the hosts of a launch, all taken to be like this machine, and the ranks that this machine could have.

    Args:
        launch: the launch.
        environ: the environment of the ranks.
    """
    report = probe(environ=environ, gpu_state=False)
    on_gpus = launch.env.get(BACKEND_ENV) != "gloo" and report.versions.cuda is not None
    ranks, hosts = launch.allocation.world_size, launch.allocation.hosts
    is_here = not launch.placement.remote_hosts
    here = machine_here(report, ranks=ranks if is_here else max(host.slots for host in hosts), use_gpus=on_gpus)
    most = here.ranks if here.on_cpu else max(1, sum(gpu.usable for gpu in report.gpus))
    if is_here:
        return here, most
    note = "every host is taken to be like this machine"
    return replace(here, label=f"{ranks} ranks on {len(hosts)} hosts", ranks=ranks, notes=(*here.notes, note)), most
