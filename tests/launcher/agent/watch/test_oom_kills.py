"""Kills for want of memory are seen as they happen, with whose limit it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.agent.watch.oom_kills import RECENT_S, OomKills
from dsrun.launcher.protocol import OomKill
from support.topologies import write_tree

GIB = 1 << 30
V2 = "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 24 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CONTAINER = "35 24 0:30 /docker/0a1b /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
NO_LIMIT = "9223372036854771712"
OWN, ABOVE, TOP = "sys/fs/cgroup/user/job", "sys/fs/cgroup/user", "sys/fs/cgroup"
V1_OWN, V1_ABOVE, V1_TOP = "sys/fs/cgroup/memory/user/job", "sys/fs/cgroup/memory/user", "sys/fs/cgroup/memory"


def events(oom: int, kills: int) -> str:
    return f"low 0\nhigh 0\nmax 7\noom {oom}\noom_kill {kills}\noom_group_kill 0\n"


def control(kills: int) -> str:
    return f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"


def v2_tree(root: Path, **files: str) -> Path:
    quiet = {f"{folder}/{name}": text for folder in (OWN, ABOVE) for name, text in _QUIET.items()}
    return write_tree(root, {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/user/job\n", **quiet, **files})


_QUIET = {"memory.events": events(0, 3), "memory.max": "max\n", "memory.oom.group": "0\n"}


def v1_tree(root: Path, mountinfo: str = V1) -> Path:
    files = {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": "4:memory:/user/job\n0::/user/job\n"}
    for folder in (V1_OWN, V1_ABOVE, V1_TOP):
        texts = {"memory.oom_control": control(0), "memory.failcnt": "0\n", "memory.limit_in_bytes": f"{NO_LIMIT}\n"}
        files |= {f"{folder}/{name}": text for name, text in texts.items()}
    return write_tree(root, files)


def kill_seen(root: Path, changes: dict[str, str]) -> OomKill | None:
    """Returns what is seen when these files change."""
    kills = OomKills(root)
    assert kills.recent(0.0) is None
    write_tree(root, changes)
    return kills.recent(1.0)


def test_a_limit_of_the_own_group_is_named(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{OWN}/memory.max": f"{64 * GIB}\n"})
    seen = kill_seen(root, {f"{OWN}/memory.events": events(1, 4), f"{ABOVE}/memory.events": events(1, 4)})
    assert seen == OomKill(by="limit", group="/user/job", limit_bytes=64 * GIB)


def test_a_limit_further_up_is_named_with_its_group(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{ABOVE}/memory.max": f"{8 * GIB}\n"})
    seen = kill_seen(root, {f"{OWN}/memory.events": events(0, 4), f"{ABOVE}/memory.events": events(1, 4)})
    assert seen == OomKill(by="limit", group="/user", limit_bytes=8 * GIB)


def test_a_limit_of_a_group_below_is_told_without_its_size(tmp_path: Path) -> None:
    seen = kill_seen(v2_tree(tmp_path), {f"{OWN}/memory.events": events(1, 4)})
    assert seen == OomKill(by="limit", group="/user/job")


def test_a_workstation_without_limits_was_out_of_memory_itself(tmp_path: Path) -> None:
    seen = kill_seen(v2_tree(tmp_path), {f"{OWN}/memory.events": events(0, 4), f"{ABOVE}/memory.events": events(0, 4)})
    assert seen == OomKill(by="machine")


def test_a_limit_that_was_not_met_is_not_blamed(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{OWN}/memory.max": f"{64 * GIB}\n"})
    assert kill_seen(root, {f"{OWN}/memory.events": events(0, 4)}) == OomKill(by="machine")


def test_a_container_cannot_tell_the_machine_from_a_limit_above(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{TOP}/memory.max": "max\n"})
    assert kill_seen(root, {f"{OWN}/memory.events": events(0, 4)}) == OomKill(by="above")


def test_a_group_that_is_killed_as_a_whole_is_told(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{OWN}/memory.max": f"{GIB}\n", f"{OWN}/memory.oom.group": "1\n"})
    seen = kill_seen(root, {f"{OWN}/memory.events": events(1, 9)})
    assert seen == OomKill(by="limit", group="/user/job", limit_bytes=GIB, kills_whole_group=True)


@pytest.mark.parametrize(
    ("mountinfo", "changes", "seen"),
    [
        (V1, {f"{V1_OWN}/memory.failcnt": "12\n"}, OomKill(by="limit", group="/user/job", limit_bytes=GIB)),
        (V1, {f"{V1_ABOVE}/memory.failcnt": "12\n"}, OomKill(by="limit", group="/user", limit_bytes=2 * GIB)),
        (V1, {}, OomKill(by="machine")),
        (V1_CONTAINER, {}, OomKill(by="above")),
    ],
)
def test_the_first_version_of_control_groups_is_read_too(
    tmp_path: Path, mountinfo: str, changes: dict[str, str], seen: OomKill
) -> None:
    root = v1_tree(tmp_path, mountinfo)
    limits = {f"{V1_OWN}/memory.limit_in_bytes": f"{GIB}\n", f"{V1_ABOVE}/memory.limit_in_bytes": f"{2 * GIB}\n"}
    write_tree(root, limits)
    folder = V1_OWN if mountinfo == V1 else V1_TOP
    assert kill_seen(root, {f"{folder}/memory.oom_control": control(1), **changes}) == seen


@pytest.mark.parametrize("path", [f"{ABOVE}/memory.events", "proc/vmstat"])
def test_where_the_own_group_does_not_count_the_next_one_does_and_then_the_machine(tmp_path: Path, path: str) -> None:
    (tmp_path / OWN).mkdir(parents=True)
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/user/job\n", path: "oom 0\noom_kill 3\n"}
    root = write_tree(tmp_path, files)
    assert kill_seen(root, {path: "oom 0\noom_kill 5\n"}) == OomKill(by="machine")


def test_the_nearest_count_is_taken(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{"proc/vmstat": "oom_kill 0\n"})
    assert kill_seen(root, {"proc/vmstat": "oom_kill 9\n", f"{ABOVE}/memory.events": events(1, 9)}) is None


def test_a_kill_of_hours_ago_explains_nothing(tmp_path: Path) -> None:
    root = v2_tree(tmp_path)
    kills = OomKills(root)
    kills.look(0.0)
    # A loader's worker dies; no rank does, and nobody asks.
    write_tree(root, {f"{OWN}/memory.events": events(0, 4)})
    kills.look(60.0)
    assert kills.recent(60.0 + RECENT_S) == OomKill(by="machine")
    assert kills.recent(7200.0) is None


def test_a_limit_is_blamed_however_long_the_kernel_writes_its_report_before_it_kills(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{OWN}/memory.max": f"{GIB}\n"})
    kills = OomKills(root)
    # Met and counted at once; then every task is listed on a serial console, and the kill is counted.
    write_tree(root, {f"{OWN}/memory.events": events(1, 3)})
    kills.look(10.0)
    kills.look(11.0)
    write_tree(root, {f"{OWN}/memory.events": events(1, 4)})
    assert kills.recent(12.0) == OomKill(by="limit", group="/user/job", limit_bytes=GIB)


def test_a_limit_that_was_met_long_ago_is_not_blamed(tmp_path: Path) -> None:
    root = v2_tree(tmp_path, **{f"{OWN}/memory.max": f"{GIB}\n"})
    kills = OomKills(root)
    write_tree(root, {f"{OWN}/memory.events": events(1, 4)})
    assert kills.recent(10.0) == OomKill(by="limit", group="/user/job", limit_bytes=GIB)
    write_tree(root, {f"{OWN}/memory.events": events(1, 5)})
    assert kills.recent(3600.0) == OomKill(by="machine")


def test_ranks_that_die_together_have_one_reason(tmp_path: Path) -> None:
    root = v2_tree(tmp_path)
    kills = OomKills(root)
    write_tree(root, {f"{OWN}/memory.events": events(0, 5)})
    assert kills.recent(1.0) == kills.recent(1.5) == OomKill(by="machine")


def test_looks_come_no_closer_than_they_cost(tmp_path: Path) -> None:
    root = v2_tree(tmp_path)
    kills = OomKills(root)
    kills.look(10.0)
    write_tree(root, {f"{OWN}/memory.events": events(0, 5)})
    kills.look(10.1)
    assert kills.recent(11.0) == OomKill(by="machine")


def test_systemd_oomd_leaves_its_mark_on_the_group(tmp_path: Path) -> None:
    root = v2_tree(tmp_path)
    marks = {root / ABOVE: b"2"}

    def read_mark(folder: Path, name: str) -> bytes:
        assert name == "user.oomd_kill"
        if folder not in marks:
            raise OSError(61, "No data available")
        return marks[folder]

    kills = OomKills(root, read_mark)
    scope = root / OWN / "dsrun-job-0"
    scope.mkdir()
    kills.watch(scope)
    assert kills.recent(0.0) is None
    marks[scope] = b"7"
    assert kills.recent(1.0) == OomKill(by="systemd-oomd", group="/user/job/dsrun-job-0")


def test_a_machine_that_counts_nothing_has_killed_nothing(tmp_path: Path) -> None:
    assert OomKills(tmp_path).recent(0.0) is None
