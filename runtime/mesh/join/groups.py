"""The rank grid bound to torch.distributed: joining the job, and one group for each set of peers.

The only module that joins the default group. Which grid there is, is decided elsewhere.

[Note: leaving] A Gloo thread that lets go of a collective's tensors needs the interpreter's lock for it. If the
interpreter has begun to end by then, python ends the thread in the middle of a C++ destructor, and the process dies of
SIGABRT ("terminate called without an active exception"): a rank that trained to its end has failed. It takes a busy
machine, where that thread still has to run when the script is over. So the groups are let go of at exit, before
the interpreter ends. No rank waits for another in this; where a collective is under way, as after an error, they are
left alone, for letting go might wait for a rank that hangs. NCCL's groups wait for other ranks: see `last_leave`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from dsrun.contract.environment import BACKEND_ENV, NONCE_KEY, RankInfo
from dsrun.errors import DsrunError, LaunchError, ModelError
from dsrun.mesh_spec import MeshSpec, Role

from ...compat import HashStore, PrefixStore, Store, TCPStore, backends_of, store_of, timeout_of
from ..alone import AloneCollectives
from ..c10d import C10dCollectives, GlooCollectives
from ..collectives import Collectives, Traffic, WaitObserver
from ..host_memory.collectives import SharedMemoryCollectives, exchange_over
from ..host_memory.segments import find_hosts
from ..host_memory.several_hosts import HierarchicalCollectives
from ..point_to_point.alone import AlonePointToPoint
from ..point_to_point.links import PointToPoint
from ..point_to_point.make import LinkPurpose, make_links
from ..step_position import Where
from .backends import Backend, backend_of, choose_backend, idle_gpus_text, order_warning, serves
from .gpus import claim_gpu, gpu_name
from .hardware import has_gpu
from .last_leave import PATIENCE_S, LastLeave
from .shared_groups import GroupKey, Purpose, SharedGroups

_log = logging.getLogger(__name__)

#: Longest wait for the launcher's mark in the store, which it leaves before it listens to anything else.
_NONCE_TIMEOUT_S = 30.0
#: Numbers the groups that this process has joined. A job's store keeps what ranks wrote into it: a group that met where
#: an earlier one had met could read that one's addresses, and would wait for ranks that listen there no more.
_joins = itertools.count()


@dataclass(slots=True, eq=False)
class _Use:
    """What is known of a default group.

    Attributes:
        joined_by: the backend by which `join` made it; None: the script did.
        groups: process groups that the meshes on this default group share.
        meshes: those on it, each by its `where`, and what it has of `groups`.
        last_leave: destroys it at exit, where that may wait for other ranks.
        is_kept: the script uses it beside its meshes, and destroys it if it likes.
    """

    joined_by: Backend | None
    groups: SharedGroups
    meshes: weakref.WeakKeyDictionary[Where, list[GroupKey]] = field(
        default_factory=lambda: weakref.WeakKeyDictionary[Where, list[GroupKey]]()
    )
    last_leave: LastLeave | None = None
    is_kept: bool = False


#: torch has one default group, so who uses it is kept where it is: beside it, and only for as long.
_uses: weakref.WeakKeyDictionary[dist.ProcessGroup, _Use] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ProcessGroupMesh:
    """A `MeshSpec` whose peers can talk: the collectives of a rank in each of its roles, see [Note: roles].

    Roles with the same ranks have the same collectives.

    Attributes:
        spec: the grid.
        info: this process's place in the job.
        device: device of this rank's tensors.
        backend: the collectives' library.
        views: collectives of this rank and its peers on some axes, by those of the axes that have several ranks.
        where: the step this rank is in, as errors of all collectives name it.
        among: function that makes collectives of some ranks, ascending, which all call it.
        stages: collectives that `among` has made, by their ranks.
        links: messages between this rank and its peers in the role `pipe`.
    """

    spec: MeshSpec
    info: RankInfo
    device: torch.device
    backend: Backend
    views: Mapping[tuple[str, ...], Collectives]
    where: Where
    among: Callable[[tuple[int, ...]], Collectives] = lambda ranks: AloneCollectives()
    stages: dict[tuple[int, ...], Collectives] = field(default_factory=dict[tuple[int, ...], Collectives])
    links: PointToPoint = field(default_factory=AlonePointToPoint)

    def over(self, axes: Collection[str]) -> Collectives:
        """Returns the collectives of the ranks that differ from this one on some axes alone; see `MeshSpec.views`."""
        return self.views[self.spec.wide(axes)]

    def replicas(self, cut_over: Collection[str] = ()) -> Collectives:
        """Returns those of the ranks that hold the same elements of a parameter.

        Args:
            cut_over: axes that the parameter is cut along.
        """
        return self.over(self.spec.replica_axes(cut_over))

    def replicas_over(self, cut_over: Collection[str], stages: Collection[int]) -> Collectives:
        """Returns those of the ranks that hold the same elements of a parameter which several pipeline stages use.

        Makes them the first time: all of these ranks call, in one order where they have several such sets of ranks.

        Args:
            cut_over: axes that the parameter is cut along.
            stages: stages that use it; none: it is this rank's stage's alone.
        """
        if not stages:
            return self.replicas(cut_over)
        ranks = self.spec.replicas_over(self.info.rank, cut_over, stages)
        return self._of_ranks(ranks)

    def ties_over(self, stages: Collection[int]) -> Collectives:
        """Returns those of the ranks that have the same samples, and a parameter which several pipeline stages use.

        Makes them the first time, see `replicas_over`.

        Args:
            stages: stages that use it.
        """
        peers = self.spec.peers(self.info.rank, self.spec.role_axes("pipe"))
        return self._of_ranks(tuple(rank for rank in peers if self.spec.stage_of(rank) in stages))

    def _of_ranks(self, ranks: tuple[int, ...]) -> Collectives:
        for view, collectives in self.views.items():
            if self.spec.peers(self.info.rank, view) == ranks:
                return collectives
        if ranks not in self.stages:
            self.stages[ranks] = self.among(ranks)
        return self.stages[ranks]

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.info.rank == 0

    def counts_samples(self, stage: int) -> bool:
        """Whether this rank's samples and losses count: of ranks that share them, the first one's of one stage.

        Args:
            stage: pipeline stage that has the losses.
        """
        spec, here = self.spec, self.spec.coordinate(self.info.rank)
        others = (*spec.role_axes("batch"), *spec.role_axes("pipe"))
        has_losses = spec.stage_of(self.info.rank) == stage
        return has_losses and all(index == 0 for name, index in here.items() if name not in others)

    def traffic(self) -> Traffic:
        """Returns what this rank has moved in all its roles; these numbers stand still."""
        total = Traffic()
        for part in (*self.views.values(), *self.stages.values(), self.links):
            total.calls.update(part.traffic.calls)
            total.bytes.update(part.traffic.bytes)
        return total

    def bytes_by_axis(self) -> dict[str, int]:
        """Returns the bytes that this rank has handed to collectives and messages so far, by the axes they go along.

        Several axes are named together, as `pipe+data`; `pipe` has the messages between stages too, and `tied stages`
        what goes between stages that use the same parameters. What a rank alone has is not moved.
        """
        moved: Counter[str] = Counter()
        for axes, part in self.views.items():
            if axes:
                moved["+".join(axes)] += sum(part.traffic.bytes.values())
        for part in self.stages.values():
            moved["tied stages"] += sum(part.traffic.bytes.values())
        moved["pipe"] += sum(self.links.traffic.bytes.values())
        return {axes: count for axes, count in moved.items() if count}

    @property
    def world(self) -> Collectives:
        """All ranks of the job."""
        return self._of("world")

    @property
    def batch(self) -> Collectives:
        """The ranks with samples of their own."""
        return self._of("batch")

    @property
    def shard(self) -> Collectives:
        """The ranks that share out the state of a parameter which the tensor axis cuts."""
        return self._of("shard")

    @property
    def tensor(self) -> Collectives:
        """The ranks that share a layer."""
        return self._of("tensor")

    @property
    def pipe(self) -> Collectives:
        """The ranks that share the layers."""
        return self._of("pipe")

    @property
    def context(self) -> Collectives:
        """The ranks that share a sequence."""
        return self._of("context")

    @property
    def expert(self) -> Collectives:
        """The ranks that share the experts."""
        return self._of("expert")

    def _of(self, role: Role) -> Collectives:
        return self.over(self.spec.role_axes(role))


def join(info: RankInfo, *, backend: Backend, device: torch.device, timeout_s: float, nonce: str | None = None) -> None:
    """Joins torch.distributed's default group; every rank of the job must call. Does nothing where one exists.

    Args:
        info: this process's place in the job; a lone process needs no address.
        backend: library for collectives.
        device: device of this rank.
        timeout_s: seconds to wait for the other ranks, here and in each later collective.
        nonce: mark that the launcher left in this job's store; None where a launcher leaves none, as torchrun does.

    Raises:
        InputError: another rank has this rank's GPU.
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
        store = PrefixStore(f"{prefix}/{next(_joins)}", store)
        if backend == "nccl" and info.world_size > 1:
            # Before NCCL connects, which it does at once for a group that is bound to a device.
            claim_gpu(store, gpu_name(device), info)
        dist.init_process_group(
            backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        _uses[_world()] = _Use(backend, SharedGroups(timeout_s=timeout_s))
    except DsrunError:
        raise  # said already; some are also what torch raises
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {info.rank} could not join the {info.world_size} ranks at "
            f"{info.master_addr}:{info.master_port}: {error}",
            hint="a rank that ended early or a blocked port keeps the others waiting: look at the other ranks' logs",
        ) from error


