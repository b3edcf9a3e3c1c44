"""What the folder of a job holds for a report, read once. Judges and draws nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import DsrunError

from ..console.status_area import plain
from ..jobs.facts import SCHEMA_VERSION
from ..jobs.listing import Job
from ..jobs.record import read_json
from ..masking import Masker
from ..records.follow import RecordFollower, is_date
from ..records.recorded_run import RecordedRun, read_run

#: Lines of the failing rank that a report shows, and bytes in which they are looked for.
_LOG_LINES, _LOG_BYTES = 40, 1 << 16
#: Events that a report tells of; a rank that starts is none.
_TOLD_EVENTS = ("waiting", "start", "rank_exit", "restart", "hang", "straggler", "host_lost", "kill", "stop", "end")
_MOST_EVENTS = 20_000
_RANK = re.compile(r"\brank ([0-9]+)\b")


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of a training config.

    Attributes:
        path: Dotted path.
        text: Value as JSON.
        is_default: Whether nobody has set it.
    """

    path: str
    text: str
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job with all that was written down about it.

    Attributes:
        job: The job.
        run: Records of its training.
        events: Events of the job, in order of time; of the exits of an attempt's ranks the first failure alone.
        facts: Things it depends on beside its command; empty where that is not known.
        config: Values of its training config, in order of their paths; empty where it has none.
        config_note: Reason why values of the config are shown as they were written; empty where they were checked.
        log_rank: Rank that failed first; None where none did.
        log_lines: Last lines that it wrote.
    """

    job: Job
    run: RecordedRun
    events: Sequence[dict[str, Any]]
    facts: dict[str, Any]
    config: Sequence[ConfigValue]
    config_note: str
    log_rank: int | None
    log_lines: Sequence[str]


def read_source(job: Job, masker: Masker) -> JobSource:
    """Reads what there is of a job.

    Args:
        job: The job.
        masker: Hides the values of secrets in the config.

    Raises:
        DsrunError: The records are there and cannot be read.
    """
    paths = JobPaths(job.folder)
    try:
        run = read_run(job.folder)
    except OSError as error:
        raise DsrunError(f"{paths.records}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    facts = read_json(paths.machine) or {}
    events = _events(paths.events)
    config, note = _config(job, masker)
    rank = _failing_rank(job, events)
    return JobSource(
        job=job,
        run=run,
        events=events,
        facts=facts if facts.get("schema_version") == SCHEMA_VERSION else {},
        config=config,
        config_note=note,
        log_rank=rank,
        log_lines=() if rank is None else _last_lines(paths.log(rank)),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    has_failed = False
    try:
        for event in RecordFollower(path).read():
            if event.get("event") in _TOLD_EVENTS and is_date(event.get("time")):
                if event["event"] == "start":
                    has_failed = False
                if event["event"] == "rank_exit":
                    # The first failure of an attempt is told, the others were stopped for it: of thousands of ranks
                    # they would take all room.
                    if not event.get("status") or has_failed:
                        continue
                    has_failed = True
                events.append(event)
                if len(events) == _MOST_EVENTS:
                    break
    except OSError:
        # A page without a timeline says more than none.
        return events
    return events


def _failing_rank(job: Job, events: Sequence[dict[str, Any]]) -> int | None:
    """Returns the rank that the verdict names first; else the one that failed first in the last attempt."""
    if job.outcome is None or not job.outcome.get("failure"):
        return None
    named = _RANK.search(job.outcome["failure"][0])
    if named is not None:
        return int(named[1])
    first: int | None = None
    for event in events:
        match event:
            case {"event": "start"}:
                first = None
            case {"event": "rank_exit", "rank": int(rank), "status": int(status)} if status and first is None:
                first = rank
            case _:
                pass
    return first


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [plain(line) for line in lines[-_LOG_LINES:]]


def _config(job: Job, masker: Masker) -> tuple[list[ConfigValue], str]:
    """Returns the values of the config, and why they were not checked, if they were not."""
    path = JobPaths(job.folder).config_copy
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return [], ""
    # Both take a while to import, and only a job with a config needs them.
    import yaml

    from dsrun.config.load import inspect
    from dsrun.config.provenance import Kind
    from dsrun.config.show.resolved import rows
    from dsrun.config.text.tree import show

    try:
        # A config may have been either. YAML reads JSON too, but for tabs, and takes `1e-3` for a text.
        written: Any = json.loads(text)
    except (ValueError, RecursionError):
        try:
            written = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError):
            written = None
    if not isinstance(written, dict):
        return [], f"{path} is neither JSON nor YAML"
    masked: Any = masker.value(written)
    ranks = job.record.plan.get("world_size") or job.record.ranks
    for world_size in (ranks, None):
        try:
            config = inspect(masked, world_size=world_size).config
        except DsrunError:
            continue
        if config is not None:
            found = rows(config)
            return [ConfigValue(row.path, show(row.value), row.source.kind is Kind.DEFAULT) for row in found], ""
    return _flat(masked, ""), "this dsrun does not take the config as it was: its values are shown as they were written"


def _flat(value: Any, path: str) -> list[ConfigValue]:
    from dsrun.config.text.tree import show

    if not isinstance(value, dict) or (not value and path):
        return [ConfigValue(path, show(value))]
    return [each for key, item in value.items() for each in _flat(item, f"{path}.{key}" if path else str(key))]
