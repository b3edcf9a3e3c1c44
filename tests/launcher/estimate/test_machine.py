"""Options and probe reports become one machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.estimate.machine import find_machine, machine_here
from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.read import ProbeReport, probe
from support.machines import recorded_machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpus", "ranks", "per_host", "name"),
    [
        ("8xH100-80G", 8, 8, "H100-80G"),
        ("128xH100-80G", 128, 8, "H100-80G"),
        ("2x4xA100-40G", 8, 4, "A100-40G"),
        ("4xrtx 4090", 4, 4, "RTX4090-24G"),
        ("H200", 1, 1, "H200-141G"),
    ],
)
def test_gpus_are_hosts_times_count_times_name(gpus: str, ranks: int, per_host: int, name: str) -> None:
    machine = find_machine(gpus=gpus, hostfile=None, ranks=None)
    assert machine.gpu is not None
    assert (machine.ranks, machine.ranks_per_host, machine.gpu.name) == (ranks, per_host, name)


@pytest.mark.parametrize("gpus", ["", "8x", "0xH100", "8", "x", "8*H100", "8xH100xH100!"])
def test_gpus_of_another_form_are_refused(gpus: str) -> None:
    with pytest.raises(UsageError):
        find_machine(gpus=gpus, hostfile=None, ranks=None)


def test_a_count_beside_a_hostfile_is_one_too_many(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\n")
    with pytest.raises(UsageError) as error:
        find_machine(gpus="8xH100", hostfile=str(tmp_path / "hosts"), ranks=None)
    assert error.value.render() == (
        "error: `--gpus 8xH100` and `--hostfile` both say how many ranks there are\n"
        "hint: beside `--hostfile` name the GPU alone: `--gpus H100-80G`"
    )


def test_stated_speeds_and_sizes_go_before_the_catalogue() -> None:
    machine = find_machine(
        gpus="8xH100", hostfile=None, ranks=None, host_memory="1.5T", nvme="7T", speeds=["flops=700", "network=100"]
    )
    assert machine.host_memory_bytes == 1536 * GIB
    assert machine.nvme_bytes == 7168 * GIB
    speeds = machine.speeds(half=True)
    assert (speeds.flops, speeds.network) == (700e12, 100e9)
    assert speeds.memory == pytest.approx(0.9 * 3350e9)
    assert speeds.nvme_read is None


def report(*free: int, product: str = "NVIDIA H200") -> ProbeReport:
    """This machine with made-up GPUs that have `free` bytes each."""
    gpus = tuple(
        Gpu(
            index=index,
            uuid=None,
            name=product,
            memory_total_bytes=140 * GIB,
            memory_free_bytes=size,
            compute_capability="9.0",
            usable=True,
        )
        for index, size in enumerate(free)
    )
    return replace(probe(), gpus=gpus, gpus_usable=len(gpus))


def test_this_machine_has_a_rank_a_gpu_and_the_memory_of_the_fullest() -> None:
    machine = machine_here(report(139 * GIB, 100 * GIB), ranks=None)
    assert machine.gpu is not None
    assert (machine.ranks, machine.gpu.name, machine.gpu_memory_bytes) == (2, "H200-141G", 100 * GIB)


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    assert machine_here(report(120 * GIB), ranks=4).gpu_memory_bytes == 30 * GIB


def test_a_gpu_that_is_not_in_the_catalogue_has_memory_and_no_speeds() -> None:
    machine = machine_here(report(10 * GIB, product="NVIDIA GeForce GTX 1080"), ranks=None)
    assert (machine.gpu, machine.gpu_memory_bytes) == (None, 10 * GIB)
    assert machine.speeds(half=True).flops is None
    assert "NVIDIA GeForce GTX 1080 is not in the catalogue, so its speeds are not known" in machine.notes


def test_ranks_on_the_cpu_share_what_the_machine_has_left() -> None:
    machine = machine_here(report(139 * GIB), ranks=3, use_gpus=False)
    assert machine.on_cpu
    assert machine.ranks_per_host == 3
    assert machine.host_memory_bytes is not None


def test_ranks_on_the_cpu_share_the_cores_that_the_job_may_use_and_gpus_share_none() -> None:
    seen = report(139 * GIB)
    two = replace(seen, cpu=replace(seen.cpu, cores_usable=2))
    assert machine_here(two, ranks=3, use_gpus=False).ranks_per_core == 1.5
    assert machine_here(two, ranks=1, use_gpus=False).ranks_per_core == 1
    assert machine_here(two, ranks=3).cores_per_host is None


def test_a_gpu_whose_memory_the_driver_does_not_tell_has_the_hosts(tmp_path: Path) -> None:
    spark = recorded_machine("dgx_spark", tmp_path).report()
    machine = machine_here(spark, ranks=None)
    assert not machine.on_cpu
    assert (machine.label, machine.ranks) == ("1 x NVIDIA GB10 of this machine", 1)
    assert machine.gpu_memory_bytes == spark.memory.usable_bytes
    assert machine.notes[0].startswith(
        "the driver tells no memory of NVIDIA GB10: it is taken to be this machine's own"
    )


@pytest.mark.parametrize("ranks", [None, 4])
def test_a_plan_for_a_machine_whose_driver_fails_is_none_for_its_cpu(tmp_path: Path, ranks: int | None) -> None:
    broken = recorded_machine("workstation", tmp_path, driver_fails="LibRmVersionMismatch")
    with pytest.raises(UsageError, match="the GPUs of this machine cannot be used: Driver/library version") as error:
        find_machine(gpus=None, hostfile=None, ranks=ranks, look=broken.report)
    assert "`--gpus 8xH100-80G` plans for GPUs that are named" in (error.value.problems[0].hint or "")
    assert find_machine(gpus="4xA100-80G", hostfile=None, ranks=None, look=broken.report).ranks == 4
    hidden = find_machine(
        gpus=None, hostfile=None, ranks=ranks, look=lambda: broken.report({"CUDA_VISIBLE_DEVICES": ""})
    )
    assert hidden.on_cpu
