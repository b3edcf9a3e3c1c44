"""What of a report is not as it should be, and the way out: rules over values, pure; several have modules beside this.

A rule says what will happen to a job, not that a number is small. Where a value is unknown it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.units import format_bytes

from ..report import ProbeReport
from ..verdict import Context, Level, ProbeVerdict
from .cuda_fit import CudaFit, FitGpu, cuda_fit, has_kernels
from .gpus import gpu_verdicts
from .limits import (
    FEW_PROCESSES,
    locked_memory_verdicts,
    open_files_verdicts,
    process_verdicts,
    shared_memory_verdicts,
)
from .rdma import rdma_verdicts, takes_rdma
from .room import room_verdicts, working_folder_verdicts
from .torch_build import torch_verdicts

_FEW_INODES = 10_000
#: Less is swapped out of any machine that has been up for a month.
_SWAPPED_BYTES = 1 << 30
#: Their `powersave` still clocks up under load.
_SELF_CLOCKING = ("intel_pstate", "amd-pstate-epp")

#: Of cuInit: what CUDA calls it, and the way out.
_CUDA_ERRORS = {
    100: ("no device", "are the device files there and yours (`ls -l /dev/nvidia*`)? In a container: `--gpus all`"),
    802: ("system not yet initialized", "`systemctl status nvidia-fabricmanager`, of the driver's version"),
    803: ("driver and libcuda do not fit", "take a folder with another libcuda out of LD_LIBRARY_PATH, or reboot"),
    804: ("no forward compatibility on this GPU", "update the driver, or take cuda-compat out of LD_LIBRARY_PATH"),
    999: ("unknown error", "`sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm`, or reboot"),
}
_ORDER: dict[Level, int] = {"red": 0, "amber": 1, "note": 2}


def judge(report: ProbeReport) -> tuple[ProbeVerdict, ...]:
    """Applies every rule; the worst first."""
    # Without GPUs ranks talk over Gloo, which takes no RDMA.
    context = Context(takes_rdma=bool(report.gpus) and takes_rdma(report), is_here=True)
    found = [
        *gpu_verdicts(report),
        *torch_verdicts(report.versions, gpus=report.gpus_usable, fit=fit_of(report), context=context),
        *_loaded(report),
        *locked_memory_verdicts(report.host.limits, has_cards=any(card.works for card in report.rdma), context=context),
        *open_files_verdicts(report.host.limits),
        *process_verdicts(report.host.limits),
        *shared_memory_verdicts(report.memory),
        *_memory(report),
        *_cpu(report),
        *_storage(report),
        *_network(report),
        *rdma_verdicts(report),
    ]
    return tuple(sorted(found, key=lambda verdict: _ORDER[verdict.level]))


def fit_of(report: ProbeReport) -> CudaFit | None:
    """Returns whether the installed torch runs on these GPUs; None without GPUs, or a torch for them."""
    if not report.gpus or report.versions.cuda is None:
        return None
    return cuda_fit(
        built=report.versions.cuda,
        driver=report.driver,
        newest=report.driver_cuda,
        libcuda=report.versions.libcuda,
        gpus=[FitGpu(name=gpu.name, capability=gpu.compute_capability) for gpu in report.gpus if gpu.usable],
        starts=report.loaded is not None and report.loaded.cuda_init == 0,
    )


def _loaded(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Yields what was found by trying: CUDA that does not start, GPUs that the imported torch has no kernels for."""
    loaded = report.loaded
    if loaded is None or not report.gpus_usable:
        return
    if loaded.cuda_init:
        text, fix = _CUDA_ERRORS.get(loaded.cuda_init, ("", "`nvidia-smi` and `dmesg | grep NVRM` say more"))
        told = f"CUDA does not start: error {loaded.cuda_init}{text and f', {text}'}"
        yield _verdict("red", told, fix, "loaded.cuda_init")
    without: dict[str, list[int]] = {}
    for gpu in report.gpus:
        capability = gpu.compute_capability
        if not gpu.usable or capability is None or not loaded.architectures:
            continue
        if not has_kernels(capability, loaded.architectures):
            without.setdefault(capability, []).append(gpu.index)
    for capability, indices in without.items():
        name = report.gpus[indices[0]].name or "GPU"
        text = f"torch {loaded.torch} has no kernels for {name} (sm {capability})"
        text += f": it has {', '.join(loaded.architectures)}"
        fix = "install a torch that is built for this GPU: https://pytorch.org/get-started"
        yield _verdict("red", text, fix, f"gpus.{indices[0]}.compute_capability")


