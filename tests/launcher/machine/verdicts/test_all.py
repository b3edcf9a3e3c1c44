from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.launcher.machine.gpus.read import Gpu
from dsrun.launcher.machine.network.interfaces import NetworkReport, RdmaDevice, RdmaPort
from dsrun.launcher.machine.pci import PcieLink
from dsrun.launcher.machine.read import probe
from dsrun.launcher.machine.report import ProbeReport
from dsrun.launcher.machine.software.loaded_libraries import LoadedLibraries
from dsrun.launcher.machine.storage import NvmeDrive, PathReport
from dsrun.launcher.machine.verdicts.all import judge
from support.machines import recorded_machine
from support.topologies import write_tree

GIB = 1 << 30
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             100000               100000               processes
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
H100 = Gpu(
    index=0,
    uuid="GPU-1",
    name="NVIDIA H100 80GB HBM3",
    memory_total_bytes=80 * GIB,
    memory_free_bytes=80 * GIB,
    compute_capability="9.0",
    usable=True,
)
Change = Callable[[ProbeReport], ProbeReport]


@pytest.fixture
def well(tmp_path: Path) -> ProbeReport:
    """A report of which nothing is to be said."""
    write_tree(
        tmp_path,
        {
            "proc/self/limits": LIMITS,
            "proc/meminfo": f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {60 * GIB >> 10} kB\n",
            "usr/lib64/libibverbs.so.1": "",
            "torch-2.11.0.dist-info/METADATA": "Name: torch\nVersion: 2.11.0\n",
            "torch/version.py": "cuda = '12.8'\n",
        },
    )
    report = probe(root=tmp_path, environ={}, affinity=range(8), ask_addresses=dict, import_path=[str(tmp_path)])
    # What is below this test's folders is the test machine's own.
    calm = replace(
        report, memory=replace(report.memory, shm_total_bytes=8 * GIB), storage=replace(report.storage, paths=())
    )
    assert judge(calm) == ()
    return calm


def limits(**values: Any) -> Change:
    def change(report: ProbeReport) -> ProbeReport:
        assert report.host.limits is not None
        return replace(report, host=replace(report.host, limits=replace(report.host.limits, **values)))

    return change


def memory(**values: Any) -> Change:
    return lambda report: replace(report, memory=replace(report.memory, **values))


def cpu(**values: Any) -> Change:
    return lambda report: replace(report, cpu=replace(report.cpu, **values))


def cgroup(**values: Any) -> Change:
    return lambda report: replace(report, cgroup=replace(report.cgroup, **values))


def versions(*, gpus: tuple[Gpu, ...] = (), **values: Any) -> Change:
    return lambda report: replace(
        report,
        versions=replace(report.versions, **values),
        driver_cuda="12.4",
        driver="550.1",
        gpus=gpus,
        gpus_usable=len(gpus),
    )


def loaded(**values: Any) -> Change:
    """What a torch said that was imported on a machine with one H100."""
    told: dict[str, Any] = {"torch": "2.13.0+cu130", "cuda_built": "13.0", "cuda_available": True, "devices": 1}
    told |= {"cudnn": None, "nccl": None, "gloo": True, "mpi": False, "threads": 4, "libraries": ()}
    told |= {"architectures": ("sm_75", "sm_90"), "driver_cuda": "13.0", "cuda_init": 0, **values}
    return lambda report: replace(report, gpus=(H100,), gpus_usable=1, loaded=LoadedLibraries(**told))


def path(name: str, **values: Any) -> Change:
    told: dict[str, Any] = {"mount": "/", "source": "/dev/sda", "filesystem": "ext4", "network": False, "answers": None}
    told |= {
        "there": name,
        "fault": None,
        "read_only": False,
        "total_bytes": 900 * GIB,
        "free_bytes": 900 * GIB,
        "free_inodes": 1 << 20,
        "direct_io": True,
    }
    told |= {"path": name, **values}
    place = PathReport(**told)
    return lambda report: replace(
        report,
        disk=replace(report.disk, path="/work"),
        storage=replace(report.storage, paths=(*report.storage.paths, place)),
    )


