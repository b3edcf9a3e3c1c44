from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.launcher.machine.cgroup import CgroupLimits
from dsrun.launcher.machine.memory import HugePages, chosen_word, read_memory
from dsrun.launcher.machine.proc_files import parse_cpuinfo
from dsrun.launcher.machine.processor.model import CacheReport, parse_size, read_cpu
from dsrun.launcher.machine.processor.numa import cpu_list, node_cpus
from dsrun.launcher.machine.processor.topology import parse_cpu_list
from support.machines import recorded_machine
from support.topologies import write_machine, write_tree

GIB = 1 << 30
NO_LIMITS = CgroupLimits(version=None, quota_cores=None, memory_limit_bytes=None, memory_left_bytes=None)
EMPTY = parse_cpuinfo("")


@pytest.mark.parametrize(
    ("text", "size"), [("2048K\n", 2 << 20), ("105M", 105 << 20), ("64", 64), ("", None), ("xK", None)]
)
def test_sizes_of_caches_are_bytes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_sockets_cores_and_threads_are_counted(tmp_path: Path) -> None:
    cpus = write_machine(tmp_path, packages=2, nodes=2, cores=4, threads=2)
    write_tree(tmp_path, {"sys/devices/system/cpu/online": f"0-{len(cpus) - 1}\n"})
    report = read_cpu(tmp_path, EMPTY, affinity=range(6), quota_cores=4.5)
    assert (report.sockets, report.cores, report.threads_per_core, report.cores_present) == (2, 16, 2, 32)
    assert (report.cores_in_affinity, report.cores_usable) == (6, 4)


def test_caches_and_governors_are_told(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    write_tree(
        tmp_path,
        {
            f"{cpu}/cpu0/cache/index3/level": "3\n",
            f"{cpu}/cpu0/cache/index3/type": "Unified\n",
            f"{cpu}/cpu0/cache/index3/size": "107520K\n",
            f"{cpu}/cpu0/cache/index3/shared_cpu_list": "0-55,112-167\n",
            f"{cpu}/cpu0/cache/index0/level": "1\n",
            f"{cpu}/cpu0/cache/index0/type": "Data\n",
            f"{cpu}/cpu0/cache/uevent": "\n",
            f"{cpu}/cpufreq/policy0/scaling_governor": "powersave\n",
            f"{cpu}/cpufreq/policy1/scaling_governor": "performance\n",
            f"{cpu}/cpufreq/policy0/scaling_driver": "intel_pstate\n",
        },
    )
    report = read_cpu(tmp_path, EMPTY, affinity=range(2), quota_cores=None)
    assert report.caches == (
        CacheReport(level=1, kind="data", size_bytes=None, shared_by=None),
        CacheReport(level=3, kind="unified", size_bytes=105 << 20, shared_by=112),
    )
    assert (report.governor, report.frequency_driver) == ("performance, powersave", "intel_pstate")
    assert (report.sockets, report.cores, report.threads_per_core) == (None, None, None)


def test_huge_pages_are_told_where_some_were_set_aside(tmp_path: Path) -> None:
    pages = "sys/kernel/mm/hugepages"
    write_tree(
        tmp_path,
        {
            f"{pages}/hugepages-2048kB/nr_hugepages": "64\n",
            f"{pages}/hugepages-2048kB/free_hugepages": "60\n",
            f"{pages}/hugepages-1048576kB/nr_hugepages": "0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        },
    )
    memory = read_memory(tmp_path, NO_LIMITS)
    assert memory.huge_pages == (HugePages(size_bytes=2 << 20, total=64, free=60),)
    assert (memory.transparent_huge_pages, memory.total_bytes) == ("never", None)


def test_a_choice_is_the_word_in_brackets() -> None:
    assert (chosen_word("always [madvise] never\n"), chosen_word("madvise")) == ("madvise", None)


def test_nodes_are_told_with_all_that_is_wired_to_them(tmp_path: Path) -> None:
    nodes = recorded_machine("dgx_h100", tmp_path).report(affinity=range(8)).numa
    assert [(node.node, node.gpus, node.nvme) for node in nodes] == [
        (0, (0, 1, 2, 3), ("nvme0n1", "nvme2n1")),
        (1, (4, 5, 6, 7), ("nvme3n1",)),
    ]
    assert nodes[1].nics == ("mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11")
    assert (nodes[0].cpus, nodes[0].cpus_usable, nodes[1].cpus_usable) == ("0-55,112-167", 8, 0)
    assert (nodes[0].distances, nodes[0].memory_total_bytes) == ((10, 21), 1007 * GIB)


def test_ranks_would_run_beside_their_gpus_in_the_order_of_the_job(tmp_path: Path) -> None:
    report = recorded_machine("dgx_h100", tmp_path).report({"CUDA_VISIBLE_DEVICES": "5,4,1,0"})
    assert [(rank.local_rank, rank.gpu, rank.cpus) for rank in report.binding] == [
        (0, 5, "56-111,168-223"),
        (1, 4, "56-111,168-223"),
        (2, 1, "0-55,112-167"),
        (3, 0, "0-55,112-167"),
    ]
    assert {rank.threads for rank in report.binding} == {28}


def test_no_gpu_is_no_rank(tmp_path: Path) -> None:
    assert recorded_machine("workstation", tmp_path).report({"CUDA_VISIBLE_DEVICES": ""}).binding == ()


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((1, 0, 2, 8, 10, 11), "0-2,8,10-11"), ((5, 7), "5,7")]
)
def test_cpus_are_listed_as_the_kernel_does(numbers: tuple[int, ...], text: str) -> None:
    assert cpu_list(numbers) == text
    assert parse_cpu_list(text) == tuple(sorted(numbers))


def test_interfaces_of_no_rdma_card_are_wired_to_nodes_too(tmp_path: Path) -> None:
    (node,) = recorded_machine("workstation", tmp_path).report().numa
    assert (node.nics, node.gpus) == (("enp36s0f0", "enp36s0f1"), (0, 1, 2, 3))


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert node_cpus(tmp_path) == {}
