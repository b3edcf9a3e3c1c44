"""Where the values of a report come from, and why those that are missing are. Knows the report by dotted paths only.

[Note: provenance] Every value of the JSON form has a dotted path (`gpus.0.state.power_limit_w`). `SOURCES` maps the
beginnings of paths to where values come from, and the longest beginning wins. A value is `measured` below `measured`,
`unknown` if it is null, with a reason in `null_reasons`, and `reported` otherwise: somebody (kernel, driver, package)
says so and nothing has tried it. So a value stays a plain number, and three words about it cost no wrapper each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Confidence = Literal["measured", "reported", "unknown"]

#: Beginning of a path -> where values come from. See [Note: provenance].
SOURCES: Mapping[str, str] = {
    "host": "uname, gethostname",
    "host.os": "/etc/os-release",
    "host.fqdn": "gethostname, /etc/hosts",
    "host.container": "KUBERNETES_SERVICE_HOST, /run/systemd/container, /.dockerenv and its kin",
    "host.machine": "/sys/class/dmi/id",
    "host.virtual": "/proc/cpuinfo",
    "host.boot_id": "/proc/sys/kernel/random/boot_id",
    "host.uptime_s": "/proc/uptime",
    "host.core_pattern": "/proc/sys/kernel/core_pattern",
    "host.user": "geteuid, the user database",
    "host.umask": "/proc/self/status",
    "host.limits": "/proc/self/limits",
    "cpu": "/sys/devices/system/cpu",
    "cpu.model": "/proc/cpuinfo",
    "cpu.isa": "/proc/cpuinfo",
    "cpu.cores_present": "/proc/cpuinfo",
    "cpu.cores_in_affinity": "sched_getaffinity",
    "cpu.quota_cores": "/proc/self/cgroup and every group up to the root",
    "cpu.cores_usable": "affinity and quota",
    "memory": "/proc/meminfo",
    "memory.cgroup_limit_bytes": "/proc/self/cgroup and every group up to the root",
    "memory.usable_bytes": "/proc/meminfo and cgroups",
    "memory.shm_total_bytes": "statvfs",
    "memory.shm_free_bytes": "statvfs",
    "memory.huge_pages": "/sys/kernel/mm/hugepages",
    "memory.transparent_huge_pages": "/sys/kernel/mm/transparent_hugepage",
    "cgroup_version": "/proc/self/mountinfo",
    "cgroup": "/proc/self/cgroup and every group up to the root",
    "numa": "/sys/devices/system/node",
    "binding": "the rule of `dsrun run --bind auto` over NUMA nodes, affinity and quota",
    "gpus": "NVML",
    "gpus.*.usable": "NVML, CUDA_VISIBLE_DEVICES",
    "gpus.*.cuda_index": "NVML, CUDA_VISIBLE_DEVICES",
    "gpus.*.numa_node": "/sys/bus/pci",
    "gpus.*.iommu": "/sys/bus/pci",
    "gpus.*.xids": "/dev/kmsg",
    "gpus.*.xid_events": "/dev/kmsg, /proc/uptime",
    "gpus_usable": "NVML, CUDA_VISIBLE_DEVICES",
    "gpus_left_out": "NVML",
    "gpus_unlisted": "NVML, /dev",
    "gpus_idle": "/sys/bus/pci, /dev",
    "gpus_unusable": "NVML, /sys/bus/pci, /dev, torch/version.py",
    "driver": "NVML",
    "driver_cuda": "NVML",
    "topology": "/sys/bus/pci, NVML",
    "topology.nvswitches": "/proc/driver/nvidia-nvswitch",
    "topology.fabric_manager": "/proc, /var/lib/dpkg/status",
    "topology.switch_events": "/dev/kmsg, /proc/uptime",
    "topology.peermem": "/sys/module",
    "topology.gdrcopy": "/sys/module",
    "topology.iommu_groups": "/sys/kernel/iommu_groups",
    "disk": "statvfs",
    "disk.path": "getcwd",
    "disk.filesystem": "/proc/self/mountinfo",
    "storage": "/sys/block",
    "storage.io_uring": "/proc/sys/kernel/io_uring_disabled",
    "storage.gds": "/proc/driver/nvidia-fs",
    "storage.paths": "/proc/self/mountinfo, statvfs",
    "storage.paths.*.direct_io": "open with O_DIRECT",
    "storage.paths.*.fault": "statvfs, access",
    "network": "/sys/class/net",
    "network.*.addresses": "getifaddrs",
    "network.*.default_route": "/proc/net/route",
    "rdma": "/sys/class/infiniband",
    "rdma.*.may_open": "/sys/class/infiniband_verbs and /dev/infiniband",
    "nccl_interface": "NCCL_SOCKET_IFNAME, or NCCL's order of interfaces",
    "gloo_interface": "GLOO_SOCKET_IFNAME, or /etc/hosts",
    "nccl_verbs": "libibverbs.so by LD_LIBRARY_PATH, /etc/ld.so.cache and /usr/lib",
    "nccl_net_plugin": "libnccl-net.so by LD_LIBRARY_PATH, /etc/ld.so.cache and /usr/lib",
    "versions": "package metadata",
    "versions.python": "this interpreter",
    "versions.python_path": "this interpreter",
    "versions.cuda": "torch/version.py",
    "versions.libcuda": "LD_LIBRARY_PATH, /etc/ld.so.cache",
    "software": "package metadata",
    "software.environment": "this interpreter",
    "software.prefix": "this interpreter",
    "software.torch_git": "torch/version.py",
    "software.compiler": "PATH",
    "software.nvcc": "PATH, CUDA_HOME",
    "software.mpi": "PATH",
    "software.variables": "environment",
    "loaded": "torch, imported by the target Python",
    "measured": "dsrun probe --bench",
}


_NO_LIMIT = "no limit"
_NO_CGROUP_LIMIT = "no cgroup limits it"
_MEMINFO = "/proc/meminfo does not tell it"
_NOT_BY_DRIVER = "the driver does not say"
_NOT_BY_SYS = "/sys does not tell it"

#: Beginning of a path -> why a value there may be missing, where nothing better is known when it is read.
WHY: Mapping[str, str] = {
    "host.os": "/etc/os-release does not name it",
    "host.container": "no sign of a container",
    "host.machine": "/sys/class/dmi/id does not name it",
    "host.virtual": "the processor does not say",
    "host.fqdn": "neither the host's name nor /etc/hosts has a domain, and no name server is asked",
    "host.boot_id": "/proc/sys/kernel/random does not tell it",
    "host.uptime_s": "/proc/uptime does not tell it",
    "host.core_pattern": "/proc/sys/kernel does not tell it",
    "host.umask": "/proc/self/status does not tell it",
    "host.limits": "/proc/self/limits does not tell them",
    **{f"host.limits.{name}": _NO_LIMIT for name in ("nofile", "nofile_hard", "memlock_bytes", "memlock_hard_bytes")},
    **{f"host.limits.{name}": _NO_LIMIT for name in ("nproc", "stack_bytes", "core_bytes")},
    "cpu": _NOT_BY_SYS,
    "cpu.model": "/proc/cpuinfo does not name it",
    "cpu.quota_cores": _NO_CGROUP_LIMIT,
    "cpu.governor": "no cpufreq: a virtual machine, or the firmware decides",
    "cpu.frequency_driver": "no cpufreq: a virtual machine, or the firmware decides",
    "memory": _MEMINFO,
    "memory.cgroup_limit_bytes": _NO_CGROUP_LIMIT,
    "memory.shm_total_bytes": "there is no /dev/shm",
    "memory.shm_free_bytes": "there is no /dev/shm",
    "memory.huge_pages": _NOT_BY_SYS,
    "memory.transparent_huge_pages": "the kernel has none",
    "cgroup_version": "no control groups are mounted",
    "cgroup": "the group does not tell it",
    "cgroup.version": "no control groups are mounted",
    "cgroup.path": "/proc/self/cgroup does not tell it",
    **{f"cgroup.{name}": _NO_CGROUP_LIMIT for name in ("quota_cores", "memory_limit_bytes", "memory_high_bytes")},
    **{f"cgroup.{name}": _NO_CGROUP_LIMIT for name in ("memory_left_bytes", "swap_limit_bytes", "pids_limit")},
    "numa": _NOT_BY_SYS,
    "binding": "ranks are not bound: their GPUs' nodes are unknown or have too few cores",
    "gpus": _NOT_BY_DRIVER,
    "gpus.*.cuda_index": "hidden by CUDA_VISIBLE_DEVICES, lost, or seen in slices only",
    "gpus.*.xids": "not asked of a GPU that is lost",
    "gpus.*.xid_events": "not asked of a GPU that is lost",
    "gpus.*.xid_events.*.fatal": "the driver does not say with this Xid",
    "gpus.*.xid_events.*.action": "the driver says with Xid 154 only",
    "gpus.*.xid_events.*.age_s": "the log has no times",
    "gpus.*.numa_node": "the kernel knows no node of it",
    "gpus.*.iommu": "no IOMMU",
    "gpus.*.nvlink.fabric": "in no fabric of NVSwitches, or the driver does not say",
    "gpus.*.nvlink.fabric_error": "none",
    "gpus.*.nvlink.version": "no link is up",
    "gpus.*.nvlink.link_mbyte_s": "no link is up, or the driver does not say",
    "gpus.*.nvlink.errors": "no links, or none of these counters",
    "gpus.*.state.recovery_action": "the driver is too old for that, or does not say",
    "gpus.*.state.retired_pages": "GPUs since Ampere remap rows instead",
    "gpus.*.state.processes": "the driver does not show them",
    "gpus.*.state.processes.*.user": "the process is not to be seen from here",
    "gpus_idle": "no GPU is there that this process was not given",
    "gpus_unusable": "no GPU is there that a job should use and cannot",
    "driver": _NOT_BY_DRIVER,
    "driver_cuda": _NOT_BY_DRIVER,
    "topology": _NOT_BY_SYS,
    "topology.nodes.*.numa_node": "the kernel knows no node of it",
    "topology.nodes.*.cpus": "the kernel knows no node of it",
    "topology.iommu_groups": "/sys/kernel/iommu_groups is not there",
    "topology.fabric_manager": "no NVSwitch is seen",
    "topology.fabric_manager.running": "the machine's processes are not to be seen from here",
    "topology.fabric_manager.version": "dpkg has no package of it",
    "topology.switch_events.*.age_s": "the log has no times",
    "disk": "statvfs fails",
    "disk.free_bytes": "statvfs fails, or the file system counts no blocks",
    "disk.path": "the working folder is gone",
    "disk.filesystem": "/proc/self/mountinfo does not tell it",
    "storage.io_uring": "the kernel has no switch for it",
    "storage.nvme": _NOT_BY_SYS,
    "storage.nvme.*.numa_node": "the kernel knows no node of it",
    "storage.paths": "/proc/self/mountinfo does not tell it",
    "storage.paths.*.total_bytes": "statvfs fails",
    "storage.paths.*.free_bytes": "statvfs fails, or the file system counts no blocks",
    "storage.paths.*.free_inodes": "the file system does not count them",
    "storage.paths.*.answers": "it is on no network",
    "storage.paths.*.fault": "none is known: files can be made there, or it does not answer",
    "storage.paths.*.direct_io": "no file without a name can be made there to try it",
    "network": _NOT_BY_SYS,
    "network.*.speed_mbit": "the interface does not say",
    "network.*.numa_node": "the kernel knows no node of it",
    "network.*.driver": "no card, or its driver is not named",
    "rdma": _NOT_BY_SYS,
    "rdma.*.ports.*.gid": "none that NCCL would take",
    "rdma.*.ports.*.gid_index": "none that NCCL would take",
    "rdma.*.interface": "no network interface belongs to it",
    "rdma.*.numa_node": "the kernel knows no node of it",
    "nccl_interface": "no interface that NCCL would take is up",
    "gloo_interface": "/etc/hosts does not name this host, and no name server is asked",
    "nccl_net_plugin": "the loader finds no libnccl-net.so",
    "nccl_verbs": "the loader finds no libibverbs.so",
    "rdma.*.kind": "the driver is none that is known, and no port says",
    "versions.dsrun": "not installed as a package",
    "versions.torch": "not installed beside this interpreter",
    "versions.libcuda": "the loader finds no libcuda.so.1, or its file does not say",
    "software": "not installed beside this interpreter",
    "software.torch_git": "torch/version.py does not tell it",
    "software.compiler": "no cc, gcc or clang in PATH",
    "software.nvcc": "neither in PATH nor in CUDA_HOME",
    "software.mpi": "no mpirun in PATH",
    "loaded": "not asked: `--deep` imports torch to tell",
    "loaded.driver_cuda": "torch is built without CUDA, or there is no libcuda.so.1",
    "loaded.cuda_init": "torch is built without CUDA, or there is no libcuda.so.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What is known of a value; `reason` says why it is missing."""

    source: str
    confidence: Confidence
    reason: str | None


