"""The output of a job, running or over, read back from its folder: lines of all ranks in order of arrival.

Reads what `JobOutput` wrote and nothing else; prints nothing and waits for nothing by itself. Memory does not grow with
the logs: the index is read in pieces, and of each rank at most one unfinished line is held.

[Note: what the index lacks] See [Note: index]. Bytes in a gap come with the record after it. Those behind the last
record come at the end, rank by rank, with the time of their file: nothing that was written is left out.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.contract.job_paths import JobPaths, rank_of_log

from .lines import LineAssembler
from .output_index import IndexReader, IndexRecord, LogStream
from .parts import LogParts

#: Most bytes read at once.
_PIECE_BYTES = 1 << 18


class LogLine(NamedTuple):
    """One line.

    Attributes:
        time_s: time when the end of the line arrived, seconds since the epoch.
        rank: rank that wrote the line; None for a note of dsrun.
        stream: stream to which the line was written; `dsrun` for what dsrun itself added to a rank's log, and for
            notes.
        text: text of the line without its line end; bytes that are no UTF-8 are surrogate escapes.
    """

    time_s: float
    rank: int | None
    stream: LogStream
    text: str


class LogLines(NamedTuple):
    """Lines of one rank that arrived together; the fields are those of `LogLine`."""

    time_s: float
    rank: int | None
    stream: LogStream
    texts: list[str]


def read_log(
    folder: Path,
    *,
    ranks: frozenset[int] | None = None,
    since_s: float | None = None,
    grep: re.Pattern[str] | None = None,
    follow: Callable[[], bool] | None = None,
) -> Iterator[LogLine]:
    """Yields a job's lines one by one; `read_lines` is the same in bunches, and several times as fast to print.

    Args:
        folder: the job's.
        ranks: ranks to read the lines of; None for all. Notes of dsrun come in both cases.
        since_s: only what arrived then or later, seconds since the epoch.
        grep: only lines in which this is found.
        follow: function called when all present lines are yielded: it may wait, and returns whether more may come.
            After False the last new lines are read, and reading ends; None means not to wait.
    """
    for time_s, rank, stream, texts in read_lines(folder, ranks=ranks, since_s=since_s, grep=grep, follow=follow):
        for text in texts:
            yield LogLine(time_s, rank, stream, text)


def read_lines(
    folder: Path,
    *,
    ranks: frozenset[int] | None = None,
    since_s: float | None = None,
    grep: re.Pattern[str] | None = None,
    follow: Callable[[], bool] | None = None,
) -> Iterator[LogLines]:
    """Yields a job's lines in bunches. See `read_log`."""
    parts = LogParts(folder)
    try:
        for lines in _Merge(folder, parts, ranks=ranks, since_s=since_s).run(follow):
            texts = lines.texts if grep is None else [text for text in lines.texts if grep.search(text)]
            if texts:
                yield lines._replace(texts=texts)
    finally:
        parts.close()


