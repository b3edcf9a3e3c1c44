"""What of the trackers that a config switches on cannot work on this host, found before anything starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dsrun.contract.monitor_records import MonitorSettings
from dsrun.errors import Problem

from .trackers.registry import TRACKERS, TrackerKind


def problems_of(
    settings: MonitorSettings, *, folder: str, trackers: Mapping[str, TrackerKind] = TRACKERS
) -> list[Problem]:
    """Returns what is wrong with one tracker: its package is missing, its folder cannot be written to, it has a secret
    that cannot be handed on.

    Args:
        settings: Settings of the tracker.
        folder: Working folder of the job, from which relative names count.
        trackers: Trackers there are; tests give made-up ones.
    """
    kind = trackers[settings.name]
    problems: list[Problem] = []
    if kind.package is not None and not _is_installed(kind.package):
        problems.append(
            Problem(
                f"`{settings.name}.enabled` is true, and {sys.executable} has no package `{kind.package}`",
                f"pip install 'dsrun[{kind.extra}]'",
            )
        )
    problems += [
        Problem(
            f"`{settings.name}.{key}` is an address with a password, which dsrun writes into no file",
            "leave the password to the package's own settings",
        )
        for key in settings.without_secrets().left_out
        if key in settings.options and key not in kind.secrets
    ]
    if kind.writes_folder:
        problems += _folder_problems(settings, folder)
    return problems


def lost_secrets(
    settings: MonitorSettings, environ: Mapping[str, str], trackers: Mapping[str, TrackerKind] = TRACKERS
) -> list[Problem]:
    """Returns what a tracker's settings have lost on their way by a file; without it scalars would go somewhere else.

    Args:
        settings: Settings of the tracker, as a file had them.
        environ: Environment of the tracker.
        trackers: Trackers there are; tests give made-up ones.
    """
    variables = trackers[settings.name].secrets
    return [
        Problem(
            f"`{settings.name}.{key}` holds a secret, which is written down nowhere",
            f"set `{variables[key]}` where dsrun is started" if key in variables else None,
        )
        for key in settings.left_out
        if variables.get(key) not in environ
    ]


def destination(settings: MonitorSettings, folder: str) -> str:
    """Returns in a few words where a tracker's scalars go.

    Args:
        settings: Settings of the tracker.
        folder: Working folder of the job.
    """
    options = settings.options
    if "job_name" in options:
        where = os.path.join(folder, options["output_path"], options["job_name"])
        return f"files in {where}" if options["output_path"] else f"files in {where}, for `output_path` is empty"
    named = (
        f"{key} `{options[key]}`" for key in ("project", "experiment_name", "experiment", "repo") if options.get(key)
    )
    return ", ".join(named) or "the package's own defaults"


def _is_installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name without code, as `wandb` leaves one behind, has no origin.
    return spec is not None and spec.origin is not None


def _folder_problems(settings: MonitorSettings, folder: str) -> list[Problem]:
    base = os.path.normpath(os.path.join(folder, settings.options["output_path"]))
    job_name = settings.options["job_name"]
    path = os.path.normpath(os.path.join(base, job_name))
    key = f"`{settings.name}.job_name`"
    if path != base and not path.startswith(base.rstrip(os.sep) + os.sep):
        return [Problem(f'{key} is "{job_name}", which is not below `output_path`', "name a folder without `..`")]
    try:
        existing = next(each for each in (Path(path), *Path(path).parents) if each.exists())
    except OSError as error:
        # A name that is too long, or below a folder that cannot be looked into.
        return [Problem(f"`{settings.name}` writes into {path}: {(error.strerror or str(error)).lower()}")]
    if not existing.is_dir():
        why = "is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written to"
    else:
        return []
    return [
        Problem(
            f"`{settings.name}` writes into {path}, and {existing} {why}",
            f"name another folder with `{settings.name}.output_path`",
        )
    ]
