"""What the control groups of this process allow: processor time and memory, cgroup v1 and v2. Sets nothing.

`os.cpu_count()` and psutil show the host. The limit that binds may stand on any level between the process's own
group and the root that is mounted here, so every level is read and the smallest value taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: v1 writes "no limit" as the largest multiple of a page; no machine has an EiB of memory.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMount:
    """A mounted hierarchy.

    Attributes:
        point: folder at which the hierarchy is mounted.
        root: the group that is seen at `point`; `/docker/<id>` inside a container without a namespace of its own.
        controllers: names of the v1 controllers; empty for v2.
    """

    point: PurePosixPath
    root: PurePosixPath
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """The limits that bind this process; None where there is none.

    Attributes:
        version: `v1`, `v2`, or `v1+v2` where both are mounted; None without cgroups.
        quota_cores: processor time a second, in cores.
        memory_limit_bytes: the smallest memory limit.
        memory_left_bytes: bytes that may still be taken before a memory limit binds, droppable page cache counted as
            free; None without a limit.
    """

    version: str | None
    quota_cores: float | None
    memory_limit_bytes: int | None
    memory_left_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupReport:
    """All that is told of this process's groups; None where there is no limit or no counter.

    Attributes:
        version: `v1`, `v2` or `v1+v2`; None without cgroups.
        path: path of the process's own group, as /proc/self/cgroup gives it; None without cgroups. With v1, which has a
            path for each controller, it is that of memory.
        quota_cores: the smallest quota up to the root, in cores.
        cpuset: CPUs of the own group, as the kernel lists them.
        memory_limit_bytes: the smallest limit up to the root: past it the kernel kills.
        memory_high_bytes: the smallest mark past which the kernel makes processes wait and reclaims (v2).
        memory_used_bytes: bytes in use by the nearest group that counts them, page cache included; None where no group
            counts.
        memory_left_bytes: bytes that may still be taken before a memory limit binds; None without a limit.
        swap_limit_bytes: the smallest limit of swap (v2).
        pids_limit: the smallest limit of processes and threads.
        pids_used: those of the nearest group that counts.
        oom_kills: processes of the nearest group that counts (v2: and of those below it) that were killed for memory.
    """

    version: str | None
    path: str | None
    quota_cores: float | None
    cpuset: str | None
    memory_limit_bytes: int | None
    memory_high_bytes: int | None
    memory_used_bytes: int | None
    memory_left_bytes: int | None
    swap_limit_bytes: int | None
    pids_limit: int | None
    pids_used: int | None
    oom_kills: int | None


def read_cgroup(root: Path, limits: CgroupLimits) -> CgroupReport:
    """Reads what else the groups of the calling process tell.

    Args:
        root: root folder: `/`, or a made-up tree as for `read_limits`.
        limits: limits of the calling process, as `read_limits` returned them.
    """
    groups = parse_self_cgroup(_read(root / "proc/self/cgroup") or "")
    mounts = parse_cgroup_mounts(_read(root / "proc/self/mountinfo") or "")
    path = groups.get("memory", groups.get(""))
    # Where both versions are mounted each controller is in one of them; v1's folders come first, v2's fill the gaps.
    folders = {
        name: [
            folder
            for mount in sorted(mounts, key=lambda mount: not mount.controllers)
            if name in mount.controllers or not mount.controllers
            for folder in levels(root, mount, groups.get(name if mount.controllers else ""))
        ]
        for name in ("memory", "pids", "cpuset")
    }
    events = _first(folders["memory"], "memory.events", "memory.oom_control")
    kills = re.search(r"^oom_kill ([0-9]+)$", events or "", re.MULTILINE)
    return CgroupReport(
        version=limits.version,
        path=None if path is None else str(path),
        quota_cores=limits.quota_cores,
        cpuset=_first(folders["cpuset"], "cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus") or None,
        memory_limit_bytes=limits.memory_limit_bytes,
        memory_high_bytes=_smallest(folders["memory"], "memory.high"),
        memory_used_bytes=_number(_first(folders["memory"], "memory.current", "memory.usage_in_bytes")),
        memory_left_bytes=limits.memory_left_bytes,
        swap_limit_bytes=_smallest(folders["memory"], "memory.swap.max"),
        pids_limit=_smallest(folders["pids"], "pids.max"),
        pids_used=_number(_first(folders["pids"], "pids.current")),
        oom_kills=None if kills is None else int(kills.group(1)),
    )


def read_limits(root: Path) -> CgroupLimits:
    """Reads the limits of the calling process.

    Args:
        root: `/`, or a made-up tree with proc/self/cgroup, proc/self/mountinfo and the mounted hierarchies.
    """
    groups = parse_self_cgroup(_read(root / "proc/self/cgroup") or "")
    mounts = parse_cgroup_mounts(_read(root / "proc/self/mountinfo") or "")
    quotas: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for mount in mounts:
        for controller in mount.controllers or {""}:
            for folder in levels(root, mount, groups.get(controller)):
                if not controller or controller == "cpu":
                    quotas += _quota(folder)
                if not controller or controller == "memory":
                    memory += _memory(folder)
    return CgroupLimits(
        version=_version(mounts),
        quota_cores=min(quotas, default=None),
        memory_limit_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((max(0, limit - used) for limit, used in memory if used is not None), default=None),
    )


def parse_self_cgroup(text: str) -> dict[str, PurePosixPath]:
    """Reads /proc/self/cgroup: controller -> path of the process's group; the key of v2 is the empty string."""
    groups: dict[str, PurePosixPath] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            groups |= {controller: PurePosixPath(fields[2]) for controller in fields[1].split(",")}
    return groups