def _memory(report: ProbeReport) -> Iterator[ProbeVerdict]:
    memory, group = report.memory, report.cgroup
    limit, total = group.memory_limit_bytes, memory.total_bytes
    # Who got two of eight GPUs may well have got a quarter of the memory.
    share = report.gpus_usable / len(report.gpus) if report.gpus and report.gpus_usable else 1.0
    if limit is not None and total is not None and limit < total * min(share, 1.0) / 2:
        text = f"the cgroup allows {format_bytes(limit)} of the machine's {format_bytes(total)}"
        fix = "ask the scheduler for more (`--mem`), or start the container with a larger `--memory`"
        yield _verdict("amber", text, fix, "cgroup.memory_limit_bytes")
    if group.oom_kills:
        text = f"the kernel killed {_count(group.oom_kills, 'process', 'processes')} of this cgroup for memory"
        yield _verdict("note", text, "`dsrun plan` tells what a job needs", "cgroup.oom_kills")
    if memory.swap_total_bytes is not None and memory.swap_free_bytes is not None:
        used = memory.swap_total_bytes - memory.swap_free_bytes
        if used >= _SWAPPED_BYTES:
            text = f"swap {format_bytes(used)} in use: what is swapped out comes back at the speed of a disk"
            fix = "end what holds the memory (`ps aux --sort -rss`), then `swapoff -a; swapon -a`"
            yield _verdict("amber", text, fix, "memory.swap_free_bytes")
    if memory.transparent_huge_pages == "never":
        fix = "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
        text = "transparent huge pages are off: steps on the CPU and pinned buffers are slower"
        yield _verdict("note", text, fix, "memory.transparent_huge_pages")


def _cpu(report: ProbeReport) -> Iterator[ProbeVerdict]:
    cpu, group = report.cpu, report.cgroup
    if cpu.quota_cores is not None and cpu.quota_cores < cpu.cores_in_affinity:
        text = f"a quota of {cpu.quota_cores:g} cores on {cpu.cores_in_affinity} CPUs"
        text += ": threads are stopped when it is used up"
        fix = "raise the container's `--cpus`, or give whole CPUs with `--cpuset-cpus`"
        yield _verdict("amber", text, fix, "cpu.quota_cores")
    if cpu.governor is not None and "powersave" in cpu.governor.split(", "):
        lazy = cpu.frequency_driver not in _SELF_CLOCKING
        text = f"CPU governor powersave ({cpu.frequency_driver or 'unknown driver'})"
        text += ": clocks stay low" if lazy else ": clocks rise late"
        yield _verdict("amber" if lazy else "note", text, "`cpupower frequency-set -g performance`", "cpu.governor")
    if group.pids_limit is not None and group.pids_limit < FEW_PROCESSES:
        text = f"the cgroup allows {group.pids_limit} processes and threads"
        yield _verdict("amber", text, "`docker run --pids-limit=-1`, or TasksMax= of the unit", "cgroup.pids_limit")


