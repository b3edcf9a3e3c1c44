"""Profiles of ranks in one file that chrome://tracing and Perfetto read, with the launcher's events beside them.

Each rank is a process there, `rank 3 (host)`, its threads and GPU streams the threads of that. All times are on the
launcher's clock: those of a rank are moved by what its host's clock was found to be off, see `Link.greet`.

[Note: margin] A job may run for days and its profile last a second. Events of the launcher that are further away than
some minutes are left out, or a viewer would begin with an empty week.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dsrun.contract.environment import CHECKPOINT_EVENT, MEMORY_COPY_EVENT
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.step_records import STEP_EVENT
from dsrun.files.regular import refuse_other_kinds

from ..records.follow import RecordFollower
from .rank_trace import RankTrace

#: Event by which the launcher writes down what a host's clock is off.
CLOCK_EVENT = "clock"
_LAUNCHER = "launcher"
_MARGIN_S = 600.0
#: Rows of the launcher.
_EVENTS, _STEPS, _CHECKPOINTS = 1, 2, 3
_ROWS = {_EVENTS: "events", _STEPS: "steps of rank 0", _CHECKPOINTS: "checkpoints"}
#: Flows of a rank are numbered from 1; those of another rank begin here.
_FLOWS_A_RANK = 1 << 32
#: Processes of a Kineto trace that say nothing of a rank.
_OWN_ROWS = frozenset({"", "Spans", "Traces"})


@dataclass(frozen=True, slots=True)
class JobTimes:
    """What of a job's own files goes into its merged profile.

    Attributes:
        begin_s: Seconds since the epoch that the times of the merged file count from.
        events: Launcher's events, in order of time.
        hosts: Name of each rank's host.
        offsets_s: Seconds to add to the times of a host, where its clock is off.
        records: File of rank 0's records.
    """

    begin_s: int
    events: list[dict[str, Any]]
    hosts: Mapping[int, str]
    offsets_s: Mapping[str, float]
    records: Path

    def offset_of(self, rank: int) -> float:
        """Returns the seconds to add to the times of a rank."""
        return self.offsets_s.get(self.hosts.get(rank, ""), 0.0)


def read_job_times(folder: Path) -> JobTimes:
    """Reads the events of a job.

    Args:
        folder: Folder of the job.

    Raises:
        OSError: they cannot be read.
    """
    paths = JobPaths(folder)
    events = [event for event in RecordFollower(paths.events).read() if isinstance(event.get("time"), int | float)]
    hosts: dict[int, str] = {}
    offsets: dict[str, float] = {}
    for event in events:
        match event:
            case {"event": "rank_started", "rank": int(rank), "host": str(host)}:
                hosts[rank] = host
            case {"event": "clock", "host": str(host), "offset_s": int() | float() as offset_s}:
                offsets[host] = offset_s
            case _:
                pass
    return JobTimes(int(events[0]["time"]) if events else 0, events, hosts, offsets, paths.records)


@dataclass(slots=True)
class _Rows:
    """Numbers of a rank's threads in the merged file, by process and thread of its own trace."""

    numbers: dict[tuple[Any, Any], int] = field(default_factory=dict[tuple[Any, Any], int])

    def of(self, event: Mapping[str, Any]) -> int:
        return self.numbers.setdefault((event.get("pid"), event.get("tid")), len(self.numbers) + 1)


