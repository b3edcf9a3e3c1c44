from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.affinity import Binding
from dsrun.launcher.host_binding import read_bindings, read_gpu_nodes
from support.topologies import write_gpus, write_machine, write_tree


def test_ranks_run_beside_their_gpus(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1, 0, 0])
    far, near = Binding(cpus=(4, 5, 6, 7), threads=2), Binding(cpus=(0, 1, 2, 3), threads=2)
    assert read_bindings("auto", 4, {}, root=tmp_path, allowed=cpus) == (far, far, near, near)
    assert read_bindings("auto", 2, {"CUDA_VISIBLE_DEVICES": "3,0"}, root=tmp_path, allowed=cpus) == (
        Binding(cpus=(0, 1, 2, 3), threads=4),
        Binding(cpus=(4, 5, 6, 7), threads=4),
    )


def test_a_job_on_the_cpu_is_not_drawn_to_gpus_it_does_not_use(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1, 0, 0])
    found = read_bindings("auto", 2, {"DSRUN_BACKEND": "gloo"}, root=tmp_path, allowed=cpus)
    assert [one.cpus for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_ranks_that_share_gpus_are_bound_as_if_there_were_none(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1])
    found = read_bindings("auto", 2, {}, root=tmp_path, allowed=cpus)
    assert [one.cpus for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_quota_limits_the_threads_and_not_the_cpus(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, cores=8)
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        },
    )
    assert read_bindings("cores", 2, {}, root=tmp_path, allowed=cpus) == (
        Binding(cpus=(0, 1, 2, 3), threads=2),
        Binding(cpus=(4, 5, 6, 7), threads=2),
    )


def test_gpus_are_named_by_index_uuid_and_the_beginning_of_one(tmp_path: Path) -> None:
    uuids = write_gpus(tmp_path, [0, 1, -1])
    assert read_gpu_nodes(tmp_path, None) == (0, 1, None)
    assert read_gpu_nodes(tmp_path, f"{uuids[1]},0") == (1, 0)
    assert read_gpu_nodes(tmp_path, uuids[1][:13]) == (1,)
    assert read_gpu_nodes(tmp_path, "") == ()


def test_the_node_of_a_mig_slice_is_unknown(tmp_path: Path) -> None:
    write_gpus(tmp_path, [1, 1])
    assert read_gpu_nodes(tmp_path, "MIG-aaaa") == (None,)


@pytest.mark.parametrize("bind", ["auto", "numa", "cores", "none"])
def test_this_very_machine_can_be_bound(bind: str) -> None:
    for one in read_bindings(bind, 3, {"CUDA_VISIBLE_DEVICES": ""}):  # type: ignore[arg-type]
        assert one.threads >= 1
        assert one.cpus is None or set(one.cpus) <= os.sched_getaffinity(0)
