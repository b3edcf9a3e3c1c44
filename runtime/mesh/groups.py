"""The rank grid bound to torch.distributed: joining the job, and one group for each axis.

The only module that starts process groups. Which grid there is, is decided elsewhere.

[Note: leaving] A Gloo thread that lets go of a collective's tensors needs the interpreter's lock for it. If the
interpreter has begun to end by then, python ends the thread in the middle of a C++ destructor, and the process dies of
SIGABRT ("terminate called without an active exception"): a rank that trained to its end has failed. It takes a busy
machine, where that thread still has to run when the script is over. So the groups are let go of at exit, before
the interpreter ends. No rank waits for another in this; where a collective is under way, as after an error, they are
left alone, for letting go might wait for a rank that hangs.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from dsrun.contract import NONCE_KEY, RankInfo
from dsrun.errors import InputError, LaunchError

from ..compat import HashStore, PrefixStore, Store, TCPStore, timeout_of
from .alone import AloneCollectives
from .c10d import C10dCollectives, GlooCollectives
from .collectives import Collectives, WaitObserver
from .hierarchy import HierarchicalCollectives
from .segments import find_hosts
from .shared_memory import SharedMemoryCollectives, exchange_over
from .spec import MeshSpec
from .where import Where

Backend = Literal["nccl", "gloo"]

_log = logging.getLogger(__name__)

#: Longest wait for the launcher's mark in the store, which it leaves before it listens to anything else.
_NONCE_TIMEOUT_S = 30.0
#: Numbers the groups that this process has joined. A job's store keeps what ranks wrote into it: a group that met where
#: an earlier one had met could read that one's addresses, and would wait for ranks that listen there no more.
_joins = itertools.count()


@dataclass(slots=True, eq=False)
class _Use:
    """What is known of a default group: whether `join` made it, and the meshes on it, each by its `where`."""

    made_here: bool
    meshes: weakref.WeakSet[Where] = field(default_factory=lambda: weakref.WeakSet[Where]())


#: torch has one default group, so who uses it is kept where it is: beside it, and only for as long.
_uses: weakref.WeakKeyDictionary[dist.ProcessGroup, _Use] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ProcessGroupMesh:
    """A `MeshSpec` whose axes have process groups.

    Attributes:
        spec: the grid.
        info: this process's place in the job.
        device: where this rank's tensors live.
        backend: the collectives' library.
        axes: collectives of this rank along each axis.
        where: the step this rank is in, as errors of all axes name it.
    """

    spec: MeshSpec
    info: RankInfo
    device: torch.device
    backend: Backend
    axes: dict[str, Collectives]
    where: Where


def choose_backend(asked: str | None) -> Backend:
    """Returns the backend asked for, else NCCL where there is a GPU, else Gloo.

    Raises:
        InputError: an unknown backend, or NCCL on a machine without a usable GPU.
    """
    if asked is None:
        return "nccl" if torch.cuda.is_available() else "gloo"
    if asked not in ("nccl", "gloo"):
        raise InputError(f"backend is {asked!r}; expected nccl or gloo")
    if asked == "nccl" and not torch.cuda.is_available():
        raise InputError(
            "backend is nccl, but torch sees no CUDA device in this process",
            hint="use `--backend gloo` to train on the CPU, or check CUDA_VISIBLE_DEVICES and `dsrun probe`",
        )
    return "nccl" if asked == "nccl" else "gloo"


def choose_device(backend: Backend, info: RankInfo) -> torch.device:
    """Returns the device of this rank and makes it current: under NCCL the GPU of `gpu_index`, else the CPU.

    Raises:
        InputError: there are fewer GPUs than ranks on this host.
    """
    if backend == "gloo":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = gpu_index(info.local_rank, count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if index >= count:
        raise InputError(
            f"local rank {info.local_rank} has no GPU: {info.local_world_size} ranks and {count} visible GPUs here",
            hint=f"start at most {count} ranks here (`-n {count}`), or make more GPUs visible",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def gpu_index(local_rank: int, count: int, visible: str | None) -> int:
    """Returns which of the GPUs that torch sees is a rank's; it may be one too many.

    Args:
        local_rank: rank within the host.
        count: GPUs that torch sees.
        visible: CUDA_VISIBLE_DEVICES. CUDA shows a process one MIG slice only, so each rank has a value of its own, and
            its slice is the only one it sees; other GPUs are seen by all ranks alike.
    """
    has_slice = any(name.strip().startswith("MIG-") for name in (visible or "").split(","))
    return 0 if has_slice and count == 1 else local_rank


def join(info: RankInfo, *, backend: Backend, device: torch.device, timeout_s: float, nonce: str | None = None) -> None:
    """Joins torch.distributed's default group; every rank of the job must call. Does nothing where one exists.

    Args:
        info: this process's place; a lone process needs no address.
        backend: library for collectives.
        device: this rank's device.
        timeout_s: how long to wait for the other ranks, here and in each later collective.
        nonce: what the launcher left in this job's store; None where it leaves nothing, as torchrun does.

    Raises:
        LaunchError: the other ranks cannot be reached, or not in time, or another job's store answers.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    prefix = "dsrun"
    try:
        if info.world_size == 1 and info.master_port == 0:
            store: Store = HashStore()
        else:
            store = TCPStore(
                info.master_addr,
                info.master_port,
                world_size=info.world_size,
                is_master=info.rank == 0 and not info.agent_store,
                timeout=timeout,
                wait_for_workers=False,
            )
            if nonce is not None and info.agent_store:
                _check_nonce(store, nonce, info, timeout_s=min(timeout_s, _NONCE_TIMEOUT_S))
                prefix = f"dsrun/{nonce}"
        dist.init_process_group(
            backend,
            store=PrefixStore(f"{prefix}/{next(_joins)}", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        _uses[_world()] = _Use(made_here=True)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {info.rank} could not join the {info.world_size} ranks at "
            f"{info.master_addr}:{info.master_port}: {error}",
            hint="a rank that ended early or a blocked port keeps the others waiting: look at the other ranks' logs",
        ) from error


def _cpu_collectives(group: dist.ProcessGroup, observer: WaitObserver | None, where: Where) -> C10dCollectives:
    """Returns collectives through shared memory: of all ranks, or of those of each host with Gloo between hosts.

    Where memory cannot be shared, Gloo does it alone.
    """
    hosts = find_hosts(exchange_over(group))
    timeout_s = timeout_of(group)
    try:
        if len(hosts) == 1:
            return SharedMemoryCollectives(group, observer, timeout_s=timeout_s, where=where)
        return HierarchicalCollectives(group, observer, hosts=hosts, timeout_s=timeout_s, where=where)
    except OSError as error:
        if group.rank() == 0:
            _log.warning("the ranks cannot share memory (%s): Gloo moves their data, several times slower", error)
    reductions = _new_group(dist.get_process_group_ranks(group), timeout_s, members_only=True)
    return GlooCollectives(group, observer, reductions=reductions, where=where)


def _new_group(ranks: Sequence[int], timeout_s: float, *, members_only: bool = False) -> dist.ProcessGroup | None:
    """Makes a group; every rank of the job must call, or with `members_only` every rank of the group alone.

    Returns:
        the group; None on a rank outside of it.
    """
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=members_only)
    return group if isinstance(group, dist.ProcessGroup) else None


