"""A control group of the job's own, where one may be made; nothing at all elsewhere."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dsrun.launcher.agent.start.cgroup_scope import (
    job_of_scope,
    left_scopes,
    make_scope,
    remove_empty_scopes,
    scope_name,
)
from support.processes import wait_for_end

MOUNTINFO = "35 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def tree(root: Path, *, members: str) -> Path:
    """A made-up machine; `mkdir` in it makes no files, so a kernel's are put there before."""
    for path, text in {
        "proc/self/mountinfo": MOUNTINFO,
        "proc/self/cgroup": "0::/user\n",
        "sys/fs/cgroup/user/cgroup.procs": members,
        "sys/fs/cgroup/user/dsrun-j1-0/cgroup.procs": "",
        "sys/fs/cgroup/user/dsrun-j1-0/cgroup.kill": "",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_group_is_made_below_our_own_and_takes_members(tmp_path: Path) -> None:
    root = tree(tmp_path, members=f"1\n{os.getpid()}\n")
    scope = make_scope("dsrun-j1-0", root)
    assert scope is not None
    assert scope.folder == root / "sys/fs/cgroup/user/dsrun-j1-0"
    assert scope.add(4711)
    scope.kill()
    assert (scope.folder / "cgroup.procs").read_text() == "4711"
    assert (scope.folder / "cgroup.kill").read_text() == "1"


def test_no_group_is_made_where_the_mounted_one_is_not_surely_ours(tmp_path: Path) -> None:
    assert make_scope("dsrun-j1-0", tree(tmp_path, members="1\n")) is None


def test_a_kernel_that_cannot_kill_a_group_gets_none(tmp_path: Path) -> None:
    root = tree(tmp_path, members=f"{os.getpid()}\n")
    assert make_scope("dsrun-j2-0", root) is None
    assert not (root / "sys/fs/cgroup/user/dsrun-j2-0").exists()


def test_a_machine_without_groups_gets_none(tmp_path: Path) -> None:
    assert make_scope("dsrun-j1-0", tmp_path) is None
    assert left_scopes("j1", tmp_path) == []


def test_groups_that_a_dead_job_left_are_found(tmp_path: Path) -> None:
    root = tree(tmp_path, members="")
    assert [scope.folder.name for scope in left_scopes("j1", root)] == ["dsrun-j1-0"]
    assert left_scopes("j", root) == []


def aged(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600, time.time() - 3600))


def test_old_empty_groups_of_any_job_are_removed_and_nothing_else(tmp_path: Path) -> None:
    # `dsrun-j1-0` has files, as a group with processes cannot be removed.
    groups = tree(tmp_path, members="") / "sys/fs/cgroup"
    for path in ("user/dsrun-j2-0/dsrun-inner-0", "user/new/dsrun-j3-0", "dsrun-j4-1", "user/mine", "user/dsrun-j5-0"):
        (groups / path).mkdir(parents=True)
    for path in ("user/dsrun-j1-0", "user/dsrun-j2-0", "dsrun-j4-1", "user/mine", "user/new"):
        aged(groups / path)
    remove_empty_scopes(tmp_path)
    assert sorted(path.name for path in (groups / "user").iterdir() if path.is_dir()) == [
        "dsrun-j1-0",
        "dsrun-j5-0",
        "mine",
        "new",
    ]
    assert not (groups / "dsrun-j4-1").exists()
    assert (groups / "user/dsrun-j1-0/cgroup.procs").exists()


def test_a_real_group_is_removed_when_empty_and_not_while_something_lives_in_it() -> None:
    scope = make_scope(f"dsrun-test-{os.getpid()}")
    if scope is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    try:
        remove_empty_scopes()
        assert scope.folder.exists()
        with subprocess.Popen(["sleep", "1000"]) as process:
            assert scope.add(process.pid)
            aged(scope.folder)
            remove_empty_scopes()
            assert scope.folder.exists()
            process.kill()
        remove_empty_scopes()
        assert not scope.folder.exists()
    finally:
        scope.remove()


def test_a_group_tells_its_job_also_where_names_begin_alike() -> None:
    assert [job_of_scope(scope_name(job, 1)) for job in ("a", "a-1")] == ["a", "a-1"]
    assert [job_of_scope(name) for name in ("dsrun-a", "user.slice", "dsrun-a-x")] == [None, None, None]


def test_the_kernel_kills_and_forgets_a_real_group() -> None:
    scope = make_scope(f"dsrun-test-{os.getpid()}")
    if scope is None:
        pytest.skip("no cgroup v2 in which this user may make a group")
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert scope.add(process.pid)
        assert scope.folder.name in Path(f"/proc/{process.pid}/cgroup").read_text()
        assert scope.remove()
        assert not scope.folder.exists()
        assert wait_for_end(process.pid, timeout_s=10)
