"""Traces of whole optimizer steps by torch's profiler (`--profile`), a file a rank. Merges none: the launcher does.

[Note: window] Steps A to B are traced from the end of step A - 1 to the end of step B, and nothing is left behind
outside of that: a step costs a comparison there. The trace begins and ends between two steps, where the engine has
nothing under way. It is written in place, before the next step; the other ranks wait for that in their next collective.

[Note: no trace] What goes wrong with a trace is said in one line and ends the trace, never the run.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from dsrun.contract.environment import PROFILE_ENV, RUN_DIR_ENV
from dsrun.contract.job_paths import JobPaths
from dsrun.contract.profile_request import ProfileRequest, profile_request

from ..compat import start_profiler, stop_profiler
from ..mesh.wait_times import Heartbeat
from ..trace_labels import OpenLabel

#: What Kineto writes last; a file without it is not whole.
_LAST_KEY = b'"traceName"'
_TAIL_BYTES = 8192


class Waits(Protocol):
    """Who tells a heartbeat of each wait; `WaitTimes` is one."""

    heartbeat: Heartbeat


class LabelledWaits:
    """A heartbeat that shows each wait to the profiler as well.

    Args:
        heartbeat: heartbeat that is told as before.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._label: OpenLabel | None = None

    def enter(self, collective: str) -> None:
        """See `Heartbeat`."""
        self.end()
        self._label = OpenLabel(f"wait {collective}")
        self.heartbeat.enter(collective)

    def leave(self, waited_s: float) -> None:
        """See `Heartbeat`."""
        self.heartbeat.leave(waited_s)
        self.end()

    def tell_longest_wait(self, collective: str, waited_s: float, step_s: float) -> None:
        """See `Heartbeat`."""
        self.heartbeat.tell_longest_wait(collective, waited_s, step_s)

    def tell_stage_wait(self, waited_s: float) -> None:
        """See `Heartbeat`."""
        self.heartbeat.tell_stage_wait(waited_s)

    def end(self) -> None:
        """Ends the wait that is shown; after an error it is one that nobody has left."""
        label, self._label = self._label, None
        if label is not None:
            label.end()


class StepTrace:
    """Traces the steps of a request on one rank, see [Note: window].

    Args:
        request: steps to trace.
        rank: rank of this process.
        folder: folder of the job's files on this host.
        device: device that the model is on.
        waits: waits of this rank, which are shown in the trace.
    """

    def __init__(self, request: ProfileRequest, *, rank: int, folder: Path, device: torch.device, waits: Waits) -> None:
        self._request: ProfileRequest | None = request
        self._rank = rank
        self._paths = JobPaths(folder)
        self._device = device
        self._waits = waits
        self._profiler: Any = None
        self._label: OpenLabel | None = None
        self._steps: list[int] = []
        # A script that forks takes a copy of this object along, whose trace is not its own.
        self._process = os.getpid()
        self._follow(request, 0)

    def end_step(self, step: int) -> None:
        """An optimizer step is over.

        Args:
            step: number of the step, counted from 1.
        """
        request = self._request
        if request is None:
            return
        if self._profiler is None:
            self._follow(request, step)
            return
        self._end_label()
        self._steps.append(step)
        if step >= request.last:
            self.close()
        else:
            self._label = OpenLabel(f"step {step + 1}")

    def close(self) -> None:
        """Ends the trace, if one is under way, and writes its whole steps."""
        request, self._request = self._request, None
        profiler, self._profiler = self._profiler, None
        if request is None or profiler is None or self._process != os.getpid():
            return
        self._end_label()
        if isinstance(self._waits.heartbeat, LabelledWaits):
            self._waits.heartbeat.end()
            self._waits.heartbeat = self._waits.heartbeat.heartbeat
        try:
            about = {"rank": self._rank, "host": socket.gethostname(), "steps": self._steps}
            stop_profiler(profiler, about=json.dumps(about))
            if self._steps:
                _write(profiler, self._paths, self._rank)
        except (OSError, RuntimeError) as error:
            self._say(f"the trace of {request.steps_text} was not written: {_reason(error)}")

    def _follow(self, request: ProfileRequest, done: int) -> None:
        """Begins the trace if the next step belongs to it, also where a checkpoint has led into its middle."""
        if done >= request.last:
            self._request = None
        elif done >= request.first - 1:
            self._start(request, done + 1)

    def _start(self, request: ProfileRequest, step: int) -> None:
        try:
            self._profiler = start_profiler(
                device=self._device,
                memory=request.memory,
                stacks=request.stacks,
                shapes=request.shapes,
            )
        except RuntimeError as error:
            self._request = None
            self._say(f"{request.steps_text} cannot be traced: {error}")
            return
        self._waits.heartbeat = LabelledWaits(self._waits.heartbeat)
        self._label = OpenLabel(f"step {step}")

    def _end_label(self) -> None:
        label, self._label = self._label, None
        if label is not None:
            label.end()

    def _say(self, text: str) -> None:
        print(f"dsrun: --profile: rank {self._rank}: {text}; the run goes on", flush=True)


def wanted_trace(
    *, rank: int, device: torch.device, waits: Waits, environ: MutableMapping[str, str] | None = None
) -> StepTrace | None:
    """Returns the trace that `--profile` asks this rank for; says so where torch cannot make one.

    Takes the request out of the environment: one engine answers it, and no process that the script starts.

    Args:
        rank: rank of this process.
        device: device that the model is on.
        waits: waits of this rank.
        environ: variables; those of this process by default.
    """
    env = os.environ if environ is None else environ
    request, folder = profile_request(env), env.get(RUN_DIR_ENV)
    env.pop(PROFILE_ENV, None)
    if request is None or not folder or not request.has(rank):
        return None
    if not torch.profiler.kineto_available():
        print(f"dsrun: --profile: rank {rank}: this torch was built without Kineto; nothing is traced", flush=True)
        return None
    return StepTrace(request, rank=rank, folder=Path(folder), device=device, waits=waits)


def _write(profiler: Any, paths: JobPaths, rank: int) -> None:
    """Writes a trace that is there under its name once it is whole.

    Raises:
        OSError: there is no place for it.
        RuntimeError: torch has no trace to write.
    """
    plain, packed = paths.trace_drafts(rank)
    try:
        profiler.export_chrome_trace(os.fspath(plain))
        _check_whole(plain)
        with (
            plain.open("rb") as source,
            _private(packed) as sealed,
            gzip.GzipFile(packed.name, "wb", compresslevel=1, fileobj=sealed) as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
        os.replace(packed, paths.trace(rank))
    finally:
        for draft in (plain, packed):
            draft.unlink(missing_ok=True)


def _private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _check_whole(path: Path) -> None:
    """Kineto writes as much as there is room for, and says nothing.

    Raises:
        OSError: the file is missing or was cut.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = file.read().rstrip()
    if not tail.endswith(b"}") or _LAST_KEY not in tail:
        free = shutil.disk_usage(path.parent).free >> 20
        raise OSError(f"torch has written a part of it only; {path.parent} has {free} MiB of room")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror.lower()}: {error.filename}" if error.filename else error.strerror.lower()
    return str(error)
