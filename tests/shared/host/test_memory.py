"""Memory of the host: what the kernel counts without what belongs to GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.host.memory import HostMemory, parse_meminfo, read_host_memory
from dsrun.launcher.estimate.machine import machine_here
from support.machines import recorded_machine
from support.topologies import write_tree

GIB = 1 << 30


def test_meminfo_is_in_bytes_and_skips_what_is_no_size() -> None:
    assert parse_meminfo("MemTotal:  16 kB\nHugePages_Total: 0\nrubbish\n") == {"MemTotal": 16384}
    assert parse_meminfo("Node 1 MemTotal:       16 kB\nNode 1 Active(file):    1 kB\n") == {
        "MemTotal": 16384,
        "Active(file)": 1024,
    }


@pytest.mark.parametrize(
    ("name", "total_gib", "available_gib", "of_gpus_gib"),
    [
        ("gh200", 478, 520 - 92, 95),
        ("gh200_pair", 478 + 479, 1050 - 2 * 92, 2 * 95),
        ("gh200_quad", 118 + 3 * 119, 780 - 93 - 3 * 94, 4 * 95),
        ("dgx_h100", 2015, 1890, 0),
        ("dgx_spark", 119, 112, 0),
    ],
)
def test_memory_of_gpus_that_the_kernel_counts_is_not_the_hosts(
    tmp_path: Path, name: str, total_gib: int, available_gib: int, of_gpus_gib: int
) -> None:
    assert read_host_memory(recorded_machine(name, tmp_path).root) == HostMemory(
        total_bytes=total_gib * GIB, available_bytes=available_gib * GIB, of_gpus_bytes=of_gpus_gib * GIB
    )


def test_page_cache_in_the_memory_of_a_gpu_is_not_available_to_the_host(tmp_path: Path) -> None:
    machine = recorded_machine("gh200", tmp_path)
    node = machine.root / "sys/devices/system/node/node1/meminfo"
    node.write_text(f"Node 1 MemTotal: {95 << 20} kB\nNode 1 MemFree: {90 << 20} kB\nNode 1 FilePages: {4 << 20} kB\n")
    assert read_host_memory(machine.root).available_bytes == (520 - 94) * GIB


def test_memory_without_cpus_is_the_hosts_where_no_gpu_can_have_it(tmp_path: Path) -> None:
    """CXL, or the HBM of a Xeon: x86, with GPUs in the machine all the same."""
    machine = recorded_machine("l40s_pcie", tmp_path)
    write_tree(
        machine.root,
        {
            "sys/devices/system/node/node2/cpulist": "\n",
            "sys/devices/system/node/node2/meminfo": f"Node 2 MemTotal: {128 << 20} kB\nNode 2 MemFree: 8 kB\n",
        },
    )
    assert read_host_memory(machine.root).of_gpus_bytes == 0


def test_what_the_kernel_does_not_tell_is_none(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path) == HostMemory(total_bytes=None, available_bytes=None, of_gpus_bytes=0)


def test_a_plan_for_offload_has_the_memory_of_the_host_alone(tmp_path: Path) -> None:
    report = recorded_machine("gh200", tmp_path).report()
    assert (report.memory.total_bytes, report.memory.usable_bytes) == (478 * GIB, 428 * GIB)
    assert machine_here(report, ranks=None).host_memory_bytes == 428 * GIB
