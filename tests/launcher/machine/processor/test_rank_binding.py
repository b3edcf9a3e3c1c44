"""Where ranks of one host run. That the probe shows the same is tested in test_recorded_machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.launcher.machine.gpus.read import read_gpus
from dsrun.launcher.machine.processor.rank_binding import read_bindings
from dsrun.launcher.plan.affinity import Binding
from dsrun.launcher.plan.launch_plan import GpuPlace
from support.machines import recorded_machine
from support.topologies import write_gpus, write_machine, write_tree


def test_ranks_run_beside_their_gpus(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1, 0, 0])
    far, near = Binding(cpus=(4, 5, 6, 7), threads=2), Binding(cpus=(0, 1, 2, 3), threads=2)
    assert read_bindings("auto", [{}] * 4, root=tmp_path, allowed=cpus) == (far, far, near, near)
    assert read_bindings("auto", [{"CUDA_VISIBLE_DEVICES": "3,0"}] * 2, root=tmp_path, allowed=cpus) == (
        Binding(cpus=(0, 1, 2, 3), threads=4),
        Binding(cpus=(4, 5, 6, 7), threads=4),
    )


def test_a_job_on_the_cpu_is_not_drawn_to_gpus_it_does_not_use(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1, 0, 0])
    found = read_bindings("auto", [{"DSRUN_BACKEND": "gloo"}] * 2, root=tmp_path, allowed=cpus)
    assert [one.cpus for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_ranks_that_share_gpus_are_bound_as_if_there_were_none(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1])
    found = read_bindings("auto", [{}] * 2, root=tmp_path, allowed=cpus)
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
    assert read_bindings("cores", [{}] * 2, root=tmp_path, allowed=cpus) == (
        Binding(cpus=(0, 1, 2, 3), threads=2),
        Binding(cpus=(4, 5, 6, 7), threads=2),
    )


def test_a_job_with_gpus_of_one_socket_is_bound_to_that_socket(tmp_path: Path) -> None:
    machine = recorded_machine("hgx_h200_job", tmp_path)
    bound = read_bindings("auto", [machine.environ] * 4, root=machine.root, allowed=machine.cpus, may_open=Path.is_file)
    second = (*range(56, 112), *range(168, 224))
    assert bound == (Binding(cpus=second, threads=14),) * 4


def test_gpus_that_sleep_are_found_by_the_names_that_the_driver_told(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    uuids = write_gpus(tmp_path, [1, 0])
    places = tuple(GpuPlace(uuid=uuid, address=f"0000:{16 * number + 1:02x}:00.0") for number, uuid in enumerate(uuids))
    for number in range(2):
        path = tmp_path / f"proc/driver/nvidia/gpus/0000:{16 * number + 1:02x}:00.0/information"
        path.write_text(path.read_text().replace(uuids[number], "GPU-????????-????-????-????-????????????"))
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    far, near = Binding(cpus=(4, 5, 6, 7), threads=4), Binding(cpus=(0, 1, 2, 3), threads=4)
    assert read_bindings("auto", [environ] * 2, gpus=places, root=tmp_path, allowed=cpus) == (far, near)


def test_each_rank_with_a_gpu_of_its_own_runs_beside_that_one(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 0])
    environs = [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0"}]
    found = read_bindings("auto", environs, root=tmp_path, allowed=cpus)
    assert [one.cpus for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_container_without_gpus_is_not_drawn_to_those_of_its_host(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1])
    for number in range(2):
        (tmp_path / f"dev/nvidia{number}").unlink()
    found = read_bindings("auto", [{}] * 2, root=tmp_path, allowed=cpus)
    assert [one.cpus for one in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_the_node_of_a_slice_is_its_gpus_where_the_driver_told_and_unknown_otherwise(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, cores=4)
    write_gpus(tmp_path, [1, 1])
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa"}
    cut = GpuPlace(uuid="GPU-0", address="0000:01:00.0", slices=("MIG-aaaa",))
    (told,) = read_bindings("auto", [environ], gpus=(cut,), root=tmp_path, allowed=cpus)
    (untold,) = read_bindings("auto", [environ], root=tmp_path, allowed=cpus)
    assert (told.cpus, untold.cpus) == ((4, 5, 6, 7), None)


def test_ranks_that_step_in_host_memory_get_the_whole_socket_of_their_gpu(tmp_path: Path) -> None:
    machine = recorded_machine("dgx_a100", tmp_path)
    gpus = read_gpus({}, load_nvml=machine.load_nvml, root=machine.root).places

    def bound(*, whole_sockets: bool) -> list[Binding]:
        return list(
            read_bindings(
                "auto", [{}] * 8, gpus=gpus, whole_sockets=whole_sockets, root=machine.root, allowed=machine.cpus
            )
        )

    sockets = ((*range(64), *range(128, 192)), (*range(64, 128), *range(192, 256)))
    assert bound(whole_sockets=True) == [
        *[Binding(cpus=sockets[0], threads=16)] * 4,
        *[Binding(cpus=sockets[1], threads=16)] * 4,
    ]
    assert {len(one.cpus or ()) for one in bound(whole_sockets=False)} == {32}


@pytest.mark.parametrize("bind", ["auto", "numa", "cores", "none"])
def test_this_very_machine_can_be_bound(bind: str) -> None:
    for one in read_bindings(bind, [{"CUDA_VISIBLE_DEVICES": ""}] * 3):  # type: ignore[arg-type]
        assert one.threads >= 1
        assert one.cpus is None or set(one.cpus) <= os.sched_getaffinity(0)
