"""What the kernel lets this process do: its limits and who it runs as. Raises none of them."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from .proc_files import read_text

_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsReport:
    """Limits of this process, which its jobs inherit; None is no limit.

    Attributes:
        nofile: files it may have open.
        nofile_hard: hard limit of open files, up to which the process may raise `nofile` itself; None for no limit.
        memlock_bytes: memory it may lock, which RDMA and pinned buffers need.
        memlock_hard_bytes: hard limit of locked memory in bytes, up to which the process may raise `memlock_bytes`
            itself; None for no limit.
        locks_without_limit: whether the process may lock more memory all the same; see `locks_without_limit`.
        nproc: processes and threads its user may have.
        stack_bytes: most bytes of a thread's stack; None for no limit.
        core_bytes: most bytes of a core file; 0 means that none is written, None that there is no limit.
    """

    nofile: int | None
    nofile_hard: int | None
    memlock_bytes: int | None
    memlock_hard_bytes: int | None
    nproc: int | None
    stack_bytes: int | None
    core_bytes: int | None
    locks_without_limit: bool = False

    @property
    def lockable_bytes(self) -> int | None:
        """Memory this process may lock; None without limit."""
        return None if self.locks_without_limit else self.memlock_bytes


def read_process_limits(root: Path) -> LimitsReport | None:
    """Reads the limits of the calling process; None where /proc does not tell them.

    Args:
        root: `/`, or a made-up tree with proc/self/limits.
    """
    limits = parse_limits(read_text(root / "proc/self/limits") or "")
    if not limits:
        return None
    none = (None, None)
    files, locked = limits.get("Max open files", none), limits.get("Max locked memory", none)
    return LimitsReport(
        nofile=files[0],
        nofile_hard=files[1],
        memlock_bytes=locked[0],
        memlock_hard_bytes=locked[1],
        nproc=limits.get("Max processes", none)[0],
        stack_bytes=limits.get("Max stack size", none)[0],
        core_bytes=limits.get("Max core file size", none)[0],
        locks_without_limit=locks_without_limit(root),
    )


def locks_without_limit(root: Path) -> bool:
    """Whether the calling process may lock memory beyond its limit: with CAP_IPC_LOCK, as root of the machine has it.

    Root of a container with users of its own has that capability there alone, and the limit holds.

    Args:
        root: `/`, or a made-up tree with proc/self/status and proc/self/uid_map.

    Source: ib_umem_get (drivers/infiniband/core/umem.c of Linux) asks `capable(CAP_IPC_LOCK)`.
    """
    lines = (line.split() for line in (read_text(root / "proc/self/status") or "").splitlines())
    effective = next((words[1] for words in lines if len(words) == 2 and words[0] == "CapEff:"), "0")
    same_users = (read_text(root / "proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    return same_users and bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def parse_limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Reads /proc/self/limits: name -> (soft, hard), None for unlimited."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for line in text.splitlines()[1:]:
        # Names hold single blanks, columns are apart by more: the kernel writes them 26, 21 and 21 wide.
        name, soft, hard = line[:26].strip(), line[26:47].strip(), line[47:68].strip()
        if name and all(word.isdecimal() or word == "unlimited" for word in (soft, hard)):
            found[name] = (int(soft) if soft.isdecimal() else None, int(hard) if hard.isdecimal() else None)
    return found


def umask_of(status: str) -> str | None:
    """Finds the umask in the text of /proc/self/status: asking the kernel would change it for a moment."""
    lines = (line.split() for line in status.splitlines())
    return next((words[1] for words in lines if len(words) == 2 and words[0] == "Umask:"), None)


def user_name() -> str:
    """Returns whom this process runs as; the number where the system has no name for it (containers)."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
