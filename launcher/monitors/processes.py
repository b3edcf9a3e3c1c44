"""Trackers beside a job: a process for each, started with it, started again if it dies, and ended with it in time.

All of it happens on one thread, so that a tracker costs the front end nothing; notes are fetched by whoever shows them.
What a tracker's package writes passes through here into its log, for a key that stands in it must not.
A process is the child of that thread, which lives until the last of them has ended: see `die_with_parent`.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from dsrun.contract.job_paths import JobPaths
from dsrun.contract.monitor_records import MONITORS_EVENT, MonitorSettings, read_monitors
from dsrun.contract.step_records import STEP_EVENT

from ..isolated_command import isolated_command
from ..jobs.record import APPEND
from ..masking import Masker
from ..process_modules import MONITOR
from ..records.follow import RecordFollower
from .checks import destination, lost_secrets, problems_of
from .main import END_WORD, Order
from .state import MonitorState, StateFile
from .trackers.registry import TRACKERS, TrackerKind

#: For trackers to take the last steps of a job, and to be closed.
PATIENCE_S = 10.0
#: Wait at the end of which nothing is said.
_SILENT_S = 1.5
#: Between two looks at processes and at records.
_LOOK_S = 0.5
#: Read at once, which is what a pipe holds, and of a line without an end.
_MOST_BYTES = 1 << 16
#: Waits before a process that died is started again; the last one repeats.
_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)


class _Pipe:
    """Lines that come from a process.

    Args:
        file: End of the pipe; it is closed by whoever has opened it.
        take: Function that takes whole lines, and what follows the last one at the end.
    """

    def __init__(self, file: IO[bytes], take: Callable[[list[str]], None]) -> None:
        self.descriptor = file.fileno()
        os.set_blocking(self.descriptor, False)
        self._take = take
        self._rest = b""
        self.has_ended = False

    def read(self) -> None:
        """Takes what is there, as much as a pipe holds; waits for nothing."""
        try:
            data = os.read(self.descriptor, _MOST_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._hand_on(lines)
        self.has_ended = not data
        if len(self._rest) > _MOST_BYTES:
            self.end_line()

    def end_line(self) -> None:
        """Takes what is there of a line for all of it."""
        rest, self._rest = self._rest, b""
        self._hand_on([rest] if rest else [])

    def _hand_on(self, lines: list[bytes]) -> None:
        if lines:
            self._take([line.decode(errors="replace") for line in lines])


@dataclass(slots=True, kw_only=True)
class _Monitor:
    settings: MonitorSettings
    kind: TrackerKind
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0
    died_at: int = -1
    start_at_s: float = 0.0
    done: bool = False
    environment: dict[str, str] = field(default_factory=dict[str, str])
    pipes: list[_Pipe] = field(default_factory=list["_Pipe"])


class MonitorProcesses:
    """The trackers of one job.

    Args:
        folder: Folder of the job.
        job_id: Id of the job.
        cwd: Working folder of the job.
        monitors: Trackers that the launch's config switches on; those of a program's config follow by its records.
        environ: Environment of the processes.
        trackers: Trackers there are; tests give made-up ones.
        patience_s: Seconds that they have at the end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str,
        cwd: str,
        monitors: Sequence[MonitorSettings],
        environ: Mapping[str, str],
        trackers: Mapping[str, TrackerKind] = TRACKERS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._job_id = job_id
        self._cwd = cwd
        self._environ = dict(environ)
        self._trackers = trackers
        self._patience_s = patience_s
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._monitors: dict[str, _Monitor] = {}
        self._follower: RecordFollower | None = RecordFollower(JobPaths(folder).records)
        self._wake_fd, self._waker_fd = os.pipe()
        for settings in monitors:
            self._add(settings)
        self._thread = threading.Thread(target=self._run, name="dsrun-monitors", daemon=True)
        self._thread.start()

    def notes(self) -> Iterator[str]:
        """Yields lines for the user that nobody has fetched yet."""
        with suppress(queue.Empty):
            while True:
                yield self._notes.get_nowait()

    def finish(self, note: Callable[[str], None] = lambda _text: None) -> None:
        """Lets the trackers take what is left of an ended job, for so long at most; then none of them runs any more.

        Args:
            note: Function that tells a line to the user, who should know what is waited for.
        """
        if self._waker_fd >= 0:
            os.close(self._waker_fd)
            self._waker_fd = -1
        # Killing what is left, and collecting it, takes a moment more.
        self._thread.join(_SILENT_S)
        if self._thread.is_alive():
            names = ", ".join(each.settings.name for each in self._monitors.values() if not each.done)
            note(f"waiting for {names or 'trackers'} to take the last steps, {self._patience_s:g} s at most")
            self._thread.join(self._patience_s + 5.0)

    def _add(self, settings: MonitorSettings) -> None:
        kind = self._trackers.get(settings.name)
        if kind is None or settings.name in self._monitors:
            return
        public = settings.without_secrets()
        environment = dict(self._environ)
        for key in public.left_out:
            if key in kind.secrets and key in settings.options:
                environment[kind.secrets[key]] = settings.options[key]
        self._monitors[settings.name] = _Monitor(settings=public, kind=kind, environment=environment)
        self._notes.put(f"monitor {settings.name}: {destination(public, self._cwd)}")
        try:
            StateFile(self._folder, public).begin()
        except OSError as error:
            self._notes.put(f"monitor {settings.name}: {error.filename}: {(error.strerror or str(error)).lower()}")

    # --- on the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        deadline_s: float | None = None
        while True:
            now_s = time.monotonic()
            if deadline_s is None:
                self._look_for_more()
            self._start_due(now_s, is_ending=deadline_s is not None)
            live = self._live()
            if deadline_s is not None and (not live or now_s >= deadline_s):
                break
            pipes = {pipe.descriptor: pipe for each, _ in live for pipe in each.pipes if not pipe.has_ended}
            for descriptor in pipes:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(self._pause_ms(deadline_s, now_s))
            for descriptor in pipes:
                poll.unregister(descriptor)
            for descriptor, _ in ready:
                if descriptor == self._wake_fd:
                    poll.unregister(self._wake_fd)
                    deadline_s = time.monotonic() + self._patience_s
                    self._look_for_more()
                    self._start_due(time.monotonic(), is_ending=True)
                    self._say_end()
                else:
                    pipes[descriptor].read()
            self._collect()
        self._end()
        os.close(self._wake_fd)

    def _pause_ms(self, deadline_s: float | None, now_s: float) -> float | None:
        if deadline_s is not None:
            return 1000 * max(0.0, min(_LOOK_S, deadline_s - now_s))
        return 1000 * _LOOK_S if self._monitors or self._follower is not None else None

    def _live(self) -> list[tuple[_Monitor, subprocess.Popen[bytes]]]:
        return [(each, each.process) for each in self._monitors.values() if each.process is not None]

    def _look_for_more(self) -> None:
        """Looks for the trackers of a program's config, which stand before the first step."""
        if self._follower is None:
            return
        with suppress(OSError, KeyError, TypeError):
            for record in self._follower.read():
                if record.get("event") == STEP_EVENT:
                    self._follower = None
                    return
                if record.get("event") == MONITORS_EVENT:
                    for settings in read_monitors(record):
                        self._add_of_program(settings)

    def _add_of_program(self, settings: MonitorSettings) -> None:
        """Starts a tracker that no file was checked for: what is wrong with it is told, and the run goes on."""
        kind = self._trackers.get(settings.name)
        if kind is None or settings.name in self._monitors:
            return
        problems = problems_of(settings, folder=self._cwd, trackers=self._trackers)
        problems += lost_secrets(settings, self._environ, self._trackers)
        if problems:
            for problem in problems:
                hint = "" if problem.hint is None else f" ({problem.hint})"
                self._notes.put(f"monitor {settings.name} is not started: {problem.message}{hint}")
            return
        self._add(settings)

    def _start_due(self, now_s: float, *, is_ending: bool) -> None:
        for each in self._monitors.values():
            if each.process is None and not each.done and now_s >= each.start_at_s:
                if is_ending and each.deaths:
                    each.done = True  # it dies again and again; the note says how to go on
                    continue
                self._start(each)

    def _start(self, monitor: _Monitor) -> None:
        order = Order(
            folder=str(self._folder),
            job_id=self._job_id,
            cwd=self._cwd,
            opener=monitor.kind.opener,
            again=monitor.kind.again,
            settings=monitor.settings.to_json(),
            parent_pid=os.getpid(),
        )
        try:
            process = subprocess.Popen(
                isolated_command(sys.executable, MONITOR),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=monitor.environment,
                start_new_session=True,
            )
        except OSError as error:
            self._died(monitor, f"cannot be started: {(error.strerror or str(error)).lower()}")
            return
        monitor.process = process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        assert process.stderr is not None, "it is a pipe"
        monitor.pipes = [
            _Pipe(process.stdout, partial(self._take_notes, monitor)),
            _Pipe(process.stderr, partial(self._take_log, monitor, Masker([monitor.environment]))),
        ]
        with suppress(OSError):
            process.stdin.write(order.to_line())
            process.stdin.flush()

    def _say_end(self) -> None:
        for _, process in self._live():
            assert process.stdin is not None, "it is a pipe"
            with suppress(OSError):
                process.stdin.write(END_WORD)
                process.stdin.flush()

    def _take_notes(self, monitor: _Monitor, lines: list[str]) -> None:
        for line in lines:
            self._notes.put(f"monitor {monitor.settings.name}: {line}")

    def _take_log(self, monitor: _Monitor, masker: Masker, lines: list[str]) -> None:
        text = "".join(f"{masker.text(line)}\n" for line in lines)
        # What a full disk costs here are a package's own words; what it costs the tracker is told by that.
        with suppress(OSError):
            descriptor = os.open(JobPaths(self._folder).monitor_log(monitor.settings.name), APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode(errors="replace"))

    def _collect(self) -> None:
        for each, process in self._live():
            status = process.poll()
            if status is None:
                continue
            _close(each, process)
            each.process = None
            if status == 0:
                each.done = True
            else:
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                self._died(
                    each, f"its process ended with {how}, see {JobPaths(self._folder).monitor_log(each.settings.name)}"
                )

    def _died(self, monitor: _Monitor, how: str) -> None:
        offset = StateFile(self._folder, monitor.settings).read().offset
        if offset != monitor.died_at:
            # It took something since it died last, so that this is another failure, which is told again.
            monitor.deaths, monitor.died_at = 0, offset
        pause_s = _AGAIN_S[min(monitor.deaths, len(_AGAIN_S) - 1)]
        monitor.deaths += 1
        monitor.start_at_s = time.monotonic() + pause_s
        if monitor.deaths == 1:
            self._notes.put(f"monitor {monitor.settings.name}: {how}; started again, training goes on")

    def _end(self) -> None:
        """Kills what has not ended in time, and tells which tracker does not have all."""
        for each, process in self._live():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _close(each, process)
        for each in self._monitors.values():
            state = StateFile(self._folder, each.settings).read()
            if not state.closed:
                self._notes.put(f"monitor {each.settings.name}: {self._behind(each, state)}")

    def _behind(self, monitor: _Monitor, state: MonitorState) -> str:
        has = "none of the steps" if state.step is None else f"the steps up to {state.step}"
        with suppress(OSError):
            if state.step is not None and state.offset == JobPaths(self._folder).records.stat().st_size:
                has = "all steps, and was not closed in time"
        return f"it has {has}; `dsrun export {self._job_id} --to {monitor.settings.name}` sends the rest"


def _close(monitor: _Monitor, process: subprocess.Popen[bytes]) -> None:
    """Takes the last words of a process that has ended, and closes its pipes."""
    for pipe in monitor.pipes:
        pipe.read()
        pipe.end_line()
    monitor.pipes = []
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            with suppress(OSError):
                file.close()