def _cpu_collectives(
    groups: Mapping[tuple[str, ...], dist.ProcessGroup],
    observer_of: Callable[[tuple[str, ...]], WaitObserver | None],
    where: Where,
    *,
    make_reductions: Callable[[tuple[str, ...]], dist.ProcessGroup],
    make_inside: Callable[[tuple[int, ...]], dist.ProcessGroup],
) -> dict[tuple[str, ...], C10dCollectives]:
    """Returns collectives through shared memory: of all ranks, or of those of each host with Gloo between hosts.

    Where memory cannot be shared, Gloo does it alone, in two groups.

    Args:
        groups: this rank's group of each view.
        observer_of: function that returns the observer of this rank's waits in a view; None for no observer.
        where: the step this rank is in.
        make_reductions: function that makes another group of this rank's peers in a view.
        make_inside: function that makes a group of some ranks, which all call it.
    """
    bound: dict[tuple[str, ...], C10dCollectives] = {}
    for view, group in groups.items():
        # All peers of a view get the same. Those of another view may get something else: no rank waits for them.
        observer = observer_of(view)
        bound[view] = _over_shared_memory(group, observer, where, make_inside) or GlooCollectives(
            group, observer, reductions=make_reductions(view), where=where, device=torch.device("cpu")
        )
    return bound