def drive(width: int) -> Change:
    link = PcieLink(generation=4, width=width, generation_max=4, width_max=4)
    told = {"model": None, "firmware": None, "size_bytes": 1, "numa_node": 0, "queue_depth": 1, "mounts": ()}
    found = NvmeDrive(name="nvme0n1", pcie=link, **told)  # pyright: ignore[reportArgumentType]
    return lambda report: replace(report, storage=replace(report.storage, nvme=(found,)))


def interface(name: str, *addresses: str, state: str) -> Change:
    link = NetworkReport(
        interface=name,
        kind="ethernet",
        state=state,
        mtu=1500,
        speed_mbit=None,
        driver=None,
        addresses=addresses,
        default_route=False,
        numa_node=None,
    )
    return lambda report: replace(report, network=(*report.network, link))


def card(name: str, state: str, layer: str = "InfiniBand", physical: str | None = None) -> Change:
    port = RdmaPort(
        number=1,
        layer=layer,
        state=state,
        physical=physical,
        rate_gbit=200,
        link_downed=0,
        symbol_errors=0,
        gid_index=None,
        gid=None,
    )
    found = RdmaDevice(
        name=name,
        kind="InfiniBand" if layer == "InfiniBand" else "RoCE",
        firmware=None,
        interface=f"net{name}",
        pci_address=None,
        numa_node=None,
        ports=(port,),
    )
    return lambda report: replace(report, rdma=(*report.rdma, found))


