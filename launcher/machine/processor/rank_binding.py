"""The bindings of this host's ranks: what the kernel, the control groups and the GPU driver say, given to `affinity`.

Runs in the agent, and in the front end for the eye. Binds nothing by itself; which GPU is whose stands in
`devices/by_rank.py`. Tested on recorded machines; no machine with several NUMA nodes was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from dsrun.contract.environment import BACKEND_ENV

from ...plan.affinity import Binding, bind_ranks
from ...plan.launch_plan import Bind, GpuPlace
from ..cgroup import read_limits
from ..devices.by_rank import find_gpus, gpus_of_ranks
from ..pci import read_number
from .topology import read_cpus


def read_bindings(
    bind: Bind,
    environs: Sequence[Mapping[str, str]],
    *,
    gpus: Sequence[GpuPlace] = (),
    whole_sockets: bool = False,
    root: Path = Path("/"),
    allowed: Collection[int] | None = None,
    may_open: Callable[[Path], bool] | None = None,
) -> tuple[Binding, ...]:
    """Returns where each rank of this host runs, and how many threads it should start.

    The threads are what OMP_NUM_THREADS should say unless the user has set it; that is not looked at here.

    Args:
        bind: way of binding that was asked for: `auto`, `none`, `cores` or `numa`.
        environs: environment variables of each local rank: CUDA_VISIBLE_DEVICES says which GPU it uses, and
            DSRUN_BACKEND=gloo that it uses none.
        gpus: GPUs of this host, as the driver told of them; empty if it was not asked, and then the kernel is.
        whole_sockets: whether `auto` takes all NUMA nodes of a GPU's socket, not its node alone; see `bind_ranks`.
        root: `/`, or a made-up tree with proc, sys and dev.
        allowed: CPUs this process may be scheduled on; asked of the kernel if None.
        may_open: function that says whether this process may open a device file, or None for the usual check; see
            `find_gpus`.
    """
    cpus = read_cpus(root, allowed=os.sched_getaffinity(0) if allowed is None else allowed)
    uses_gpus = bool(environs) and environs[0].get(BACKEND_ENV) != "gloo"
    found = (gpus or find_gpus(root, may_open=may_open)) if uses_gpus else ()
    return bind_ranks(
        cpus,
        bind=bind,
        gpu_nodes=[None if gpu is None else _node_of(root, gpu) for gpu in gpus_of_ranks(found, environs)],
        quota_cores=read_limits(root).quota_cores,
        whole_sockets=whole_sockets,
    )


def _node_of(root: Path, gpu: GpuPlace) -> int | None:
    # -1 where firmware does not say.
    return None if gpu.address is None else read_number(root / "sys/bus/pci/devices" / gpu.address / "numa_node")
