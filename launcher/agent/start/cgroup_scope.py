"""A control group of its own for the job's processes on this host, where the user may make one (cgroup v2). Optional.

What is found by parentage and ended by signals (`processes`) can lose a race against a program that forks all the
time; `cgroup.kill` cannot. Knows nothing of ranks. Sets no limit: those of the group above hold as before.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ...machine.cgroup import levels, parse_cgroup_mounts, parse_self_cgroup

#: For killed processes to leave the group, without which it cannot be removed.
_REMOVE_PATIENCE_S = 10.0
#: A group that is empty for longer waits for no process any more: its job moves the spawner into it at once.
_EMPTY_S = 60.0


class Scope:
    """A group below the one that this process is in.

    Args:
        folder: folder of the control group; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int) -> bool:
        """Moves a process into the group, and with it whatever it starts from now on; returns whether it could be."""
        return _write(self.folder / "cgroup.procs", str(pid))

    def kill(self) -> None:
        """Kills everything in the group at once, processes that are being forked included."""
        _write(self.folder / "cgroup.kill", "1")

    def remove(self) -> bool:
        """Removes the group and ends what is still in it, which nobody found; returns whether it is gone."""
        deadline_s = time.monotonic() + _REMOVE_PATIENCE_S
        while not _clear(self.folder):
            if time.monotonic() > deadline_s:
                return False
            self.kill()
            # The last member leaves when it is reaped; the kernel tells that by no event one could wait for cheaply.
            time.sleep(0.01)
        return True

    def leave(self) -> None:
        """Moves the calling process to the group above, so that this one can be removed."""
        _write(self.folder.parent / "cgroup.procs", str(os.getpid()))


def scope_name(job_id: str, node_rank: int) -> str:
    """Returns the name of a job's group on one of its hosts; several of them may be this machine."""
    return f"dsrun-{job_id}-{node_rank}"


def job_of_scope(name: str) -> str | None:
    """Returns the job whose group has this name; None for a group that is not dsrun's."""
    head, _, node_rank = name.rpartition("-")
    return head.removeprefix("dsrun-") if head.startswith("dsrun-") and node_rank.isdecimal() else None


def make_scope(name: str, root: Path = Path("/")) -> Scope | None:
    """Makes a group below this process's own.

    Args:
        name: name of the control group; a group left over from a job that died is taken over.
        root: `/`, or a made-up tree with proc/self/cgroup, proc/self/mountinfo and the mounted hierarchy.

    Returns:
        None without cgroup v2, without the right to make a group, or on a kernel older than 5.14, which has no
        `cgroup.kill`. None of that is an error: everything works without.
    """
    own = _own_group(root)
    if own is None:
        return None
    folder = own / name
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder / "cgroup.kill", os.W_OK):
        _rmdir(folder)
        return None
    return Scope(folder)


def left_scopes(job_id: str, root: Path = Path("/")) -> list[Scope]:
    """Returns the job's groups on every level from this process's own to the root."""
    found: list[Scope] = []
    for folder in _v2_levels(root):
        with suppress(OSError):
            found += [Scope(entry) for entry in sorted(folder.iterdir()) if job_of_scope(entry.name) == job_id]
    return found


def remove_empty_scopes(root: Path = Path("/"), *, older_than_s: float = _EMPTY_S) -> None:
    """Removes this user's groups in which nothing lives, of whatever job.

    Whoever kills a job's agent and spawner at the same moment leaves one: the ranks die with the spawner, and nobody is
    left to remove it. So a later job does, for which a dead one's group is found on the same levels as its own.
    """
    for folder in _v2_levels(root):
        # What is not to be read, or went away meanwhile, is for others to remove.
        with suppress(OSError):
            for entry in sorted(folder.iterdir()):
                if job_of_scope(entry.name) is None:
                    continue
                made = entry.stat()
                if made.st_uid == os.getuid() and time.time() - made.st_mtime > older_than_s:
                    _clear(entry)


def _own_group(root: Path) -> Path | None:
    """Returns the folder of this process's group, if what is mounted here is surely it."""
    own = next(iter(_v2_levels(root)), None)
    if own is None:
        return None
    try:
        # In some containers the path in /proc belongs to the host's tree. A group below another one than ours would
        # take the job out of the limits that it has.
        members = (own / "cgroup.procs").read_text().split()
    except OSError:
        return None
    return own if str(os.getpid()) in members else None


def _v2_levels(root: Path) -> list[Path]:
    try:
        groups = parse_self_cgroup((root / "proc/self/cgroup").read_text())
        mounts = parse_cgroup_mounts((root / "proc/self/mountinfo").read_text())
    except OSError:
        return []
    mount = next((mount for mount in mounts if not mount.controllers), None)
    return [] if mount is None else list(levels(root, mount, groups.get("")))


def _write(path: Path, text: str) -> bool:
    try:
        # Not write_text: a file that is not there must not be made.
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "w") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _clear(folder: Path) -> bool:
    """Removes a group in which nothing lives, and before it those of jobs that were started in its job."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if job_of_scope(entry.name) is not None:
                _clear(entry)
    return _rmdir(folder)


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