def both(*changes: Change) -> Change:
    def change(report: ProbeReport) -> ProbeReport:
        for one in changes:
            report = one(report)
        return report

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (versions(torch=None, cuda=None), "amber versions.torch: torch is not installed beside Python at"),
        (
            versions(cuda="13.0", gpus=(H100,)),
            "red versions.cuda: torch is built for CUDA 13.0, driver 550.1 runs up to 12.4",
        ),
        (
            versions(cuda="13.0", libcuda="580.65.06", gpus=(H100,)),
            "note versions.cuda: torch is built for CUDA 13.0, libcuda 580.65.06 runs it on driver 550.1 (forward",
        ),
        (
            loaded(cuda_init=802, cuda_available=False, devices=0),
            "red loaded.cuda_init: CUDA does not start: error 802, system not yet initialized",
        ),
        (loaded(cuda_init=46), "red loaded.cuda_init: CUDA does not start: error 46"),
        (
            loaded(architectures=("sm_100", "sm_120")),
            "red gpus.0.compute_capability: torch 2.13.0+cu130 has no kernels for NVIDIA H100 80GB HBM3 (sm 9.0): it "
            "has sm_100, sm_120",
        ),
        (
            both(limits(memlock_bytes=65536), card("mlx5_0", "ACTIVE")),
            "amber host.limits.memlock_bytes: 64.0 KiB may be locked: RDMA fails with so little",
        ),
        (limits(nofile=1024), "amber host.limits.nofile: 1024 open files, few for many ranks and data loaders"),
        (limits(nproc=500), "amber host.limits.nproc: nproc 500: threads of ranks"),
        (
            memory(shm_total_bytes=64 << 20),
            "amber memory.shm_total_bytes: /dev/shm of 64.0 MiB, small for",
        ),
        (memory(shm_total_bytes=None), "red memory.shm_total_bytes: /dev/shm is not there"),
        (memory(shm_free_bytes=1 << 20), "amber memory.shm_free_bytes: /dev/shm is full"),
        (
            cgroup(memory_limit_bytes=16 * GIB),
            "amber cgroup.memory_limit_bytes: the cgroup allows 16.0 GiB of the machine's 64.0 GiB",
        ),
        (cgroup(oom_kills=1), "note cgroup.oom_kills: the kernel killed 1 process of this cgroup for memory"),
        (cgroup(pids_limit=100), "amber cgroup.pids_limit: the cgroup allows 100 processes and threads"),
        (
            memory(swap_total_bytes=8 * GIB, swap_free_bytes=5 * GIB),
            "amber memory.swap_free_bytes: swap 3.0 GiB in use",
        ),
        (memory(transparent_huge_pages="never"), "note memory.transparent_huge_pages: transparent huge pages are off"),
        (cpu(quota_cores=2.5), "amber cpu.quota_cores: a quota of 2.5 cores on 8 CPUs"),
        (cpu(governor="powersave", frequency_driver="acpi-cpufreq"), "amber cpu.governor: CPU governor powersave"),
        (cpu(governor="performance, powersave", frequency_driver="intel_pstate"), "note cpu.governor: CPU governor"),
        (path("/work", network=True, filesystem="nfs4"), "note storage.paths.0.network: /work is on a network file"),
        (
            both(path("/work"), path("/nvme", network=True, filesystem="nfs4")),
            "amber storage.paths.1.network: /nvme is on a network file system (nfs4): offload there is slow",
        ),
        (
            path("/nvme", direct_io=False, filesystem="tmpfs"),
            "amber storage.paths.0.direct_io: /nvme knows no O_DIRECT",
        ),
        (path("/work", fault="is read-only"), "amber storage.paths.0.fault: the working folder /work is read-only"),
        (path("/nvme", fault="is read-only"), "amber storage.paths.0.fault: /nvme is read-only"),
        (
            path("/work", free_bytes=GIB - 1),
            "amber storage.paths.0.free_bytes: 1024.0 MiB free in the working folder /work",
        ),
        (path("/nvme", free_bytes=3 * GIB), "amber storage.paths.0.free_bytes: 3.0 GiB free for /nvme"),
        (path("/nvme", free_bytes=0), "amber storage.paths.0.free_bytes: no space left for /nvme"),
        (path("/work", free_inodes=12), "amber storage.paths.0.free_inodes: /work: 12 more files can be made"),
        (drive(2), "amber storage.nvme.0.pcie.width: nvme0n1 PCIe gen4 x2 of gen4 x4"),
        (
            both(interface("eno1", state="down"), interface("eno2", state="down")),
            "note network.0.state: eno1, eno2 down",
        ),
        (interface("eno1", "10.0.0.5", state="down"), "amber network.0.state: eno1 down, with address 10.0.0.5"),
        (
            both(card("mlx5_0", "DOWN", physical="Polling"), card("mlx5_1", "DOWN", physical="Polling")),
            "amber rdma.0.ports.0.state: mlx5_0:1, mlx5_1:1 DOWN (Polling): NCCL does not use them",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_path_and_a_way_out(well: ProbeReport, change: Change, said: str) -> None:
    (verdict,) = judge(change(well))
    assert f"{verdict.level} {verdict.path}: {verdict.text}".startswith(said)
    assert verdict.fix


@pytest.mark.parametrize(
    "change",
    [
        limits(memlock_bytes=65536),
        limits(nofile=None, nproc=None),
        versions(cuda="12.8", gpus=(H100,)),
        loaded(),
        loaded(architectures=("sm_80", "compute_80")),
        loaded(architectures=(), cuda_init=None),
        versions(cuda=None),
        cgroup(memory_limit_bytes=40 * GIB),
        memory(swap_total_bytes=8 * GIB, swap_free_bytes=int(7.5 * GIB)),
        memory(transparent_huge_pages="madvise"),
        cpu(quota_cores=8.0),
        path("/work", direct_io=False, filesystem="tmpfs"),
        path("/nvme", direct_io=None, free_inodes=None),
        path("/nvme", free_bytes=None),
        path("/work", free_bytes=GIB),
        drive(4),
        interface("eno1", "10.0.0.5", state="up"),
        both(card("mlx5_0", "ACTIVE"), limits(memlock_bytes=None)),
    ],
)
def test_what_is_as_it_should_be_is_not_spoken_of(well: ProbeReport, change: Change) -> None:
    assert judge(change(well)) == ()


def test_a_port_without_a_subnet_manager_is_told_to_start_one(well: ProbeReport) -> None:
    (verdict,) = judge(card("mlx5_0", "INIT", physical="LinkUp")(well))
    assert "subnet manager" in verdict.fix
    (verdict,) = judge(card("mlx5_0", "INIT", layer="Ethernet")(well))
    assert "subnet manager" not in verdict.fix


def test_an_interface_of_a_port_that_is_spoken_of_is_not_spoken_of_again(well: ProbeReport) -> None:
    report = both(card("mlx5_0", "DOWN"), interface("netmlx5_0", state="down"))(well)
    assert [verdict.path for verdict in judge(report)] == ["rdma.0.ports.0.state"]


def test_a_loopback_address_for_the_own_name_is_a_note(well: ProbeReport) -> None:
    report = replace(interface("eth0", "10.0.0.5", state="up")(well), gloo_interface="lo")
    (verdict,) = judge(report)
    assert (verdict.level, verdict.path) == ("note", "gloo_interface")


def test_the_worst_comes_first(tmp_path: Path) -> None:
    levels = [verdict.level for verdict in recorded_machine("l40s_pcie", tmp_path).report().verdicts]
    assert levels == sorted(levels, key=["red", "amber", "note"].index)
    assert set(levels) == {"red", "amber", "note"}


def test_a_share_of_the_gpus_makes_the_same_share_of_memory_enough(tmp_path: Path) -> None:
    machine = recorded_machine("dgx_h100", tmp_path)
    write_tree(tmp_path, {"sys/fs/cgroup/user.slice/memory.max": f"{400 * GIB}\n"})
    few, all_of_them = machine.report({"CUDA_VISIBLE_DEVICES": "0,1"}), machine.report()
    assert "cgroup.memory_limit_bytes" not in [verdict.path for verdict in few.verdicts]
    assert "cgroup.memory_limit_bytes" in [verdict.path for verdict in all_of_them.verdicts]


def test_a_machine_without_cards_for_rdma_needs_no_locked_memory(well: ProbeReport) -> None:
    report = both(limits(memlock_bytes=65536), lambda report: replace(report, gpus=(H100,)))(well)
    assert not [one for one in judge(report) if one.path == "host.limits.memlock_bytes"]


@pytest.mark.parametrize(("may_open", "levels"), [(True, ["red"]), (False, [])])
def test_little_locked_memory_stops_ranks_on_gpus_that_may_open_a_card(
    well: ProbeReport, may_open: bool, levels: list[str]
) -> None:
    change = both(limits(memlock_bytes=65536), card("mlx5_0", "ACTIVE"), lambda report: replace(report, gpus=(H100,)))
    report = change(well)
    report = replace(report, rdma=tuple(replace(card, may_open=may_open) for card in report.rdma))
    assert [one.level for one in judge(report) if one.path == "host.limits.memlock_bytes"] == levels


@pytest.mark.parametrize("variable", ["NCCL_NET_PLUGIN=spcx", "NCCL_NET=FastSocket"])
def test_a_network_that_was_named_needs_no_locked_memory_where_no_card_can_be_opened(
    tmp_path: Path, variable: str
) -> None:
    name, _, value = variable.partition("=")
    machine = recorded_machine("dgx_a100", tmp_path)
    before = limits(memlock_bytes=65536)(machine.report({name: value}))
    assert [one.level for one in judge(before) if one.path == "host.limits.memlock_bytes"] == ["red"]
    (tmp_path / "dev/infiniband").rename(tmp_path / "away")
    report = limits(memlock_bytes=65536)(machine.report({name: value}))
    assert not [one for one in judge(report) if one.path == "host.limits.memlock_bytes"]


def test_gpus_that_stay_idle_for_a_cpu_build_are_those_that_jobs_see(tmp_path: Path) -> None:
    report = recorded_machine("workstation", tmp_path).report({"CUDA_VISIBLE_DEVICES": "0,2"})
    report = replace(report, versions=replace(report.versions, torch="2.13.0+cpu", cuda=None))
    (found,) = [one for one in judge(report) if one.path == "versions.cuda"]
    assert found.text.endswith("jobs train on the CPU, and 2 GPUs stay idle")
