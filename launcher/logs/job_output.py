"""All output of one job on the front end: complete logs and their index, whole lines to the console, events to a file.

Lives as long as the job, over restarts too. Knows nothing of processes and decides nothing. What dsrun itself says
and records passes through a mask for secrets; what ranks write does not.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError

from ..jobs.live_status import LiveStatus
from ..jobs.record import APPEND, event_line
from ..masking import masker_of
from ..plan.launch_plan import LaunchPlan
from ..protocol import Output, RankStack, RankStatus, RankTraceBytes, Reading
from .files import PART_BYTES, LogFiles
from .output_index import IndexWriter
from .rank_output import BarDisplay, Console, JobLog, RankOutput

#: For how long a line that a program has begun must stand to be shown as it is, in seconds.
_PROMPT_S = 0.1


class Display(BarDisplay, Protocol):
    """What of a console moves: bars, progress, lines that are held for a moment."""

    @property
    def shows_bars(self) -> bool:
        """Whether it wants bars as they run."""
        ...

    def tick(self, now_s: float) -> float | None:
        """Does what is due by the monotonic clock; returns when it wants to be called next, if at all."""
        ...

    def close(self) -> None:
        """Shows what is held, and takes away what moves."""
        ...


class JobOutput:
    """Implements the session's `Sink`.

    Args:
        plan: the job; its run_dir must exist.
        console: console that shows lines and notes.
        display: the moving part of the console, mostly the same object; without it, or where it shows no bars, these
            become a line now and then.
        environ: environment with secrets to mask, besides those of the plan.
        part_bytes: a log that is larger is continued in another file.
        why_no_stdin: function that says for a rank why its stdin is empty, and what gives it another.

    Raises:
        LaunchError: a file cannot be made.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        *,
        display: Display | None = None,
        environ: Mapping[str, str] = os.environ,
        part_bytes: int = PART_BYTES,
        why_no_stdin: Callable[[int], str] = lambda rank: "no rank was given dsrun's own",
    ) -> None:
        folder = Path(plan.run_dir)
        self._console = console
        self._display = display
        self._masker = masker_of(plan, environ)
        self._files = LogFiles(folder, len(plan.ranks), first_rank=plan.ranks.start, part_bytes=part_bytes)
        self._log = JobLog(self._files, IndexWriter(folder), warn=self._warn)
        bars = display if display is not None and display.shows_bars else None
        self._ranks = {rank: RankOutput(rank, self._log, console, bars=bars) for rank in plan.ranks}
        self._live = LiveStatus(folder, plan.rank_hosts, clock=time.time)
        self._paths = JobPaths(folder)
        self._keeps_records = True
        self._why_no_stdin = why_no_stdin
        self._has_told_of_stdin = False
        # A program that is no Python does not tell when it waits: what stays for a moment is taken for a prompt.
        self._silent_reader = plan.stdin_rank if plan.program.kind == "command" else None
        self._prompt_due_s: float | None = None
        path = self._paths.events
        try:
            self._events_fd: int | None = os.open(path, APPEND, 0o600)
        except OSError as error:
            raise LaunchError(f"event file {path}: cannot be made: {error.strerror}") from error

    def take(self, frame: Output) -> None:
        """See `Sink`."""
        self._ranks[frame.rank].take(frame)
        if frame.rank == self._silent_reader:
            self._prompt_due_s = time.monotonic() + _PROMPT_S

    def reading(self, told: Reading) -> None:
        """See `Sink`."""
        rank = self._ranks[told.rank]
        match told.state:
            case "waits" | "waits_for_pipe":
                rank.show_begun()
            case "typed" | "goes_on":
                rank.go_on(typed=told.state == "typed")
            case "has_none":
                # All ranks run the same script: once is enough.
                if not self._has_told_of_stdin:
                    self._has_told_of_stdin = True
                    self.note(f"rank {told.rank} reads stdin, which is empty: {self._why_no_stdin(told.rank)}")

    def ended(self, rank: int, last_word: str | None) -> None:
        """See `Sink`."""
        self._ranks[rank].finish(last_word=last_word)
        self._live.ended(rank)

    def tail(self, rank: int) -> tuple[str, ...]:
        """See `Sink`."""
        return self._ranks[rank].tail

    def log(self, rank: int) -> str:
        """See `Sink`."""
        return os.fspath(self._files.path(rank))

    def note(self, text: str) -> None:
        """Shows and records a line. See `Sink`."""
        shown = self._masker.text(text)
        self._console.note(shown)
        self._record("note", {"text": shown})

    def event(self, name: str, **fields: Any) -> None:
        """Appends a line to the event file. See `Sink`."""
        match name, fields:
            case "start", {"attempt": int(attempt)} if attempt > 0:
                self._begin_attempt(attempt)
            case "rank_started", {"rank": int(rank), "pid": int(pid)}:
                self._live.started(rank, pid)
            case "rank_exit", {"rank": int(rank)}:
                self._live.ended(rank)
                self._ranks[rank].exited()
            case _:
                pass
        self._record(name, self._masker.value(fields))

    def pulse(self, ranks: Sequence[RankStatus]) -> None:
        """See `Sink`."""
        self._live.pulse(ranks)

    def records(self, text: str) -> None:
        """See `Sink`."""
        if self._keeps_records:
            self._keeps_records = self._append(self._paths.records, text)

    def rank_trace(self, piece: RankTraceBytes) -> None:
        """See `Sink`; the file has its name once it is whole."""
        _, draft = self._paths.trace_drafts(piece.rank)
        try:
            if piece.offset == 0:
                draft.unlink(missing_ok=True)
            elif not draft.exists() or draft.stat().st_size != piece.offset:
                return  # of a file whose beginning could not be written, as was said
            with open(os.open(draft, APPEND, 0o600), "wb") as file:
                file.write(base64.b64decode(piece.data))
            if piece.is_last:
                os.replace(draft, self._paths.trace(piece.rank))
        except OSError as error:
            self._warn(f"the profile of rank {piece.rank} is not kept: {error.strerror}")
            draft.unlink(missing_ok=True)

    def stacks(self, ranks: Sequence[RankStack]) -> None:
        """See `Sink`."""
        for rank in ranks:
            if rank.text and not self._append(self._paths.stacks(rank.rank), rank.text):
                return

    def _append(self, path: Path, text: str) -> bool:
        """Appends what came from a host apart to a file of the job; returns whether that went well."""
        try:
            descriptor = os.open(path, APPEND, 0o600)
            try:
                data = text.encode("utf-8", "surrogateescape")
                while data:
                    data = data[os.write(descriptor, data) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn(f"{path.name} is incomplete from here on: {error.strerror}")
            return False
        return True

    def tick(self, now_s: float) -> float | None:
        """See `Sink`."""
        if self._prompt_due_s is not None and now_s >= self._prompt_due_s and self._silent_reader is not None:
            self._prompt_due_s = None
            self._ranks[self._silent_reader].show_begun()
        wanted = [
            self._prompt_due_s,
            self._live.tick(now_s),
            None if self._display is None else self._display.tick(now_s),
        ]
        return min((time_s for time_s in wanted if time_s is not None), default=None)

    def close(self) -> None:
        """Ends all files and what moves on the console; notes that come later are shown and not recorded."""
        if self._display is not None:
            self._display.close()
        self._log.close()
        self._live.write()
        self._close_events()

    def _begin_attempt(self, attempt: int) -> None:
        heading = f"--- dsrun: attempt {attempt + 1} starts {time.strftime('%Y-%m-%d %H:%M:%S')} ---"
        for rank in self._ranks.values():
            rank.begin(heading)

    def _record(self, name: str, fields: Mapping[str, Any]) -> None:
        if self._events_fd is None:
            return
        try:
            os.write(self._events_fd, event_line(name, fields))
        except OSError as error:
            self._close_events()
            self._warn(f"{self._paths.events.name} is incomplete from here on: {error.strerror}")

    def _warn(self, text: str) -> None:
        self._console.note(text)

    def _close_events(self) -> None:
        if self._events_fd is not None:
            os.close(self._events_fd)
            self._events_fd = None
