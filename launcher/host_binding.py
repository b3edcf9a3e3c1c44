"""The bindings of this host's ranks: what the kernel, the control groups and the GPU driver say, given to `affinity`.

Runs in the agent, so it needs the standard library only and asks the driver through /proc, not NVML. Binds nothing by
itself. The nodes of GPUs are tested on made-up trees; no machine with several NUMA nodes was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from dsrun.contract import BACKEND_ENV

from .affinity import Binding, bind_ranks
from .cpu_topology import read_cpus
from .plan import Bind
from .probe_cgroup import read_limits
from .probe_gpu import visible_devices
from .probe_machine import read_text


def read_bindings(
    bind: Bind,
    local_ranks: int,
    environ: Mapping[str, str],
    *,
    root: Path = Path("/"),
    allowed: Collection[int] | None = None,
) -> tuple[Binding, ...]:
    """Returns where each rank of this host runs, and how many threads it should start.

    The threads are what OMP_NUM_THREADS should say unless the user has set it; that is not looked at here.

    Args:
        bind: what was asked for.
        local_ranks: ranks on this host.
        environ: what all ranks get, the plan's variables included: CUDA_VISIBLE_DEVICES says which GPU rank N uses,
            and DSRUN_BACKEND=gloo that it uses none.
        root: `/`, or a made-up tree with proc and sys.
        allowed: CPUs this process may be scheduled on; asked of the kernel if None.
    """
    cpus = read_cpus(root, allowed=os.sched_getaffinity(0) if allowed is None else allowed)
    gpu_nodes = [] if environ.get(BACKEND_ENV) == "gloo" else read_gpu_nodes(root, environ.get("CUDA_VISIBLE_DEVICES"))
    own = [gpu_nodes[rank] if rank < len(gpu_nodes) else None for rank in range(local_ranks)]
    return bind_ranks(cpus, bind=bind, gpu_nodes=own, quota_cores=read_limits(root).quota_cores)


def read_gpu_nodes(root: Path, visible: str | None) -> tuple[int | None, ...]:
    """Returns the NUMA node of each GPU a job sees, in the order in which it sees them.

    CUDA may number unequal GPUs by speed unless CUDA_DEVICE_ORDER says PCI_BUS_ID; PCI order is taken here, as by NVML.

    Args:
        root: `/`, or a made-up tree.
        visible: CUDA_VISIBLE_DEVICES, None where it is not set.

    Returns:
        None for a MIG slice (its parent is told by NVML only) and where firmware gives no node.
    """
    try:
        addresses = sorted(entry.name for entry in (root / "proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return ()
    nodes = [_node_of(root, address) for address in addresses]
    chosen = visible_devices(visible, [_uuid_of(root, address) for address in addresses])
    return tuple(None if index is None else nodes[index] for index in chosen)


def _uuid_of(root: Path, address: str) -> str | None:
    for line in (read_text(root / f"proc/driver/nvidia/gpus/{address}/information") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "GPU UUID":
            return value.strip()
    return None


def _node_of(root: Path, address: str) -> int | None:
    text = (read_text(root / f"sys/bus/pci/devices/{address.lower()}/numa_node") or "").strip()
    # -1: the firmware does not say.
    return int(text) if text.isdecimal() else None
