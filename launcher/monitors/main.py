"""The process of one tracker: reads what to do from stdin, follows the job's records, and tells the front end in lines.

Started by `processes.py`, and dies with it whatever the tracker's package does: the kernel sees to that. What the
package writes to stdout and stderr goes to stderr, from where `processes.py` takes it to a log in the job's folder.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsrun.contract.monitor_records import MonitorSettings

from ..masking import Masker
from ..processes import die_with_parent, outlive_user_signals, wake_up
from .feed import Feed, Opener, Word, follow
from .trackers.tracker import TrackedRun

#: Said on stdin once the job has ended.
END_WORD = b"end\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one process has to do; secrets come in its environment.

    Attributes:
        folder: Folder of the job.
        job_id: Id of the job.
        cwd: Working folder of the job, from which relative names of files count.
        opener: Function that opens the tracker, as `module:name`.
        again: Words for what the tracker does with steps that are taken again; None where nothing is to be told.
        settings: Settings of the tracker, as `MonitorSettings.to_json` gives them.
        parent_pid: Pid of the front end.
    """

    folder: str
    job_id: str
    cwd: str
    opener: str
    again: str | None
    settings: dict[str, Any]
    parent_pid: int

    def to_line(self) -> bytes:
        """Returns the order as the process reads it."""
        return f"{json.dumps(asdict(self))}\n".encode()


def main() -> None:
    """Entry of the process."""
    # Of a terminal's Ctrl-C the front end takes care: a tracker gets the last steps of a job that was stopped, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler sends these to every process of a job; the front end answers, and ends this process when it is time.
    outlive_user_signals()
    signal.signal(signal.SIGTERM, wake_up)
    order = Order(**json.loads(_first_line(0)))
    die_with_parent(order.parent_pid, signal.SIGKILL)
    settings = MonitorSettings.from_json(order.settings)
    words_fd, notes_fd = _own_descriptors()
    masker = Masker([os.environ])
    note = _Notes(notes_fd, masker)
    if os.path.isdir(order.cwd):
        os.chdir(order.cwd)
    run = TrackedRun(job_id=order.job_id, folder=order.cwd, options=settings.options)
    feed = Feed(Path(order.folder), settings, run, _lazily(order.opener), masker=masker)
    follow(feed, _wait_of(words_fd), note, on_again=order.again)
    # What a package has left running at its end, threads above all, must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def opener_of(name: str) -> Opener:
    """Returns the function that opens a tracker.

    Args:
        name: Its name as `module:name`.
    """
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _lazily(name: str) -> Opener:
    return lambda run: opener_of(name)(run)


class _Notes:
    """Tells lines to the front end, without secrets.

    Args:
        descriptor: End of a pipe to the front end.
        masker: Masker that knows the secrets of this environment.
    """

    def __init__(self, descriptor: int, masker: Masker) -> None:
        self._descriptor = descriptor
        self._masker = masker

    def __call__(self, text: str) -> None:
        os.write(self._descriptor, f"{self._masker.text(' '.join(text.split()))}\n".encode(errors="replace"))


def _first_line(descriptor: int) -> bytes:
    """Reads a line and not a byte more: the rest is for `select`."""
    line = bytearray()
    while byte := os.read(descriptor, 1):
        line += byte
        if byte == b"\n":
            break
    return bytes(line)


def _own_descriptors() -> tuple[int, int]:
    """Moves stdin and stdout out of the way of the tracker's package; returns their new descriptors."""
    words_fd, notes_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return words_fd, notes_fd


def _wait_of(descriptor: int) -> Callable[[float], Word]:
    """Returns what waits for a word of the front end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    def wait(timeout_s: float) -> Word:
        if not poll.poll(timeout_s * 1000):
            return Word.NONE
        return Word.ENDED if os.read(descriptor, len(END_WORD)) else Word.GONE

    return wait