class MergedTrace:
    """Writes the merged file, rank by rank; it has its name once it is whole.

    Args:
        path: File to write.
        times: Events of the job.

    Raises:
        OSError: the file cannot be made, or something else than a file has its name.
    """

    def __init__(self, path: Path, times: JobTimes) -> None:
        self._path = path
        self._draft = path.with_name(f".{path.name}.new")
        self._times = times
        self._first_s = self._last_s = 0.0
        self._is_empty = True
        #: Number of events of the launcher that were too far away, see [Note: margin].
        self.left_out = 0
        refuse_other_kinds(path)
        descriptor = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._raw = os.fdopen(descriptor, "wb")
        self._file = gzip.open(self._raw, "wt", compresslevel=1, encoding="utf-8")  # noqa: SIM115 - ended by `__exit__`
        self._file.write(f'{{"baseTimeNanoseconds": {times.begin_s * 10**9}, "displayTimeUnit": "ms", "traceEvents": [')

    def __enter__(self) -> MergedTrace:
        """Goes on with the file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the file and gives it its name; after an error nothing is left of it."""
        try:
            if error is None:
                self._write(self._launcher())
                self._file.write("\n]}\n")
            self._file.close()
            self._raw.close()
            if error is None:
                os.replace(self._draft, self._path)
        finally:
            self._raw.close()
            self._draft.unlink(missing_ok=True)

    def add(self, trace: RankTrace) -> None:
        """Adds a rank.

        Raises:
            OSError: there is no place for it.
        """
        # In whole microseconds, which a double holds far from the epoch no more.
        base_us = trace.base_us - self._times.begin_s * 10**6 + round(self._times.offset_of(trace.rank) * 1e6)
        spans = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in trace.events if event["ph"] == "X"]
        if spans:
            begin_s, end_s = (base_us + min(spans)[0]) / 1e6, (base_us + max(end for _, end in spans)) / 1e6
            self._first_s = begin_s if self._last_s == 0 else min(self._first_s, begin_s)
            self._last_s = max(self._last_s, end_s)
        self._write(_events_of(trace, base_us, self._times.hosts.get(trace.rank, trace.host)))

    def _write(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            self._file.write(("\n" if self._is_empty else ",\n") + json.dumps(event, separators=(",", ":")))
            self._is_empty = False

    def _launcher(self) -> Iterator[dict[str, Any]]:
        yield _meta(0, 0, "process_name", name=_LAUNCHER)
        yield _meta(0, 0, "process_sort_index", sort_index=-1)
        for row, name in _ROWS.items():
            yield _meta(0, row, "thread_name", name=name)
        for event in self._times.events:
            if event.get("event") != CLOCK_EVENT and self._is_near(event["time"], event["time"]):
                yield self._instant(event)
        offset_s = self._times.offset_of(0)
        for record in RecordFollower(self._times.records).read():
            yield from self._recorded(record, offset_s)

    def _recorded(self, record: Mapping[str, Any], offset_s: float) -> Iterator[dict[str, Any]]:
        """Yields the span of a record of rank 0 that took its time."""
        match record:
            case {"event": str(event), "time": int() | float() as time_s, "seconds": int() | float() as seconds} if (
                event in (STEP_EVENT, CHECKPOINT_EVENT)
            ):
                name, row = ("step", _STEPS) if event == STEP_EVENT else ("checkpoint", _CHECKPOINTS)
                end_s = time_s + offset_s
                if self._is_near(end_s - seconds, end_s):
                    told = {"name": f"{name} {record.get('step', '')}", "cat": _LAUNCHER, "args": _args(record)}
                    yield {
                        "ph": "X",
                        "pid": 0,
                        "tid": row,
                        **told,
                        "ts": self._us(end_s - seconds),
                        "dur": seconds * 1e6,
                    }
            case {"event": str(event), "time": int() | float() as time_s} if event == MEMORY_COPY_EVENT:
                if self._is_near(time_s + offset_s, time_s + offset_s):
                    yield self._instant({**record, "time": time_s + offset_s})
            case _:
                pass

    def _instant(self, event: Mapping[str, Any]) -> dict[str, Any]:
        place = {"ph": "i", "s": "p", "pid": 0, "tid": _EVENTS, "ts": self._us(event["time"])}
        return {**place, "name": _name_of(event), "cat": _LAUNCHER, "args": _args(event)}

    def _is_near(self, begin_s: float, end_s: float) -> bool:
        base_s = self._times.begin_s
        is_near = self._first_s - _MARGIN_S <= end_s - base_s and begin_s - base_s <= self._last_s + _MARGIN_S
        self.left_out += not is_near
        return is_near

    def _us(self, time_s: float) -> float:
        return round((time_s - self._times.begin_s) * 1e6, 3)


def _events_of(trace: RankTrace, base_us: int, host: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a rank as the merged file has them: one process, threads numbered anew."""
    pid, rows = trace.rank + 1, _Rows()
    named: set[int] = set()
    yield _meta(pid, 0, "process_name", name=f"rank {trace.rank} ({host})" if host else f"rank {trace.rank}")
    yield _meta(pid, 0, "process_sort_index", sort_index=trace.rank)
    for event in trace.events:
        if event.get("pid") in _OWN_ROWS:
            continue
        if event["ph"] == "M":
            if event["name"] == "thread_name" and (row := rows.of(event)) not in named:
                named.add(row)
                yield _meta(pid, row, "thread_name", name=event["args"]["name"])
            continue
        moved = {**event, "pid": pid, "tid": rows.of(event), "ts": round(base_us + event["ts"], 3)}
        if "id" in event:
            moved["id"] = int(event["id"]) + trace.rank * _FLOWS_A_RANK
        yield moved


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "time")}


def _name_of(event: Mapping[str, Any]) -> str:
    match event:
        case {"event": "start", "attempt": int(attempt)}:
            return f"attempt {attempt + 1} starts"
        case {"event": "rank_started", "rank": rank}:
            return f"rank {rank} starts"
        case {"event": "rank_exit", "rank": rank, "status": status}:
            return f"rank {rank} ends with {status}"
        case {"event": "straggler", "rank": rank, "ratio": ratio}:
            return f"rank {rank} takes {ratio} times as long"
        case {"event": "note", "text": str(text)}:
            return text[:80]
        case _:
            return str(event.get("event", "event"))
