"""Saves of this job that are still being written, and waiting for them before checkpoints are looked for.

[Note: saves of the job] `save_checkpoint` returns before its checkpoint is there and `latest` names it. Whoever of the
same job looks for checkpoints after that waits for its end, however it ends; who does not belong to the job does not. A
process that takes part in a save knows of it (`take_note`). Any other, such as one that the script has started, finds a
mark in the folder: a locked file that says whose it is. One that nobody has locked is of a process that was killed.
Object stores have no marks: there, processes that take part wait, and others do not.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from dsrun.contract.environment import JOB_ID_ENV
from dsrun.errors import CheckpointError
from dsrun.files.regular import open_regular, read_regular

from ..storage.places import Place

_BEGINNING = ".saving-"
#: How often a mark is looked at.
_LOOK_S = 0.02


class UnderWay(Protocol):
    """A save that this process takes part in."""

    @property
    def target(self) -> Place:
        """The tag's folder."""
        ...

    def wait(self, progress: Callable[[], None]) -> None:
        """Returns when it has ended, however it did; may be called from any thread but its own."""
        ...


#: Of this process; a save that is over is gone when nobody holds it.
_HERE: WeakSet[UnderWay] = WeakSet()


def take_note(save: UnderWay) -> None:
    """Has whoever looks for checkpoints in this process wait for a save."""
    _HERE.add(save)


class SavingMark:
    """Says to processes of the job that do not take part that a save is under way; to be made before others look.

    Args:
        target: the tag's folder.
        identity: identifier of the save.
        timeout_s: seconds after which nobody waits for the save any more.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, target: Path, identity: str, *, timeout_s: float) -> None:
        self._path = target.parent / f"{_BEGINNING}{identity}"
        _remove_left_behind(target.parent)
        told = {
            "tag": target.name,
            "job": os.environ.get(JOB_ID_ENV),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "timeout_s": timeout_s,
        }
        unlocked = self._path.with_name(f".new{self._path.name}")  # found by nobody before it is locked
        self._descriptor = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks: then it counts until it is removed
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.write(self._descriptor, json.dumps(told).encode())
            unlocked.rename(self._path)
        except BaseException:
            os.close(self._descriptor)
            unlocked.unlink(missing_ok=True)
            raise

    def release(self) -> None:
        """The save is over."""
        with suppress(OSError):  # the folder may be gone; and no lock means the same
            self._path.unlink()
        os.close(self._descriptor)


def wait_for_own_saves(place: Place, *, progress: Callable[[], None] = lambda: None) -> None:
    """Returns when no save of this job is under way in a folder; see [Note: saves of the job].

    Args:
        place: a folder of checkpoints, or one of them.
        progress: callback that runs while a save that this process takes part in makes progress towards the disk.

    Raises:
        CheckpointError: another process's has not ended in the time it was given.
    """
    for save in [save for save in _HERE if _is_meant(save.target, place)]:
        save.wait(progress)
    if not isinstance(place, Path):
        return
    for folder in (place, place.parent):
        for mark in sorted(folder.glob(f"{_BEGINNING}*")):
            told = _read(mark)
            if told is not None and _is_meant(folder / str(told.get("tag")), place) and _is_of_this_job(told):
                _wait(mark, told)


def _wait(mark: Path, told: dict[str, Any]) -> None:
    timeout_s = float(told.get("timeout_s", 0.0))
    deadline = time.monotonic() + timeout_s
    while not _is_over(mark):
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{mark.parent / str(told.get('tag'))}: process {told.get('pid')} on {told.get('host')} has been "
                f"writing it for more than {timeout_s:.0f} s",
                hint="see that process; `checkpoint.timeout` says how long a save may take",
            )
        time.sleep(_LOOK_S)


def _is_meant(target: Place, place: Place) -> bool:
    """Whether a place is a tag's folder, or the one that it lies in."""
    if isinstance(target, Path) and isinstance(place, Path):
        return os.path.realpath(place) in (os.path.realpath(target), os.path.realpath(target.parent))
    return place in (target, target.parent)


def _is_of_this_job(told: dict[str, Any]) -> bool:
    """Whether a mark was made by a rank of this process's job, or by a process that has started this one."""
    job = os.environ.get(JOB_ID_ENV)
    if job and told.get("job") == job:
        return True
    if told.get("host") != socket.gethostname():
        return False
    if told.get("pid") == os.getpid():
        return True
    import psutil

    return any(parent.pid == told.get("pid") for parent in psutil.Process().parents())


def _read(mark: Path) -> dict[str, Any] | None:
    try:
        told: Any = json.loads(read_regular(mark))
    except (OSError, ValueError):  # gone meanwhile, or no mark of ours
        return None
    return told if isinstance(told, dict) else None


def _is_over(mark: Path) -> bool:
    """Whether a mark is gone, or whoever has made it is."""
    try:
        descriptor = open_regular(mark)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_left_behind(folder: Path) -> None:
    """Removes marks of processes that were killed."""
    for mark in folder.glob(f"{_BEGINNING}*"):
        if _is_over(mark):
            with suppress(OSError):  # not ours to remove
                mark.unlink()