def _over_shared_memory(
    group: dist.ProcessGroup,
    observer: WaitObserver | None,
    where: Where,
    make_inside: Callable[[tuple[int, ...]], dist.ProcessGroup],
) -> C10dCollectives | None:
    """Returns collectives through the memory that the hosts' ranks share; None where they cannot share any."""
    hosts = find_hosts(exchange_over(group))
    timeout_s = timeout_of(group)
    try:
        if len(hosts) == 1:
            return SharedMemoryCollectives(group, observer, timeout_s=timeout_s, where=where)
        ranks = dist.get_process_group_ranks(group)
        here = next(host for host in hosts if group.rank() in host)
        inside = make_inside(tuple(ranks[rank] for rank in here))
        return HierarchicalCollectives(group, observer, inside=inside, hosts=hosts, timeout_s=timeout_s, where=where)
    except OSError as error:
        if group.rank() == 0:
            _log.warning("the ranks cannot share memory (%s): Gloo moves their data, several times slower", error)
    return None


def _leave_at_exit(collectives: Sequence[weakref.ref[C10dCollectives]], mesh: weakref.ref[Where], process: int) -> None:
    """Lets go of the groups at exit, see [Note: leaving]; a fork has none of their threads.

    With the last mesh goes the default group, whoever made it: the script has nothing more to do in it.
    """
    if os.getpid() != process or not dist.is_initialized():
        return
    use = _uses.get(_world())
    where = mesh()
    last_leave = None if use is None else use.last_leave
    if use is not None and where is not None and where in use.meshes:
        axes = [axis for axis in (reference() for reference in collectives) if axis is not None]
        if last_leave is not None:
            last_leave.add(axes)
        elif not all(axis.is_idle for axis in axes):
            return
        else:
            for axis in axes:
                axis.close()
        del use.meshes[where]
    if use is not None and use.meshes:
        return
    if last_leave is not None:
        last_leave.at_exit()
    elif "nccl" not in backends_of().values():
        dist.destroy_process_group()


def _close_at_exit(links: weakref.ref[PointToPoint], process: int) -> None:
    """Closes links at exit, before the groups that they are on are let go of."""
    found = links()
    if found is not None and os.getpid() == process:
        found.close()


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


def keep() -> None:
    """Lets the default group outlast the meshes on it; after `join`. One that the script has made does so anyway."""
    use = _uses.get(_world())
    if use is not None:
        use.is_kept = True