def provenance(report: Mapping[str, Any], path: str) -> Provenance:
    """Tells where a value of a report comes from. See [Note: provenance].

    Args:
        report: the JSON form of a report, of this machine or another.
        path: dotted path of a value in it.

    Raises:
        KeyError: the report has no such value.
    """
    value: Any = report
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (IndexError, ValueError):
            raise KeyError(path) from None
    reasons: Mapping[str, str] = report.get("null_reasons", {})
    if value is None:
        return Provenance(source=source_of(path), confidence="unknown", reason=reasons.get(path))
    measured = path.split(".")[0] == "measured"
    return Provenance(source=source_of(path), confidence="measured" if measured else "reported", reason=None)


def source_of(path: str) -> str:
    """Returns where the value of a dotted path comes from; empty for what no source is named."""
    words = ["*" if part.isdecimal() else part for part in path.split(".")]
    beginnings = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((SOURCES[beginning] for beginning in beginnings if beginning in SOURCES), "")


def null_reasons(value: Any, path: str, reasons: Mapping[str, str]) -> dict[str, str]:
    """Gives every null below a value its reason.

    Args:
        value: plain JSON values.
        path: dotted path of the value.
        reasons: path with `*` for numbers, or its beginning, -> reason; the longest beginning wins.
    """
    if value is None:
        words = ["*" if part.isdecimal() else part for part in path.split(".")]
        beginnings = (".".join(words[:count]) for count in range(len(words), 0, -1))
        return {path: next((reasons[beginning] for beginning in beginnings if beginning in reasons), "not told")}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {
        inner: reason
        for key, item in items
        for inner, reason in null_reasons(item, f"{path}.{key}".lstrip("."), reasons).items()
    }