class _Merge:
    """Joins index, logs and events."""

    def __init__(self, folder: Path, parts: LogParts, *, ranks: frozenset[int] | None, since_s: float | None) -> None:
        self._folder = folder
        self._parts = parts
        self._ranks = ranks
        self._since_s = float("-inf") if since_s is None else since_s
        self._index = IndexReader(folder)
        self._notes = _Notes(JobPaths(folder).events)
        self._read_bytes: dict[int, int] = {}
        self._assemblers: dict[tuple[int, LogStream], LineAssembler] = {}
        # The last record of each stream before `since`: a line may begin in it.
        self._before: dict[tuple[int, LogStream], IndexRecord] = {}

    def run(self, follow: Callable[[], bool] | None) -> Generator[LogLines, None, None]:
        yield from self._present()
        goes_on = follow is not None
        while follow is not None and goes_on:
            # What came while it waited is read after its last word, so that nothing falls between.
            goes_on = follow()
            yield from self._present()
        yield from self._behind_the_index()
        for (rank, stream), assembler in self._assemblers.items():
            if texts := assembler.finish():
                yield LogLines(self._parts.last_write_s(rank), rank, stream, texts)

    def _present(self) -> Generator[LogLines, None, None]:
        yield from self._indexed()
        yield from self._noted(float("inf"))

    def _indexed(self) -> Generator[LogLines, None, None]:
        ranks, since_s = self._ranks, self._since_s
        for record in self._index.read():
            if ranks is not None and record.rank not in ranks:
                continue
            if record.time_s < since_s:
                self._before[record.rank, record.stream] = record
                self._read_bytes[record.rank] = record.offset + record.length
                continue
            yield from self._noted(record.time_s)
            if self._before:
                self._begin_in(self._before.pop((record.rank, record.stream), None))
            yield from self._lines_of(record)

    def _lines_of(self, record: IndexRecord) -> Generator[LogLines, None, None]:
        time_s, rank, stream, offset, length = record
        end = offset + length
        at = min(self._read_bytes.get(rank, 0), offset)
        if stream == "dsrun":
            # Another attempt, or the end: what the rank left unfinished stays so.
            yield from self._finish(rank, time_s)
        while at < end:
            data = self._parts.read(rank, at, min(end - at, _PIECE_BYTES))
            if not data:
                break
            at += len(data)
            texts = self._assembler(rank, stream).feed(data, now_s=time_s)
            if texts:
                yield LogLines(time_s, rank, stream, texts if stream != "dsrun" else [text for text in texts if text])
        self._read_bytes[rank] = end

    def _begin_in(self, record: IndexRecord | None) -> None:
        """Takes what a line of later may have begun with; the lines before it are not asked for."""
        if record is not None and record.stream != "dsrun":
            data = self._parts.read(record.rank, record.offset, record.length)
            self._assembler(record.rank, record.stream).feed(data, now_s=record.time_s)

    def _finish(self, rank: int, time_s: float) -> Generator[LogLines, None, None]:
        for stream in ("stdout", "stderr"):
            assembler = self._assemblers.get((rank, stream))
            if assembler is not None and (texts := assembler.finish()):
                yield LogLines(time_s, rank, stream, texts)

    def _behind_the_index(self) -> Generator[LogLines, None, None]:
        """See [Note: what the index lacks]."""
        for rank in _ranks_in(self._folder):
            if self._ranks is not None and rank not in self._ranks:
                continue
            time_s = self._parts.last_write_s(rank)
            if time_s < self._since_s:
                continue
            at = self._read_bytes.get(rank, 0)
            while data := self._parts.read(rank, at, _PIECE_BYTES):
                at += len(data)
                if texts := self._assembler(rank, "stdout").feed(data, now_s=time_s):
                    yield LogLines(time_s, rank, "stdout", texts)

    def _noted(self, until_s: float) -> Generator[LogLines, None, None]:
        for time_s, text in self._notes.until(until_s):
            if time_s >= self._since_s:
                yield LogLines(time_s, None, "dsrun", [text])

    def _assembler(self, rank: int, stream: LogStream) -> LineAssembler:
        assembler = self._assemblers.get((rank, stream))
        if assembler is None:
            assembler = self._assemblers[rank, stream] = LineAssembler()
        return assembler


class _Notes:
    """dsrun's own lines in the event file, which is in order of time; a torn last line waits for its rest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""
        self._ready: deque[tuple[float, str]] = deque()

    def until(self, time_s: float) -> Iterator[tuple[float, str]]:
        """Yields the notes up to a moment that were not yielded before."""
        while (self._ready or self._read_on()) and self._ready[0][0] <= time_s:
            yield self._ready.popleft()

    def _read_on(self) -> bool:
        """Reads up to the next notes; returns whether there are any."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            file.seek(self._position)
            while not self._ready and (data := file.read(_PIECE_BYTES)):
                self._position += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._ready.extend(note for line in lines if (note := _note_of(line)) is not None)
        return bool(self._ready)


def _note_of(line: bytes) -> tuple[float, str] | None:
    if b'"note"' not in line:
        return None
    try:
        event: Any = json.loads(line)
        return (float(event["time"]), str(event["text"])) if event["event"] == "note" else None
    except (ValueError, KeyError, TypeError):
        # A line torn by a full disk; the events around it are whole.
        return None


def _ranks_in(folder: Path) -> list[int]:
    return sorted(rank for path in folder.iterdir() if (rank := rank_of_log(path.name)) is not None)
