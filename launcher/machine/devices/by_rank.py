"""Which GPUs each rank of this host sees, and where they are: what a driver told of them, else what the kernel shows.

Runs in the agent, so it needs the standard library only, and asks no driver: that may take seconds, in which the agent
would be taken for lost. Whoever has asked one before hands on what it told, see `NodePlan.gpus`.

[Note: counted GPUs] CUDA_VISIBLE_DEVICES counts what CUDA counts: GPUs that this process may open, by PCI address
(worker sets CUDA_DEVICE_ORDER). /proc shows all of the host, whatever a device cgroup or a container has taken away; so
of these count whose device file may be opened. access(2) tells: it asks the device cgroup too (inode_permission in
the kernel's fs/namei.c), and wakes no GPU, as opening would. A container without GPUs has no such file, and so no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsrun.contract.environment import BACKEND_ENV
from dsrun.errors import InputError
from dsrun.host.gpu_presence import may_open_device

from ...plan.environment import ORDER_ENV, VISIBLE_ENV
from ...plan.gpu_order import check_order
from ...plan.launch_plan import GpuPlace, NodePlan
from ..gpus.visible import listed_devices
from ..proc_files import read_text

_SLICE = "MIG-"


def find_gpus(root: Path, *, may_open: Callable[[Path], bool] | None = None) -> tuple[GpuPlace, ...]:
    """Returns the GPUs that this process may use, as the kernel shows them. See [Note: counted GPUs].

    The UUID of a GPU that sleeps is hidden there (`GPU-????????-...`), and slices are not told.

    Args:
        root: `/`, or a made-up tree.
        may_open: whether this process may open a device file.
    """
    may_open = may_open or may_open_device
    try:
        addresses = [entry.name for entry in (root / "proc/driver/nvidia/gpus").iterdir()]
    except OSError:
        return ()
    found: list[GpuPlace] = []
    for address in sorted(addresses, key=lambda name: [int(part, 16) for part in name.replace(".", ":").split(":")]):
        told = _information(root, address)
        minor = told.get("Device Minor")
        if told.get("GPU Excluded") == "Yes" or not (minor is None or may_open(root / f"dev/nvidia{minor}")):
            continue
        uuid = told.get("GPU UUID", "?")
        found.append(
            GpuPlace(uuid=None if "?" in uuid else uuid, address=address.lower(), model=told.get("Model") or None)
        )
    return tuple(found)


def rank_variables(node: NodePlan, given: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables by which each local rank sees its devices, where they are other than the host's own.

    What was chosen for this host counts the devices that a process here sees: a scheduler may have named them. And of
    MIG slices a rank gets one, see [Note: MIG] of devices.

    Args:
        node: part of the launch plan that is for this host.
        given: environment variables that all ranks of this host get.

    Raises:
        InputError: devices were chosen that no process here sees, or by numbers that mean nothing here.
    """
    nothing: list[dict[str, str]] = [{} for _ in node.workers]
    if given.get(BACKEND_ENV) == "gloo" or any(VISIBLE_ENV in worker.env for worker in node.workers):
        # Ranks of the front end's own machine: it holds their devices, and has said which.
        return nothing
    value = given.get(VISIBLE_ENV)
    seen = _names(value, node.gpus)
    if node.chosen is None and value is None and seen is not None:
        seen = [name for _, name in _in_turns(node.gpus)]
    if node.chosen is not None:
        check_order(node.gpus, given, chosen=node.host.source)
        if seen is None:
            seen = [str(place) for place in range(max(node.chosen) + 1)]
        missing = [place for place in node.chosen if place >= len(seen)]
        if missing:
            there = f"{VISIBLE_ENV} there is {value!r}" if value is not None else f"{len(seen)} are there"
            raise InputError(
                f"{node.host.source}: GPU {missing[0]} of host `{node.host.name}` is asked for, and {there}",
                hint=f"ids count the GPUs that {VISIBLE_ENV} names there; choose others with `--include`",
            )
        seen = [seen[place] for place in node.chosen]
    if seen and any(name.startswith(_SLICE) for name in seen):
        return [{VISIBLE_ENV: seen[worker.local_rank % len(seen)]} for worker in node.workers]
    if node.chosen is None or seen is None:
        return nothing
    return [{VISIBLE_ENV: ",".join(seen)} for _ in node.workers]