def has_joined() -> bool:
    """Whether this process has a default group."""
    return dist.is_initialized()


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Returns torch's process group of some ranks, for a script's own collectives; enters none.

    Args:
        ranks: ranks of a view of a mesh, by their numbers in the job, ascending; this one is among them. A lone rank
            gets a group of Gloo's, for no other rank can be asked to make one.

    Returns:
        all ranks' group, or one that a mesh has made; None where no mesh has made one, or all have left it.
    """
    world = _world()
    if len(ranks) == world.size():
        return world
    use = _uses.get(world)
    groups = None if use is None else use.groups
    found = None if groups is None else groups.find(ranks)
    if found is None and groups is not None and len(ranks) == 1:
        return groups.take(GroupKey("gloo", "all", ranks), [ranks])
    return found


def present_backend() -> Backend:
    """Returns what training goes by in the default group that was joined.

    That by which `join` made it. In a group of the script's own: what `--backend` said, else NCCL where the group has
    it and torch sees a GPU, see [Note: backend config].

    Raises:
        InputError: `--backend nccl`, on a machine without a usable GPU; or an accelerator that does not serve, see
            `has_gpu`.
    """
    use = _uses.get(_world())
    if use is not None and use.joined_by is not None:
        return use.joined_by
    asked = os.environ.get(BACKEND_ENV)
    return backend_of(backends_of(), has_gpu=has_gpu) if asked is None else choose_backend(asked)


def make_mesh(
    spec: MeshSpec,
    info: RankInfo,
    *,
    device: torch.device,
    observer: WaitObserver | None = None,
    stage_observer: WaitObserver | None = None,
    groups_of_one: bool = False,
) -> ProcessGroupMesh:
    """Makes the groups of this rank's peers, one for each view of the grid; every rank of the job must call.

    A rank makes its own groups only, see [Note: own groups]. Groups that another mesh of this default group has are
    taken from there.

    Args:
        spec: the grid.
        info: this process's place in the job.
        device: device of this rank's tensors.
        observer: observer that is told of this rank's waits in collectives; None for no observer.
        stage_observer: observer that is told of those for ranks of other pipeline stages; None: `observer`.
        groups_of_one: a rank without peers moves its tensors through a group all the same, which is slower and shows
            what the library does.

    Raises:
        InputError: another rank has this rank's GPU.
    """
    backend = present_backend()
    where = Where()
    world = _world()
    use = _use_of(world, info, backend, device)
    keys = use.meshes[where] = list[GroupKey]()
    is_served = serves(backends_of(world), backend)
    pipe = spec.wide(spec.role_axes("pipe"))
    between_stages = observer if stage_observer is None else stage_observer

    def observer_of(view: tuple[str, ...]) -> WaitObserver | None:
        return between_stages if set(pipe) & set(view) else observer

    def take(view: tuple[str, ...], purpose: Purpose) -> dist.ProcessGroup:
        keys.append(GroupKey(backend, purpose, spec.peers(info.rank, view)))
        return use.groups.take(keys[-1], spec.groups(view))

    def take_inside(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        keys.append(GroupKey(backend, "host", ranks))
        return use.groups.take(keys[-1], [ranks])

    groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
    for view in spec.views():
        if spec.size(view) > 1 or groups_of_one:
            is_world = spec.size(view) == spec.world_size
            groups[view] = world if is_world and is_served else take(view, "all")
    bound: dict[tuple[str, ...], C10dCollectives]
    if backend == "nccl":
        bound = {
            view: C10dCollectives(group, observer_of(view), where=where, device=device)
            for view, group in groups.items()
        }
    else:
        bound = _cpu_collectives(
            groups,
            observer_of,
            where,
            make_reductions=lambda view: take(view, "reductions"),
            make_inside=take_inside,
        )
    atexit.register(_leave_at_exit, [weakref.ref(axis) for axis in bound.values()], weakref.ref(where), os.getpid())
    views = {view: bound[view] if view in bound else AloneCollectives() for view in spec.views()}

    def make_group_of_links(purpose: LinkPurpose) -> dist.ProcessGroup:
        keys.append(GroupKey("gloo" if purpose == "heads" else backend, purpose, spec.peers(info.rank, pipe)))
        return use.groups.take(keys[-1], spec.groups(pipe))

    links = make_links(
        groups[pipe] if pipe else None, between_stages, where=where, device=device, make_group=make_group_of_links
    )
    atexit.register(_close_at_exit, weakref.ref(links), os.getpid())

    def among(ranks: tuple[int, ...]) -> Collectives:
        if len(ranks) == 1:
            return AloneCollectives()
        if backend == "nccl":
            # All ranks of the job would have to make such a group, and the others do not know of it.
            raise ModelError(
                f"model: ranks {' and '.join(map(str, ranks))} share a parameter of several pipeline stages, and NCCL "
                "groups of some stages only are not made",
                hint="untie the parameter, use 2 stages, or start with `--backend gloo`",
            )
        group = take_inside(ranks)
        # Of ranks of several stages: those of one have a view.
        made: C10dCollectives = _over_shared_memory(group, between_stages, where, take_inside) or GlooCollectives(
            group, between_stages, reductions=group, where=where, device=torch.device("cpu")
        )
        atexit.register(_leave_at_exit, [weakref.ref(made)], weakref.ref(where), os.getpid())
        return made

    return ProcessGroupMesh(spec, info, device, backend, views, where, among, links=links)


def separate_reductions(mesh: ProcessGroupMesh) -> None:
    """Gives reductions under NCCL a group of their own, see `C10dCollectives`; every rank of the job must call.

    For a mesh whose gathers and reductions overlap, as in training: another communicator takes memory of the device.
    Called once ranks are known to have been given the same, for one that does not call leaves the others waiting.
    """
    if mesh.backend != "nccl":
        return
    use = _uses[_world()]
    warning = order_warning(os.environ)
    if warning is not None and mesh.is_first and mesh.info.world_size > 1:
        _log.warning("%s", warning)
    for view in mesh.spec.replica_views():
        collectives = mesh.views[view]
        if not isinstance(collectives, C10dCollectives):
            continue
        key = GroupKey(mesh.backend, "reductions", mesh.spec.peers(mesh.info.rank, view))
        use.meshes[mesh.where].append(key)
        collectives.reduce_over(use.groups.take(key, mesh.spec.groups(view)))


def leave(mesh: ProcessGroupMesh) -> None:
    """Lets go of a mesh's groups, and ends those that no other mesh is on; every rank of the job must call.

    The default group ends too, if `join` made it, nobody keeps it and no other mesh is on it. Does nothing where the
    mesh has been left, or the default group has been destroyed. No collective may follow.

    To end NCCL's groups is to wait for the other ranks. On the way out of an error (a `finally`, say), and where a
    collective does not end, they stay until the process ends: the others may never come here.
    """
    if not dist.is_initialized():
        return
    use = _uses.get(_world())
    if use is None or mesh.where not in use.meshes:
        return
    everyone = (*mesh.views.values(), *mesh.stages.values())
    axes = [axis for axis in everyone if isinstance(axis, C10dCollectives)]
    if use.last_leave is None:
        may_end = True
        is_idle = all(axis.is_idle for axis in axes)
    else:
        is_idle = may_end = sys.exc_info()[0] is None and all(axis.becomes_idle(patience_s=PATIENCE_S) for axis in axes)
    # A thread of a group that outlives the interpreter aborts the process, so nothing may hold the groups on.
    mesh.links.close()
    for axis in axes:
        axis.close()
    keys = use.meshes.pop(mesh.where)
    if use.meshes and not use.is_kept:
        gc.collect()  # what nobody refers to any more, engines that were not destroyed among them, has no mesh in use
    if use.joined_by is not None and not use.is_kept and not use.meshes and may_end:
        use.groups.forget()
        if use.last_leave is not None:
            use.last_leave.cancel()
        dist.destroy_process_group()
    elif is_idle:
        use.groups.give_back(keys)


def _use_of(world: dist.ProcessGroup, info: RankInfo, backend: Backend, device: torch.device) -> _Use:
    """Returns what is known of the default group; the first time, a group of the script's own is looked at."""
    use = _uses.get(world)
    if use is None:
        if backend == "nccl" and world.size() > 1:
            claim_gpu(store_of(world), gpu_name(device), info)
        if backend == "gloo" and world.rank() == 0:
            _tell_of_idle_gpus()
        use = _uses[world] = _Use(None, SharedGroups(timeout_s=timeout_of(world)))
    if use.last_leave is None and (backend == "nccl" or "nccl" in backends_of(world).values()):
        use.last_leave = LastLeave()
        # A group that the script destroys needs its thread no more. At exit the thread is needed.
        weakref.finalize(world, use.last_leave.cancel).atexit = False
    return use


def _tell_of_idle_gpus() -> None:
    if os.environ.get(BACKEND_ENV) is None and torch.cuda.is_available():
        _log.warning("%s", idle_gpus_text(backends_of(), gpus=torch.cuda.device_count()))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup), "torch.distributed is not initialised"
    return world
