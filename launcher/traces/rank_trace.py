"""A rank's profile as it lies in the job's folder: a Kineto trace, compressed. Reads it, and knows its fields.

[Note: Kineto] One object with `traceEvents`, each with `ph`, `ts` and `dur` in microseconds since
`baseTimeNanoseconds`, and `cat`: `cpu_op`, `kernel`, `user_annotation` for our labels. The step labels `step 7` come
from runtime/observe/trace.py, waits begin with `wait `. `dsrun` says whose trace it is and which steps are whole in it.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.job_paths import TRACE_PATTERN, JobPaths, rank_of_trace
from dsrun.errors import InputError

#: Category of labels, ours and the script's.
LABEL = "user_annotation"
#: Categories of what a GPU does.
KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
WAIT = "wait "
_STEP = re.compile(r"step ([0-9]+)")


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Profile of one rank.

    Attributes:
        rank: Number of the rank.
        host: Name that its host gives itself.
        base_us: Microseconds since the epoch by the rank's clock that the times of events count from.
        events: Events as Kineto has written them, without labels of steps that are not whole.
    """

    rank: int
    host: str
    base_us: int
    events: list[dict[str, Any]]

    def steps(self) -> Iterator[tuple[int, float, float]]:
        """Yields the steps, each as number, begin and microseconds."""
        for event in self.events:
            match = _STEP.fullmatch(event.get("name", "")) if event.get("cat") == LABEL else None
            if match is not None:
                yield int(match[1]), event["ts"], event["dur"]


def traced_ranks(folder: Path) -> list[int]:
    """Returns the ranks that have left a profile, in order.

    Args:
        folder: Folder of the job.
    """
    found = (rank_of_trace(path.name) for path in folder.glob(TRACE_PATTERN))
    return sorted(rank for rank in found if rank is not None)


def read_rank_trace(folder: Path, rank: int) -> RankTrace:
    """Reads the profile of a rank.

    Args:
        folder: Folder of the job.
        rank: Number of the rank.

    Raises:
        InputError: it is no profile, or damaged.
        OSError: it cannot be read.
    """
    path = JobPaths(folder).trace(rank)
    try:
        with gzip.open(path, "rb") as file, _without_collector():
            body = json.load(file)
        about = body.get("dsrun", {})
        whole = {f"step {step}" for step in about.get("steps", ())}
        events = [
            event
            for event in body["traceEvents"]
            if isinstance(event.get("ts"), int | float)
            and (event["ph"] != "X" or isinstance(event.get("dur"), int | float))
            and not (event.get("cat") == LABEL and _STEP.fullmatch(event["name"]) and event["name"] not in whole)
        ]
        return RankTrace(rank, str(about.get("host", "")), int(body.get("baseTimeNanoseconds", 0)) // 1000, events)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} is no whole profile: {type(error).__name__}: {str(error)[:80]}",
            hint="remove it, or profile again with `dsrun run --profile`",
        ) from error


@contextmanager
def _without_collector() -> Generator[None, None, None]:
    """Reads millions of objects, none of them garbage, which the collector would go through again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
