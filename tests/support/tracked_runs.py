"""A run that a real tracker is given: from records as rank 0 leaves them, by the feed that a monitor's process has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsrun.config.load import load
from dsrun.config.monitors import enabled_monitors
from dsrun.contract.monitor_records import MonitorSettings
from dsrun.launcher.masking import Masker
from dsrun.launcher.monitors.feed import Feed, Word, follow
from dsrun.launcher.monitors.main import opener_of
from dsrun.launcher.monitors.trackers.registry import TRACKERS
from dsrun.launcher.monitors.trackers.tracker import TrackedRun

from .recorded_runs import append_records

SMALL: Mapping[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}


def settings_of(section: str, **options: Any) -> MonitorSettings:
    """Settings of a tracker as a config gives them.

    Args:
        section: Its section.
        options: Keys of the section; it is switched on.
    """
    (settings,) = enabled_monitors(load({**SMALL, section: {"enabled": True, **options}}))
    return settings


def give(job: Path, settings: MonitorSettings, lines: Sequence[Mapping[str, Any]], *, job_id: str = "j1") -> Feed:
    """Appends records to a job, and gives what the tracker lacks of them to it, which stays open.

    Args:
        job: Folder of the job, made if need be.
        settings: Settings of the tracker.
        lines: Records to append.
        job_id: Id of the job.
    """
    job.mkdir(exist_ok=True)
    append_records(job, lines)
    run = TrackedRun(job_id=job_id, folder=str(job.parent), options=settings.options)
    feed = Feed(job, settings, run, opener_of(TRACKERS[settings.name].opener), masker=Masker())
    feed.give()
    return feed


def run_to_its_end(
    job: Path, settings: MonitorSettings, attempts: Iterable[Sequence[Mapping[str, Any]]], *, job_id: str = "j1"
) -> list[str]:
    """Gives a tracker what each attempt adds to a job's records, and closes it; returns what the user is told.

    Args:
        job: Folder of the job.
        settings: Settings of the tracker.
        attempts: Records that each attempt adds.
        job_id: Id of the job.
    """
    notes: list[str] = []
    kind = TRACKERS[settings.name]
    feed = give(job, settings, [], job_id=job_id)
    for lines in attempts:
        append_records(job, lines)
        feed.give()
    follow(feed, lambda _s: Word.ENDED, notes.append, on_again=kind.again)
    return notes
