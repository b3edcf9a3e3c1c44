"""What processes hold and leave on a Linux machine, read from /proc and /sys. Judges nothing and ends nothing."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"
_CGROUP_ROOT = "/sys/fs/cgroup"


def pids() -> list[int]:
    """Every process there is."""
    return [int(name) for name in names_in("/proc") if name.isdecimal()]


def words_of(pid: int) -> list[bytes]:
    """A process's command line; empty for one that has ended."""
    return _bytes_of(f"/proc/{pid}/cmdline").split(b"\0")


def variables_of(pid: int) -> list[bytes]:
    """The environment a process was started with, as `NAME=VALUE`; empty for one that has ended."""
    return _bytes_of(f"/proc/{pid}/environ").split(b"\0")


def parent_of(pid: int) -> int | None:
    """A process's parent; None once it has ended."""
    stat = _bytes_of(f"/proc/{pid}/stat")
    return int(stat.rpartition(b")")[2].split()[1]) if stat else None


def namespace_of(pid: int, kind: str) -> str:
    """Names the namespace a process is in, `pid:[4026531836]` for example; empty for one that has ended."""
    return _link(f"/proc/{pid}/ns/{kind}")


def peak_memory_of(pid: int) -> int:
    """The most bytes a live process had resident so far."""
    for line in _bytes_of(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"pid {pid} has ended")


def describe(found: set[int]) -> str:
    """Pids and what they run, a line each."""
    return "\n".join(f"{pid}: {b' '.join(words_of(pid))[:160].decode(errors='replace')}" for pid in sorted(found))


def listening_sockets(held_by: set[int] | None = None) -> set[str]:
    """Inodes of sockets that something listens on (TCP and Unix); of these processes only, where they are named."""
    inodes: set[str] = set()
    for table, state_at, inode_at in (("tcp", 3, 9), ("tcp6", 3, 9)):
        rows = _bytes_of(f"/proc/net/{table}").decode().splitlines()[1:]
        inodes |= {row.split()[inode_at] for row in rows if row.split()[state_at] == _LISTEN}
    for row in _bytes_of("/proc/net/unix").decode(errors="replace").splitlines()[1:]:
        # Flags 00010000: it accepts connections.
        if row.split()[3] == "00010000":
            inodes.add(row.split()[6])
    if held_by is None:
        return inodes
    held = {_link(f"/proc/{pid}/fd/{fd}") for pid in held_by for fd in names_in(f"/proc/{pid}/fd")}
    return {inode for inode in inodes if f"socket:[{inode}]" in held}


def cgroups_of(pid: int) -> set[str]:
    """Folders of the cgroups a process is in, all hierarchies."""
    folders: set[str] = set()
    for line in _bytes_of(f"/proc/{pid}/cgroup").decode().splitlines():
        _, controllers, path = line.split(":", 2)
        candidates = [controllers.removeprefix("name="), "unified", ""]
        folders |= {f for f in (os.path.join(_CGROUP_ROOT, c) + path for c in candidates) if os.path.isdir(f)}
    return folders


def cgroups() -> set[str]:
    """Folders of all cgroups."""
    return {folder for folder, _, _ in os.walk(_CGROUP_ROOT)}


def files_in(*folders: Path) -> set[str]:
    """Everything below these folders; what Python compiles for itself excepted."""
    return {str(path) for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts}


def in_use(prefix: str) -> set[str]:
    """Files below `prefix` that a live process has mapped."""
    used: set[str] = set()
    for pid in pids():
        for line in _bytes_of(f"/proc/{pid}/maps").splitlines():
            at = line.find(prefix.encode())
            if at >= 0:
                used.add(line[at:].decode(errors="replace"))
        used |= {
            link for fd in names_in(f"/proc/{pid}/fd") if (link := _link(f"/proc/{pid}/fd/{fd}")).startswith(prefix)
        }
    return used


def names_in(folder: str | Path) -> list[str]:
    """Names in a folder; none where it is gone or not ours to read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def owner_of(path: str) -> int | None:
    """The user's number whose file this is; None for one that is gone."""
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        # The process has ended meanwhile, or is another user's.
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
