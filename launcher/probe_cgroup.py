"""What the control groups of this process allow: processor time and memory, cgroup v1 and v2. Sets nothing.

`os.cpu_count()` and psutil show the host. The limit that binds may stand on any level between the process's own
group and the root that is mounted here, so every level is read and the smallest value taken.
"""

from __future__ import annotations

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
        point: where it is mounted.
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
        memory_left_bytes: what may still be taken before a limit binds, page cache that can be dropped counted as free.
    """

    version: str | None
    quota_cores: float | None
    memory_limit_bytes: int | None
    memory_left_bytes: int | None


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
        if ".." not in own.parts and own.is_dir():
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


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
