from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from dsrun.launcher.machine.cgroup import CgroupLimits, parse_self_cgroup, read_cgroup, read_limits
from support.topologies import write_tree

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 23 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:29 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
NO_LIMIT_V1 = "9223372036854771712"


def limits(quota: float | None, memory: int | None, left: int | None, version: str = "v2") -> CgroupLimits:
    return CgroupLimits(version=version, quota_cores=quota, memory_limit_bytes=memory, memory_left_bytes=left)


def test_v2_takes_the_smallest_limit_between_the_own_group_and_the_root(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup"
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            f"{cgroup}/user.slice/cpu.max": "150000 100000\n",
            f"{cgroup}/user.slice/memory.max": f"{8 * GIB}\n",
            f"{cgroup}/user.slice/memory.current": f"{7 * GIB}\n",
            f"{cgroup}/user.slice/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            f"{cgroup}/user.slice/job/cpu.max": "max 100000\n",
            f"{cgroup}/user.slice/job/memory.max": f"{16 * GIB}\n",
            f"{cgroup}/user.slice/job/memory.current": f"{GIB}\n",
        },
    )
    assert read_limits(root) == limits(1.5, 8 * GIB, 3 * GIB)


def test_v1_reads_each_controller_in_its_own_hierarchy(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/a\n1:name=systemd:/x\n",
            "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )
    assert read_limits(root) == limits(2.0, 4 * GIB, 3 * GIB, "v1")


def test_v1_knows_limits_above_the_mounted_root(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNTS.format(root="/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            "sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {2 * GIB}\n",
        },
    )
    assert read_limits(root) == limits(None, 2 * GIB, 2 * GIB, "v1")


@pytest.mark.parametrize(("own", "mounted"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../..", "/")])
def test_inside_a_container_the_mounted_root_is_the_own_group(tmp_path: Path, own: str, mounted: str) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{own}\n",
            "proc/self/mountinfo": V2_MOUNT.format(root=mounted),
            "sys/fs/cgroup/cpu.max": "300000 100000",
        },
    )
    assert read_limits(root).quota_cores == 3.0


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n",
            "my groups/cpu.max": "100000 100000",
        },
    )
    assert read_limits(root).quota_cores == 1.0


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::\n", "1:2\n"])
def test_no_cgroups_and_broken_files_mean_no_limit(tmp_path: Path, text: str) -> None:
    write_tree(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": text})
    assert read_limits(tmp_path) == CgroupLimits(
        version=None, quota_cores=None, memory_limit_bytes=None, memory_left_bytes=None
    )


def test_a_group_path_may_hold_colons() -> None:
    assert parse_self_cgroup("0::/a:b\n") == {"": PurePosixPath("/a:b")}


def test_v2_tells_marks_counters_and_cpus_of_the_own_group(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slurm/job_7"
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_7\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/slurm/memory.high": f"{6 * GIB}\n",
            "sys/fs/cgroup/slurm/memory.swap.max": "0\n",
            "sys/fs/cgroup/slurm/pids.max": "500\n",
            f"{group}/memory.high": "max\n",
            f"{group}/memory.max": f"{8 * GIB}\n",
            f"{group}/memory.current": f"{GIB}\n",
            f"{group}/memory.swap.max": "max\n",
            f"{group}/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
            f"{group}/pids.max": "max\n",
            f"{group}/pids.current": "41\n",
            f"{group}/cpuset.cpus.effective": "0-3,8\n",
        },
    )
    report = read_cgroup(root, read_limits(root))
    assert (report.path, report.cpuset, report.oom_kills) == ("/slurm/job_7", "0-3,8", 2)
    assert (report.memory_high_bytes, report.memory_limit_bytes, report.memory_used_bytes) == (6 * GIB, 8 * GIB, GIB)
    assert (report.swap_limit_bytes, report.pids_limit, report.pids_used) == (0, 500, 41)


def test_v1_reads_counters_of_each_controller_where_it_is_mounted(tmp_path: Path) -> None:
    mounts = V1_MOUNTS.format(root="/") + (
        "33 23 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
        "34 23 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    )
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a\n4:pids:/b\n3:cpuset:/c\n",
            "proc/self/mountinfo": mounts,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            "sys/fs/cgroup/pids/b/pids.max": "max\n",
            "sys/fs/cgroup/pids/pids.max": "2000\n",
            "sys/fs/cgroup/cpuset/c/cpuset.effective_cpus": "2-5\n",
        },
    )
    report = read_cgroup(root, read_limits(root))
    assert (report.path, report.memory_used_bytes, report.oom_kills) == ("/a", GIB, 4)
    assert (report.pids_limit, report.cpuset) == (2000, "2-5")


def test_where_both_versions_are_mounted_v1_has_the_controllers(tmp_path: Path) -> None:
    unified = "35 23 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    root = write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/a\n0::/u\n",
            "proc/self/mountinfo": unified + V1_MOUNTS.format(root="/"),
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "77\n",
            "sys/fs/cgroup/unified/u/pids.current": "3\n",
        },
    )
    report = read_cgroup(root, read_limits(root))
    assert (report.version, report.path, report.memory_used_bytes, report.pids_used) == ("v1+v2", "/a", 77, 3)
