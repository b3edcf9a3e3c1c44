"""`dsrun export`: gives the records of a job to trackers, from where its monitors stopped, or from the beginning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.monitor_records import MonitorSettings
from dsrun.errors import DsrunError, UsageError

from ..jobs.listing import Job, find_job
from ..masking import Masker
from ..monitors.checks import destination, lost_secrets, problems_of
from ..monitors.feed import Feed
from ..monitors.main import opener_of
from ..monitors.state import MonitorState, StateFile, read_settings
from ..monitors.trackers.registry import TRACKERS
from ..monitors.trackers.tracker import TrackedRun, TrackerProblem
from ..options.job_argument import job_argument

#: Short names, beside those of the config's sections.
_SHORT = {"csv": "csv_monitor"}


@click.command("export")
@click.option(
    "--to",
    "names",
    multiple=True,
    required=True,
    metavar="TRACKER",
    help="csv, tensorboard, wandb, comet, mlflow, trackio or aim; may be given several times.",
)
@click.option("--output", metavar="FOLDER", help="Write files here, from the beginning (csv, tensorboard).")
@click.option("--again", is_flag=True, help="Give all records from the beginning, as another run of the tracker.")
@job_argument()
def command(names: tuple[str, ...], output: str | None, again: bool, job: str) -> int:
    """Give a job's records to trackers.

    A tracker that the job had goes on where it stopped, with the settings it had; another one begins with the first
    step, with the settings that its section of a config has by default.
    """
    found = find_job(job, os.environ)
    chosen = [_SHORT.get(name, name) for name in names]
    for name in chosen:
        if name not in TRACKERS:
            known = ", ".join({value: key for key, value in _SHORT.items()}.get(each, each) for each in TRACKERS)
            raise UsageError(f"`--to {name}`: dsrun knows no such tracker", hint=f"there are {known}")
        if output is not None and not TRACKERS[name].writes_folder:
            raise UsageError(f"`--output` is for trackers that write files, and `{name}` is none")
    settings = [_settings(found, name, output) for name in chosen]
    folder = _folder(found)
    problems = [
        problem for each in settings for problem in (*problems_of(each, folder=folder), *lost_secrets(each, os.environ))
    ]
    if problems:
        raise UsageError.of(problems)
    if not JobPaths(found.folder).records.exists():
        raise UsageError(f"job {found.id} has no records", hint="scripts that call `dsrun.initialize` leave some")
    here = os.getcwd()
    try:
        # Stores of packages that lie below the working folder are below the job's.
        os.chdir(folder)
        for each in settings:
            _export(found, each, folder, begins_anew=again or output is not None)
    finally:
        os.chdir(here)
    return 0


def _settings(job: Job, name: str, output: str | None) -> MonitorSettings:
    known = read_settings(job.folder, name)
    if known is not None and job.state.is_live:
        raise UsageError(f"job {job.id} is {job.state.value}, and gives its records to `{name}` itself")
    settings = known or MonitorSettings(name=name, options=_defaults(name))
    if output is not None:
        settings = replace(settings, options={**settings.options, "output_path": os.path.abspath(output)})
    return settings


def _defaults(name: str) -> Mapping[str, Any]:
    from dsrun.config.config import Config

    section: Any = Config.model_construct()
    return getattr(section, name).model_dump(exclude={"enabled"})


def _export(job: Job, settings: MonitorSettings, folder: str, *, begins_anew: bool) -> None:
    if begins_anew:
        StateFile(job.folder, settings).write(MonitorState())
    run = TrackedRun(job_id=job.id, folder=folder, options=settings.options)
    feed = Feed(job.folder, settings, run, opener_of(TRACKERS[settings.name].opener), masker=Masker([os.environ]))
    before = feed.state.offset
    try:
        feed.give()
        feed.close()
    except TrackerProblem as problem:
        raise DsrunError(
            f"`{settings.name}` does not take the records of job {job.id}: {problem}",
            hint="what it took is written down: the same command goes on there",
        ) from problem
    if feed.unread:
        click.echo(f"dsrun: {feed.unread} records are of another version or damaged, and were passed over", err=True)
    what = "has all records already" if feed.state.offset == before else f"has all steps up to {feed.state.step}"
    click.echo(f"dsrun: {settings.name} {what} ({destination(settings, folder)})", err=True)


def _folder(job: Job) -> str:
    """Returns the folder from which names of files count: the job's, if it is still there."""
    return job.record.cwd if Path(job.record.cwd).is_dir() else os.getcwd()