def slice_note(variables: Sequence[Mapping[str, str]], given: Mapping[str, str]) -> str | None:
    """Says what ranks on several MIG slices have to know; None where there are no such ranks.

    Args:
        variables: environment variables that each local rank gets of its own, as `rank_variables` returns them.
        given: environment variables that all local ranks get.
    """
    slices = {value for own in variables if (value := own.get(VISIBLE_ENV, "")).startswith(_SLICE)}
    if len(slices) < 2 or given.get(BACKEND_ENV) == "gloo":
        return None
    return (
        f"{len(slices)} MIG slices: each rank sees its own as cuda:0, and NCCL does not connect slices of one GPU; "
        "`--backend gloo` does"
    )


def gpus_of_ranks(gpus: Sequence[GpuPlace], environs: Sequence[Mapping[str, str]]) -> list[GpuPlace | None]:
    """Returns the GPU that each local rank uses; None where it has none, as on the CPU, or that cannot be told.

    Args:
        gpus: those that ranks here may use, in CUDA's order.
        environs: environment variables of each local rank.
    """
    if environs and environs[0].get(BACKEND_ENV) == "gloo":
        return [None] * len(environs)
    values = [environ.get(VISIBLE_ENV) for environ in environs]
    if environs and environs[0].get(ORDER_ENV) == "FASTEST_FIRST" and len({gpu.model for gpu in gpus}) > 1:
        # Numbers mean what CUDA finds fast; names mean what they say.
        gpus = [] if any(value is None or not value.startswith(("GPU-", _SLICE)) for value in values) else gpus
    if len(set(values)) > 1:
        # Each rank was shown its own, which is its first.
        return [next(iter(_places(value, gpus)), None) for value in values]
    shared = _places(values[0], gpus) if values else []
    return [shared[rank] if rank < len(shared) else None for rank in range(len(environs))]


def _places(value: str | None, gpus: Sequence[GpuPlace]) -> list[GpuPlace | None]:
    """Returns the GPU of each device that a list names, the parent of a slice."""
    owner = {name: gpu for gpu in gpus for name in _devices_of(gpu)}
    if value is None:
        return [gpu for gpu, _ in _in_turns(gpus)]
    listed = listed_devices(value, [gpu.uuid for gpu in gpus])
    return [gpus[entry] if isinstance(entry, int) else owner.get(entry) for entry in listed]


def _names(value: str | None, gpus: Sequence[GpuPlace]) -> list[str] | None:
    """Returns what CUDA_VISIBLE_DEVICES may call each device that a process here sees; None where nobody knows."""
    if value is None:
        return [name for gpu in gpus for name in _devices_of(gpu)] if all(gpu.uuid for gpu in gpus) and gpus else None
    if not gpus:
        return [entry.strip() for entry in value.split(",") if entry.strip()]
    listed = listed_devices(value, [gpu.uuid for gpu in gpus])
    return [entry if isinstance(entry, str) else gpus[entry].uuid or str(entry) for entry in listed]


def _in_turns(gpus: Sequence[GpuPlace]) -> list[tuple[GpuPlace, str]]:
    """Returns the devices of GPUs, one of each before a second one of any: NCCL connects no two slices of one GPU."""
    turns = ((turn, gpu, name) for gpu in gpus for turn, name in enumerate(_devices_of(gpu)))
    return [(gpu, name) for _, gpu, name in sorted(turns, key=lambda each: each[0])]


def _devices_of(gpu: GpuPlace) -> Sequence[str]:
    """Returns the names of what CUDA shows of a GPU: itself, or its slices."""
    return (gpu.uuid or "",) if gpu.slices is None else gpu.slices


def _information(root: Path, address: str) -> dict[str, str]:
    text = read_text(root / f"proc/driver/nvidia/gpus/{address}/information") or ""
    rows = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}
