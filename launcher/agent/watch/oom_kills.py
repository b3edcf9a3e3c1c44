"""Which processes were killed for want of memory just now, and whose limit that was. Changes nothing.

A SIGKILL that nobody sent is the kernel's if its count rose, and systemd-oomd's if its mark on the group did: the exit
status does not tell. Other daemons (earlyoom) leave no trace that a user may read.

[Note: whose limit] A count of kills (v2: `oom_kill` of memory.events; v1: of memory.oom_control; /proc/vmstat's) rises
for kills by a limit of the group, by one further up, and by the whole machine. Whose it was tells `oom` of
memory.events: it rises for a limit of the group itself or of one below, so the nearest group where it rose has the
limit. v1 counts how often a group's limit was met (memory.failcnt). Where neither rose the machine was out of memory,
or a group that cannot be seen from inside a container. Source: Documentation/admin-guide/cgroup-v2.rst,
cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...machine.cgroup import CgroupMount, levels, memory_limit, parse_cgroup_mounts, parse_self_cgroup
from ...protocol import OomKill

#: A rank's end is reported this long after the kill at most. Older ones were other processes: a loader's hours ago.
RECENT_S = 5.0
#: The counts are read no more often; a look costs a few reads of memory.
_LOOK_S = 0.5
#: The kernel counts that a limit was met, then lists all tasks of the group, on a serial console as well, then kills.
_REPORT_S = 30.0
#: systemd-oomd counts on the group what it killed there. Source: systemd, src/oom/oomd-util.c.
_OOMD_MARK = "user.oomd_kill"


@dataclass(frozen=True, slots=True)
class _Counts:
    """What the files say: kills, how often each group met its limit, kills of systemd-oomd by group."""

    kills: int
    limits_met: Mapping[Path, int]
    oomd_kills: Mapping[Path, int]


class OomKills:
    """Remembers kills from the moment it is made.

    Args:
        root: `/`, or a made-up tree with proc and the mounted hierarchies.
        read_mark: function that returns an extended attribute of a folder, as `os.getxattr` does.
    """

    def __init__(self, root: Path = Path("/"), read_mark: Callable[[Path, str], bytes] = os.getxattr) -> None:
        self._root = root
        self._read_mark = read_mark
        self._mount, self._groups = _memory_groups(root)
        self._counts = self._read()
        self._met_at_s: dict[Path, float] = {}
        self._seen: OomKill | None = None
        self._seen_at_s = self._looked_at_s = float("-inf")

    def watch(self, folder: Path) -> None:
        """Counts in a group of v2 below this process's own as well."""
        if self._mount is not None and not self._mount.controllers:
            self._groups = (folder, *self._groups)
            self._counts = self._read()

    def look(self, now_s: float) -> None:
        """Notes kills since the last look; to be called now and then, with monotonic seconds.

        Without it an old kill would explain a much later end.
        """
        if now_s >= self._looked_at_s + _LOOK_S:
            self._note(now_s)

    def recent(self, now_s: float) -> OomKill | None:
        """Returns the last kill, if it was seen within RECENT_S before `now_s`, in monotonic seconds."""
        self._note(now_s)
        return self._seen if now_s - self._seen_at_s <= RECENT_S else None

    def _note(self, now_s: float) -> None:
        before, self._counts = self._counts, self._read()
        self._looked_at_s = now_s
        for folder, count in self._counts.limits_met.items():
            if count > before.limits_met.get(folder, 0):
                self._met_at_s[folder] = now_s
        if (kill := self._between(before, self._counts, now_s)) is not None:
            self._seen, self._seen_at_s = kill, now_s

    def _between(self, before: _Counts, after: _Counts, now_s: float) -> OomKill | None:
        for folder, count in after.oomd_kills.items():
            if count > before.oomd_kills.get(folder, 0):
                return OomKill(by="systemd-oomd", group=self._name(folder))
        if after.kills <= before.kills:
            return None
        for folder in after.limits_met:
            if now_s - self._met_at_s.get(folder, float("-inf")) <= _REPORT_S:
                whole = any(_read(each / "memory.oom.group") == "1" for each in self._groups_up_to(folder))
                return OomKill(
                    by="limit", group=self._name(folder), limit_bytes=memory_limit(folder), kills_whole_group=whole
                )
        return OomKill(by="above" if self._is_contained() else "machine")

    def _groups_up_to(self, folder: Path) -> Iterator[Path]:
        for each in self._groups:
            yield each
            if each == folder:
                return

    def _is_contained(self) -> bool:
        """Whether there are groups above those that are seen here: the root of all has neither limit nor parent."""
        if self._mount is None:
            return False
        top = self._root / self._mount.point.relative_to("/")
        return str(self._mount.root) != "/" or (not self._mount.controllers and (top / "memory.max").exists())

    def _name(self, folder: Path) -> str:
        """Returns a group's path below its mount, as `/proc/self/cgroup` writes it."""
        assert self._mount is not None, "a group has a mount"
        top = self._root / self._mount.point.relative_to("/")
        return f"/{folder.relative_to(top)}" if folder != top else "/"

    def _read(self) -> _Counts:
        v1 = self._mount is not None and bool(self._mount.controllers)
        sources = [folder / ("memory.oom_control" if v1 else "memory.events") for folder in self._groups]
        # A count of v2 holds for all groups below it as well, one of v1 for its own alone.
        nearest = [*(sources[:1] if v1 else sources), self._root / "proc/vmstat"]
        kills = next((count for path in nearest if (count := _count(path, "oom_kill")) is not None), 0)
        met = {folder: _met(folder, v1=v1) for folder in self._groups}
        return _Counts(
            kills=kills,
            limits_met={folder: count for folder, count in met.items() if count is not None},
            oomd_kills={folder: self._oomd_kills(folder) for folder in self._groups},
        )

    def _oomd_kills(self, folder: Path) -> int:
        try:
            mark = self._read_mark(folder, _OOMD_MARK)
        except OSError:
            return 0
        return int(mark) if mark.isdigit() else 0


def _memory_groups(root: Path) -> tuple[CgroupMount | None, tuple[Path, ...]]:
    """Returns the hierarchy that accounts for memory, and this process's groups there, the nearest first."""
    try:
        own = parse_self_cgroup((root / "proc/self/cgroup").read_text())
        mounts = parse_cgroup_mounts((root / "proc/self/mountinfo").read_text())
    except OSError:
        return None, ()
    # A controller is in one of the hierarchies: of v1 if there is one of that name, else in v2's.
    for mount in sorted(mounts, key=lambda mount: not mount.controllers):
        if "memory" in mount.controllers:
            return mount, tuple(levels(root, mount, own.get("memory")))
        if not mount.controllers:
            return mount, tuple(levels(root, mount, own.get("")))
    return None, ()


def _met(folder: Path, *, v1: bool) -> int | None:
    """Returns how often a group's limit was met; None where there is no limit, or it is not counted."""
    if not v1:
        return _count(folder / "memory.events", "oom")
    text = _read(folder / "memory.failcnt")
    return int(text) if text is not None and text.isdecimal() and memory_limit(folder) is not None else None


def _count(path: Path, name: str) -> int | None:
    lines = (_read(path) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