def _storage(report: ProbeReport) -> Iterator[ProbeVerdict]:
    for number, place in enumerate(report.storage.paths):
        path, asked = f"storage.paths.{number}", place.path != report.disk.path
        if place.answers is False:
            text = f"{place.path} does not answer ({place.filesystem} from {place.source}): jobs that touch it hang"
            fix = "is its server up? `umount -f -l` it if not"
            yield _verdict("red", text, fix, f"{path}.answers")
            continue
        if asked:
            yield from room_verdicts(place, path=path, context=Context())
        else:
            yield from working_folder_verdicts(place.path, free_bytes=place.free_bytes, fault=place.fault, path=path)
        if place.network:
            text = f"{place.path} is on a network file system ({place.filesystem})"
            text += ": offload there is slow" if asked else ": checkpoints and imports go over the network"
            fix = "use a local drive" if asked else "keep the environment and offload on a local drive"
            yield _verdict("amber" if asked else "note", text, fix, f"{path}.network")
        if place.direct_io is False and asked:
            text = f"{place.path} knows no O_DIRECT ({place.filesystem}): offload there fills the page cache"
            yield _verdict("amber", text, "use ext4 or XFS on a local drive", f"{path}.direct_io")
        if place.free_inodes is not None and place.free_inodes < _FEW_INODES:
            text = f"{place.path}: {place.free_inodes} more files can be made"
            yield _verdict("amber", text, "remove files there", f"{path}.free_inodes")
    for number, drive in enumerate(report.storage.nvme):
        link = drive.pcie
        if link.width is not None and link.width_max is not None and link.width < link.width_max:
            text = f"{drive.name} PCIe gen{link.generation} x{link.width} of gen{link.generation_max} x{link.width_max}"
            fix = "reseat the drive; look up how many lanes its slot has"
            yield _verdict("amber", text, fix, f"storage.nvme.{number}.pcie.width")


def _network(report: ProbeReport) -> Iterator[ProbeVerdict]:
    yield from _ports(report)
    # What is said of a card's port is not said of its interface again.
    cards = {card.interface for card in report.rdma}
    down = [(number, link) for number, link in enumerate(report.network) if link.state == "down"]
    fix = "check cable and switch: `ip link`, `ethtool`"
    for number, link in down:
        if link.addresses and link.interface not in cards:
            text = f"{link.interface} down, with address {link.addresses[0]}"
            yield _verdict("amber", text, fix, f"network.{number}.state")
    spare = [(number, link) for number, link in down if not link.addresses and link.interface not in cards]
    if spare:
        text = f"{', '.join(link.interface for _, link in spare)} down"
        yield _verdict("note", text, fix, f"network.{spare[0][0]}.state")
    if report.gloo_interface == "lo" and report.network:
        text = f"/etc/hosts gives {report.host.name} a loopback address: Gloo listens where no other host reaches"
        fix = "dsrun sets GLOO_SOCKET_IFNAME for jobs of several hosts; set it where you start torch otherwise"
        yield _verdict("note", text, fix, "gloo_interface")


def _ports(report: ProbeReport) -> Iterator[ProbeVerdict]:
    """Ports in the same state share a line."""
    idle: dict[tuple[str, str | None, bool], list[tuple[str, str]]] = {}
    for number, card in enumerate(report.rdma):
        for index, port in enumerate(card.ports):
            if port.state is not None and not port.is_up:
                path = f"rdma.{number}.ports.{index}.state"
                key = (port.state, port.physical, port.layer == "InfiniBand")
                idle.setdefault(key, []).append((f"{card.name}:{port.number}", path))
    for (state, physical, infiniband), ports in idle.items():
        fix = "check cable and switch: `ibstat`, `rdma link`"
        if state == "INIT" and infiniband:
            fix = "start a subnet manager (opensm) in the fabric"
        told = "" if physical is None else f" ({physical})"
        names = ", ".join(name for name, _ in ports)
        text = f"{names} {state}{told}: NCCL does not use {'it' if len(ports) == 1 else 'them'}"
        yield _verdict("amber", text, fix, ports[0][1])


def _verdict(level: Level, text: str, fix: str, path: str) -> ProbeVerdict:
    return ProbeVerdict(level=level, text=text, fix=fix, path=path)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
