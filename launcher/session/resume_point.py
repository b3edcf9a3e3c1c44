"""Where a job that failed can go on: the newest complete checkpoint that the runtime recorded.

Reads records and looks for files; reads no checkpoint. A program that does not use the runtime leaves no records, and
finds its own checkpoints.

[Note: where checkpoints are] The host of rank 0 writes the file that makes a checkpoint complete, and may be the only
one that sees it. So what counts is what that host sees: it is asked wherever this one cannot know. A host that shares
the job's folder mostly shares the checkpoints' as well, so what is found here is not asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT, MEMORY_COPY_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.errors import DsrunError

from ..hosts.spec import HostSpec
from ..records.follow import read_line
from ..survey.client import HostAnswer, NoAnswer, Survey
from ..transport.base import FIRST_WORD_PATIENCE_S, Transport

#: Its name in the table of survey/server.
QUESTION = "complete_checkpoints"
#: Newest ones that are asked for; a job keeps a handful.
_MOST_ASKED = 100

#: A folder without it is no complete checkpoint. See docs/internals/checkpoint-format.md.
_INDEX_FILE = "index.json"
#: Of an object store: `s3://bucket/run`. The runtime records paths as such.
_ADDRESS = "://"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint.

    Attributes:
        folder: folder of the checkpoint, which was complete when it was recorded.
        identity: text that tells this save from others, also from one into the same folder.
    """

    folder: str
    identity: str


@dataclass(frozen=True, slots=True)
class ResumeSearch:
    """What a search has found.

    Attributes:
        point: the newest complete checkpoint; None if there is none.
        doubt: reason why the checkpoint is only known to have been complete when it was recorded; None where it is
            known to be complete now.
    """

    point: ResumePoint | None
    doubt: str | None = None


def recorded_checkpoints(run_dir: str) -> list[ResumePoint]:
    """Returns all checkpoints that a job has recorded, oldest first; each was complete when it was recorded.

    Args:
        run_dir: the job's folder.
    """
    records = _records(JobPaths(Path(run_dir)).records, CHECKPOINT_EVENT)
    return [
        ResumePoint(folder, f"{folder}@{record.get('time')}")
        for record in records
        if isinstance(folder := record.get("path"), str)
    ]


def has_memory_copies(run_dir: str) -> bool:
    """Whether an attempt at the job has copied its state to memory.

    Args:
        run_dir: the job's folder.
    """
    return bool(_records(JobPaths(Path(run_dir)).records, MEMORY_COPY_EVENT))


def find_checkpoint(
    points: Sequence[ResumePoint],
    host: HostSpec,
    transport: Transport,
    *,
    python: str,
    apart: bool,
    first_word_s: float = FIRST_WORD_PATIENCE_S,
) -> ResumeSearch:
    """Finds the newest checkpoint that is complete now. See [Note: where checkpoints are].

    Args:
        points: those recorded, oldest first.
        host: host of rank 0.
        transport: way to reach the host.
        python: the interpreter there, unless the host names one.
        apart: whether the host does not share the job's folder, so that a path here is another folder than the same
            path there.
        first_word_s: longest time in seconds for the host to be reached and to say its first word; see `Survey`.
    """
    newest_first = list(reversed(points))[:_MOST_ASKED]
    while newest_first and _ADDRESS in newest_first[0].folder:
        found = _find_in_store(newest_first.pop(0))
        if found.point is not None:
            return found
    newest_first = [point for point in newest_first if _ADDRESS not in point.folder]
    if not newest_first:
        return ResumeSearch(None)
    if not apart and is_complete(newest_first[0].folder):
        return ResumeSearch(newest_first[0])
    folders = list(dict.fromkeys(point.folder for point in newest_first))
    with Survey([host], transport, python=python, first_word_s=first_word_s) as survey:
        answer = survey.ask(QUESTION, {"folders": folders})[host.name]
    match answer:
        case HostAnswer(value=[*complete]):
            return ResumeSearch(next((point for point in newest_first if point.folder in complete), None))
        case NoAnswer(reason=lost):
            reason = lost
        case _:
            reason = "its answer makes no sense"
    here = [] if apart else [point for point in newest_first if is_complete(point.folder)]
    if here:
        return ResumeSearch(here[0])
    return ResumeSearch(newest_first[0], f"{host.name} could not be asked whether it is still there: {reason}")


def _find_in_store(point: ResumePoint) -> ResumeSearch:
    """Asks an object store, which is the same one from every host, for the index of a checkpoint."""
    # Here, for few jobs are started again, and fewer from a store.
    from dsrun.checkpoint_files.storage.registry import place_of
    from dsrun.checkpoint_files.storage.tags import is_complete as has_index

    try:
        return ResumeSearch(point if has_index(place_of(point.folder)) else None)
    except DsrunError as error:
        return ResumeSearch(point, f"the store could not be asked whether it is still there: {error}")


def is_complete(folder: str) -> bool:
    """Whether a folder on this host holds a complete checkpoint."""
    return os.path.isfile(os.path.join(folder, _INDEX_FILE))


def complete_folders(arguments: dict[str, Any], keep: ExitStack) -> list[str]:
    """Says which of `folders` hold a complete checkpoint. A question, see [Note: questions] in survey/server."""
    return [folder for folder in arguments["folders"] if is_complete(folder)]


def _records(path: Path, kind: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines:
        # Cheap first: of a long run nearly all records are about steps.
        record = read_line(line) if kind.encode() in line else None
        if record is not None and record.get("event") == kind:
            records.append(record)
    return records
