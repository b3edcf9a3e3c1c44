"""Kills for want of memory are counted where this process's memory is, from the moment of asking on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.oom_kills import OomKills

V2 = "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 24 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def tree(root: Path, *, mountinfo: str, cgroup: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "path"),
    [
        (V2, "0::/user/job\n", "sys/fs/cgroup/user/job/memory.events"),
        # The group itself does not account for memory; the next one up counts for all below it.
        (V2, "0::/user/job\n", "sys/fs/cgroup/user/memory.events"),
        (V1, "4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
        ("", "", "proc/vmstat"),
    ],
)
def test_kills_since_the_start_are_counted(tmp_path: Path, mountinfo: str, cgroup: str, path: str) -> None:
    (tmp_path / "sys/fs/cgroup/user/job").mkdir(parents=True)
    root = tree(tmp_path, mountinfo=mountinfo, cgroup=cgroup, files={path: "low 0\noom_kill_disable 0\noom_kill 3\n"})
    kills = OomKills(root)
    assert kills.since_start() == 0
    (root / path).write_text("oom_kill 5\n")
    assert kills.since_start() == 2


def test_the_nearest_count_is_taken(tmp_path: Path) -> None:
    near, far = "sys/fs/cgroup/user/job/memory.events", "proc/vmstat"
    root = tree(tmp_path, mountinfo=V2, cgroup="0::/user/job\n", files={near: "oom_kill 0\n", far: "oom_kill 0\n"})
    kills = OomKills(root)
    (root / far).write_text("oom_kill 9\n")
    assert kills.since_start() == 0


def test_a_machine_that_counts_nothing_has_killed_nothing(tmp_path: Path) -> None:
    assert OomKills(tmp_path).since_start() == 0
