"""How many processes the kernel has killed for want of memory where this process's memory is counted. Changes nothing.

A SIGKILL that nobody sent is the kernel's if this number rose: the exit status does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .probe_cgroup import levels, parse_cgroup_mounts, parse_self_cgroup


class OomKills:
    """Counts from the moment it is made.

    Args:
        root: `/`, or a made-up tree with proc and the mounted hierarchies.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._source = next(_sources(root), None)
        self._before = self._count()

    def since_start(self) -> int:
        """Processes killed since then; 0 where nothing here counts them."""
        return max(0, self._count() - self._before)

    def _count(self) -> int:
        return 0 if self._source is None else (_read_count(self._source) or 0)


def _sources(root: Path) -> Iterator[Path]:
    """Yields files that count, the nearest first.

    A count of cgroup v2 holds for all groups below it, one of v1 for its own group alone; either is raised for kills
    by a limit further up and by the whole machine as well. Where no group counts (v2 has none at its root), the
    machine does.
    """
    try:
        groups = parse_self_cgroup((root / "proc/self/cgroup").read_text())
        mounts = parse_cgroup_mounts((root / "proc/self/mountinfo").read_text())
    except OSError:
        groups, mounts = {}, ()
    candidates: list[Path] = []
    for mount in mounts:
        if "memory" in mount.controllers:
            candidates += [next(levels(root, mount, groups.get("memory"))) / "memory.oom_control"]
        elif not mount.controllers:
            candidates += [folder / "memory.events" for folder in levels(root, mount, groups.get(""))]
    candidates.append(root / "proc/vmstat")
    for path in candidates:
        if _read_count(path) is not None:
            yield path


def _read_count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
