"""Jobs that save into one folder of checkpoints: who they are, and what each of them that lives has saved there.

[Note: jobs of a folder] A job that saves has a mark in the folder, `.job-<id>`: who it is, then each tag that it has
begun to save, a line each. It is locked as long as the job's first rank lives, however that ends, so a mark that nobody
has locked is of a job that is over. On a file system without locks, and in an object store, there are no marks, and
each job is on its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular

from ..storage.calls import is_locked_elsewhere

_BEGINNING = ".job-"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FolderJob:
    """A job that lives and saves into a folder.

    Attributes:
        name: its id, or of a script without a launcher its process and host.
        process: process of the job's first rank, in words for messages.
        tags: names of the tags that the job has begun to save.
        mark: the file that says so.
    """

    name: str
    process: str
    tags: frozenset[str]
    mark: Path

    def __str__(self) -> str:
        return self.name if self.name == self.process else f"job {self.name} ({self.process})"


def own_name() -> str:
    """Returns the name of the job that this process, a rank, belongs to."""
    return os.environ.get(JOB_ID_ENV) or _process()


def other_jobs(folder: Path, name: str | None) -> list[FolderJob]:
    """Returns the jobs besides one that live and save into a folder; removes the marks of those that are over.

    Args:
        folder: folder of checkpoints.
        name: name of the job to leave out of the result; None to leave out no job.
    """
    found: list[FolderJob] = []
    for mark in sorted(folder.glob(f"{_BEGINNING}*")):
        try:
            descriptor = open_regular(mark, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # over meanwhile, or no mark
            continue
        try:
            is_locked = is_locked_elsewhere(descriptor, shared=True)
            if is_locked is None:
                continue
            if not is_locked:
                with suppress(OSError):  # not ours to remove
                    mark.unlink()
            elif (job := _parsed(os.pread(descriptor, _MOST_BYTES, 0), mark)) is not None and job.name != name:
                found.append(job)
        finally:
            os.close(descriptor)
    return found


class JobMarks:
    """This job's marks, in each folder that it saves into."""

    def __init__(self) -> None:
        self._name = own_name()
        self._marks: dict[Path, tuple[Path, int]] = {}
        self._tags: set[Path] = set()
        self._seen: set[tuple[Path, str]] = set()
        let_go = WeakMethod(self._let_go)
        os.register_at_fork(after_in_child=lambda: (found := let_go()) and found())

    def claim(self, folder: Path, tag: str, identity: str) -> Sequence[str]:
        """Has other jobs know that this one saves a tag from now on; returns what is to be said of them.

        Args:
            folder: folder that contains the tag.
            tag: name of it.
            identity: identifier for the name of a new mark; nobody else uses it.

        Raises:
            CheckpointError: another job that lives has saved the tag.
            OSError: there can be no mark.
        """
        said: list[str] = []
        for job in other_jobs(folder, self._name):
            if tag in job.tags:
                raise CheckpointError(
                    f"{folder / tag}: {job} saves it too, and has not ended; this is {self._name}",
                    hint="give each job a folder or tags of its own, or end the other one first; "
                    f"if its host has crashed, remove {job.mark}",
                )
            if (folder, job.name) not in self._seen:
                self._seen.add((folder, job.name))
                said.append(
                    f"{folder}: {job} saves into it as well, beside this one, {self._name}: `latest` names whichever "
                    "saved last, and `keep_last` takes away the own checkpoints alone"
                )
        if folder / tag not in self._tags:
            self._add(folder, tag, identity)
            self._tags.add(folder / tag)
        return said

    def release(self) -> None:
        """This job is over, or saves no more."""
        marks, self._marks = self._marks, {}
        for path, descriptor in marks.values():
            with suppress(OSError):  # the folder may be gone; and no lock means the same
                path.unlink()
            os.close(descriptor)

    def _let_go(self) -> None:
        """In a process that was forked the marks are its parent's, and locked as long as any process has them open."""
        for _, descriptor in self._marks.values():
            os.close(descriptor)
        self._marks, self._tags = {}, set()

    def _add(self, folder: Path, tag: str, identity: str) -> None:
        if folder not in self._marks:
            made = _make(folder / f"{_BEGINNING}{identity}", self._name)
            if made is None:
                return
            self._marks[folder] = made
        os.write(self._marks[folder][1], f"{tag}\n".encode())


def _make(path: Path, name: str) -> tuple[Path, int] | None:
    """Makes a mark, which is found by nobody before it is locked; None where there are no locks."""
    unlocked = path.with_name(f".new{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(unlocked, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        unlocked.unlink(missing_ok=True)
        return None
    try:
        os.write(descriptor, json.dumps({"job": name, "process": _process()}).encode() + b"\n")
        unlocked.rename(path)
    except BaseException:
        os.close(descriptor)
        unlocked.unlink(missing_ok=True)
        raise
    return path, descriptor


def _parsed(content: bytes, mark: Path) -> FolderJob | None:
    head, *lines = content.decode("utf-8", "replace").split("\n")
    try:
        told: Any = json.loads(head)
        return FolderJob(str(told["job"]), str(told["process"]), frozenset(lines[:-1]), mark)
    except (ValueError, KeyError, TypeError):  # no mark of ours
        return None


def _process() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"