def _leave_at_exit(collectives: Sequence[weakref.ref[C10dCollectives]], mesh: weakref.ref[Where], process: int) -> None:
    """Lets go of the groups at exit, see [Note: leaving]; a fork has none of their threads.

    With the last mesh goes the default group, whoever made it: the script has nothing more to do in it.
    """
    if os.getpid() != process or not dist.is_initialized():
        return
    use = _uses.get(_world())
    where = mesh()
    if use is not None and where is not None and where in use.meshes:
        axes = [axis for axis in (reference() for reference in collectives) if axis is not None]
        if not all(axis.is_idle for axis in axes):
            return
        for axis in axes:
            axis.close()
        use.meshes.discard(where)
    if use is None or not use.meshes:
        dist.destroy_process_group()


def _check_nonce(store: Store, nonce: str, info: RankInfo, *, timeout_s: float) -> None:
    """Raises where the store is not this job's: its ranks would wait for, or disturb, those of another job.

    The launcher sets the nonce as soon as the store is there, so it is waited for, but not for long.
    """
    try:
        store.wait([NONCE_KEY], timedelta(seconds=timeout_s))
        found = store.get(NONCE_KEY).decode("utf-8", "replace")
    except dist.DistStoreError:
        found = None
    if found != nonce:
        seen = f"holds no job's mark after {timeout_s:g} s" if found is None else "holds another job's mark"
        raise LaunchError(
            f"rank {info.rank}: the store at {info.master_addr}:{info.master_port} is not this job's: it {seen}",
            hint="another job's store answers at that address: start the job again without a fixed port",
        )


def present_backend() -> Backend:
    """Returns the backend of the default group that was joined."""
    return "nccl" if dist.get_backend() == "nccl" else "gloo"


def make_mesh(
    spec: MeshSpec, info: RankInfo, *, device: torch.device, observer: WaitObserver | None = None
) -> ProcessGroupMesh:
    """Makes the groups of every axis; every rank of the job must call, after `join`.

    Args:
        spec: the grid.
        info: this process's place in the job.
        device: where this rank's tensors live.
        observer: hears of this rank's waits in collectives.
    """
    backend = present_backend()
    where = Where()
    world = _world()
    _uses.setdefault(world, _Use(made_here=False)).meshes.add(where)
    timeout_s = timeout_of(world)
    bound: dict[str, Collectives] = {}
    made: list[weakref.ref[C10dCollectives]] = []
    for axis, _ in spec.axes:
        for ranks in spec.groups(axis):
            if len(ranks) == 1:
                if info.rank in ranks:
                    bound[axis] = AloneCollectives()
                continue
            group = world if len(ranks) == spec.world_size else _new_group(ranks, timeout_s)
            # Another communicator, and so on CUDA another stream: see C10dCollectives.
            reductions = _new_group(ranks, timeout_s) if backend == "nccl" else None
            if group is not None:
                collectives = (
                    C10dCollectives(group, observer, reductions=reductions, where=where)
                    if backend == "nccl"
                    else _cpu_collectives(group, observer, where)
                )
                bound[axis] = collectives
                made.append(weakref.ref(collectives))
    if backend == "gloo":
        atexit.register(_leave_at_exit, made, weakref.ref(where), os.getpid())
    return ProcessGroupMesh(spec, info, device, backend, bound, where)


def leave(mesh: ProcessGroupMesh) -> None:
    """Lets go of a mesh's groups; of the default group too, if `join` made it and no other mesh is on it.

    Does nothing where that has happened, or the default group has been destroyed. No collective may follow.
    """
    if not dist.is_initialized():
        return
    use = _uses.get(_world())
    if use is None or mesh.where not in use.meshes:
        return
    # A thread of a group that outlives the interpreter aborts the process, so nothing may hold the groups on.
    for collectives in mesh.axes.values():
        collectives.close()
    use.meshes.discard(mesh.where)
    if use.made_here and not use.meshes:
        dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup), "torch.distributed is not initialised"
    return world