def parse_cgroup_mounts(text: str) -> tuple[CgroupMount, ...]:
    """Reads the cgroup mounts out of /proc/self/mountinfo."""
    mounts: list[CgroupMount] = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if len(fields) < 5 or source[0] not in ("cgroup", "cgroup2"):
            continue
        options = source[2].split(",") if source[0] == "cgroup" and len(source) > 2 else []
        mounts.append(
            CgroupMount(
                point=PurePosixPath(unescape_mount(fields[4])),
                root=PurePosixPath(unescape_mount(fields[3])),
                controllers=frozenset(option for option in options if option not in ("rw", "ro")),
            )
        )
    return tuple(mounts)


def unescape_mount(text: str) -> str:
    """Turns mountinfo's octal escapes back: `\\040` is a blank."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _version(mounts: tuple[CgroupMount, ...]) -> str | None:
    kinds = sorted({"v1" if mount.controllers else "v2" for mount in mounts})
    return "+".join(kinds) or None


def levels(root: Path, mount: CgroupMount, group: PurePosixPath | None) -> Iterator[Path]:
    """Yields the folders from the process's own group up to the mounted root."""
    point = root / mount.point.relative_to("/")
    if group is not None and group.is_relative_to(mount.root):
        own = point / group.relative_to(mount.root)
        # Inside a container the path of /proc/self/cgroup may belong to the host; then the mounted root is our own.
        if ".." not in own.parts and os.path.isdir(own):
            folder = own
            while folder != point:
                yield folder
                folder = folder.parent
    yield point


def _quota(folder: Path) -> list[float]:
    text = _read(folder / "cpu.max")
    if text is None:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        text = f"{quota} {period}"
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return []
    return [int(words[0]) / int(words[1])]


def memory_limit(folder: Path) -> int | None:
    """Returns the memory limit of one group, in bytes; None if it has none."""
    limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
    return None if limit is None or limit >= _NO_LIMIT_BYTES else limit


def _memory(folder: Path) -> list[tuple[int, int | None]]:
    """Returns (limit, bytes in use) of one level; several where v1 also knows of limits above the mounted root."""
    stat = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    limits = [
        _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes") or "",
        stat.get("hierarchical_memory_limit", ""),
    ]
    usage = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or ""
    droppable = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    used = int(usage) - int(droppable) if usage.isdecimal() and droppable.isdecimal() else None
    return [(int(limit), used) for limit in limits if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES]


def _smallest(folders: list[Path], name: str) -> int | None:
    """Returns the smallest number that a file of that name holds on any level; `max` is none."""
    numbers = (_number(_read(folder / name)) for folder in folders)
    return min((number for number in numbers if number is not None), default=None)


def _first(folders: list[Path], *names: str) -> str | None:
    """Returns the first of these files that is there, from the own group upwards."""
    return next((text for folder in folders for name in names if (text := _read(folder / name)) is not None), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
