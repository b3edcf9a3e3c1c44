"""Meshes share the groups that they need alike; a group goes when the last of them has left it, on every rank alike."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.mesh_spec import MeshSpec
from dsrun.runtime.compat import HashStore
from dsrun.runtime.mesh.c10d import C10dCollectives
from dsrun.runtime.mesh.collectives import Collectives
from dsrun.runtime.mesh.join.groups import ProcessGroupMesh, join, leave, make_mesh, separate_reductions
from dsrun.runtime.mesh.join.shared_groups import GroupKey, SharedGroups
from support.ranks import run_ranks

CPU = torch.device("cpu")


def _is_there(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def _take_and_give_back() -> list[object]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    groups = SharedGroups(timeout_s=30)
    reductions, gathers = GroupKey("gloo", "reductions", (0, 1)), GroupKey("gloo", "all", (0, 1))
    first, other, again = (groups.take(key, [(0, 1)]) for key in (reductions, gathers, reductions))
    seen: list[object] = [first is again, first is other]
    groups.give_back([reductions])
    value = torch.full((1,), float(info.rank + 1))
    dist.all_reduce(value, group=first)
    seen += [value.item(), len(groups)]
    groups.give_back([reductions, gathers])
    seen += [len(groups), _is_there(first), _is_there(other)]
    # One of its ranks and number would have the name of the first one, and find what that has left in the store.
    next_one = groups.take(reductions, [(0, 1)])
    dist.all_reduce(value, group=next_one)
    return [*seen, next_one is first, len(groups), value.item()]


def test_a_gloo_group_is_shared_and_waits_for_the_next_mesh_when_the_last_has_left() -> None:
    assert run_ranks(2, _take_and_give_back) == [[True, False, 3.0, 2, 0, True, True, True, 1, 6.0]] * 2


def _two_meshes(how: str) -> list[object]:
    info = RankInfo.from_env()
    # The script's own group: it stays when the last mesh goes.
    dist.init_process_group("gloo", init_method="env://", rank=info.rank, world_size=info.world_size)
    spec = divide(4, {"tensor": 2})
    first = make_mesh(spec, info, device=CPU)
    own = [_group(first.batch).group, _group(first.tensor).group]
    if how == "drops":
        del first
        gc.collect()
        second = make_mesh(spec, info, device=CPU)
        shared = [_group(second.batch).group is own[0], _group(second.tensor).group is own[1]]
        leave(second)
        return [*shared, *(_is_there(group) for group in own)]
    second = make_mesh(spec, info, device=CPU)
    shared = [_group(second.batch).group is own[0], _group(second.tensor).group is own[1]]
    leave(first)
    leave(first)  # has no effect
    there = [_is_there(group) for group in own]
    value = torch.full((1,), float(10**info.rank))
    second.tensor.all_reduce(value).wait()
    leave(second)
    after = [_is_there(group) for group in own]
    dist.destroy_process_group()
    return [*shared, *there, value.item(), *after, *(_is_there(group) for group in own)]


def _group(collectives: Collectives) -> C10dCollectives:
    assert isinstance(collectives, C10dCollectives)
    return collectives


def test_the_gloo_groups_of_axes_outlive_the_last_mesh_and_end_with_the_default_group() -> None:
    sums = [11.0, 11.0, 1100.0, 1100.0]
    assert run_ranks(4, _two_meshes, "leaves") == [
        [True, True, True, True, value, True, True, False, False] for value in sums
    ]


def test_the_groups_of_a_mesh_that_was_dropped_stay_for_the_next() -> None:
    # When Python frees it differs by rank: one rank would make a group that the others have.
    assert run_ranks(4, _two_meshes, "drops") == [[True, True, True, True]] * 4


def _groups_asked_for() -> list[list[int]]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    # Whichever way a group is asked of torch, a rank that will not be in it comes here too.
    helper = "_new_process_group_helper"
    c10d: Any = dist.distributed_c10d
    with mock.patch.object(c10d, helper, wraps=getattr(c10d, helper)) as asked:
        make_mesh(divide(4, {"tensor": 2}), info, device=CPU)
    return sorted(list(call.args[2]) for call in asked.call_args_list)


def test_a_rank_makes_the_groups_that_it_is_in_and_no_others() -> None:
    assert run_ranks(4, _groups_asked_for) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


@dataclass(frozen=True, slots=True)
class Odd:
    """What ranks may not have in common, so that they make unlike numbers of groups.

    Attributes:
        world_size: ranks of the job, on a grid whose tensor axis has two.
        host_ranks: ranks of each host.
        own_group: ranks that have a group of their own before the first mesh is made.
        without_memory: ranks that can make no shared memory.
    """

    world_size: int
    host_ranks: int
    own_group: tuple[int, ...] = ()
    without_memory: tuple[int, ...] = ()

    @property
    def spec(self) -> MeshSpec:
        return divide(self.world_size, {"tensor": 2})


def _meshes_in_turn(odd: Odd) -> list[list[tuple[str, float]]]:
    """What this rank's collectives are, and a sum by each, for each view of three meshes."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=15)
    if info.rank in odd.own_group:
        dist.new_group([info.rank], use_local_synchronization=True)
    found: list[list[tuple[str, float]]] = []
    with ExitStack() as stack:
        # Ranks of another user cannot map each other's memory, so they count as being on another host.
        stack.enter_context(mock.patch.object(os, "geteuid", return_value=info.rank // odd.host_ranks))
        if info.rank in odd.without_memory:
            stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=OSError("no memory")))
        meshes: list[ProcessGroupMesh] = []
        for _ in range(3):
            meshes.append(make_mesh(odd.spec, info, device=CPU))
            found.append([])
            for view in odd.spec.views():
                value = torch.full((1,), float(10**info.rank))
                meshes[-1].over(view).all_reduce(value).wait()
                found[-1].append((type(meshes[-1].over(view)).__name__, value.item()))
            if len(meshes) == 2:
                leave(meshes[0])
    return found


ODD = {
    "pairs within and across hosts": Odd(6, 3),
    "hosts of unlike size": Odd(6, 5),
    "a group of the script's own on one rank": Odd(4, 4, own_group=(0,)),
    "groups of the script's own and several hosts": Odd(6, 3, own_group=(1, 5)),
    "a rank without shared memory": Odd(4, 4, without_memory=(3,)),
    "a rank of another host without shared memory": Odd(6, 3, without_memory=(2,)),
}


@pytest.mark.parametrize("name", ODD)
def test_ranks_that_have_unlike_numbers_of_groups_meet_in_each_view_of_each_mesh(name: str) -> None:
    odd = ODD[name]
    spec = odd.spec
    ranks: list[list[list[tuple[str, float]]]] = run_ranks(odd.world_size, _meshes_in_turn, odd, timeout_s=60)
    for rank, meshes in enumerate(ranks):
        sums = [float(sum(10**peer for peer in spec.peers(rank, view))) for view in spec.views()]
        assert [[value for _, value in mesh] for mesh in meshes] == [sums] * 3, rank
    if len(odd.own_group) == 0:
        kinds = {tuple(kind for kind, _ in meshes[0]) for meshes in ranks}
        assert len(kinds) > 1, "the ranks are not alike, or this proves nothing"


@pytest.mark.cuda
@pytest.mark.gpu_seconds(4)
def test_five_engines_in_turn_take_no_more_of_the_device_than_one() -> None:
    """The script's own group stays, so nothing but leaving frees what the meshes take."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    spec = divide(1, {})
    free: list[int] = []
    for _ in range(5):
        mesh = make_mesh(spec, RankInfo(), device=device, groups_of_one=True)
        separate_reductions(mesh)
        value = torch.ones(1 << 20, device=device)
        mesh.world.all_reduce(value).wait()
        mesh.world.all_gather(value, value).wait()
        torch.cuda.synchronize(device)
        reductions = _group(mesh.world).reductions
        leave(mesh)
        assert not _is_there(reductions)
        free.append(torch.cuda.mem_get_info(device)[0])
    # What is loaded for the first one stays loaded.
    assert free[0] - free[-1] < 16 << 20, [round(each / 2**20) for each in free]


def _leave_on_the_way_out(mesh: ProcessGroupMesh) -> None:
    try:
        raise ValueError("no")
    finally:
        leave(mesh)


@pytest.mark.cuda
@pytest.mark.gpu_seconds(3)
def test_on_the_way_out_of_an_error_no_rank_is_waited_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    join(RankInfo(), backend="nccl", device=device, timeout_s=30)
    mesh = make_mesh(divide(1, {}), RankInfo(), device=device, groups_of_one=True)
    separate_reductions(mesh)
    reductions = _group(mesh.world).reductions
    with pytest.raises(ValueError, match="no"):
        _leave_on_the_way_out(mesh)
    # A destroy would have waited for ranks that are in a collective.
    assert _is_there(reductions)
    other = make_mesh(divide(1, {}), RankInfo(), device=device, groups_of_one=True)
    other.world.all_gather(torch.zeros(4, device=device), torch.zeros(4, device=device), label="unit 1")
    # Nobody waited for it, and nothing tells its end: the handle is gone.
    leave(other)
    assert dist.is_initialized()
    last = make_mesh(divide(1, {}), RankInfo(), device=device, groups_of_one=True)
    ahead = last.world.all_gather(torch.zeros(4, device=device), torch.zeros(4, device=device), label="unit 1")
    leave(last)
    assert not dist.is_initialized()
    del ahead


@pytest.mark.cuda
@pytest.mark.gpu_seconds(1.5)
def test_engines_side_by_side_share_one_communicator_for_reductions() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    spec = divide(1, {})
    meshes = [make_mesh(spec, RankInfo(), device=device, groups_of_one=True) for _ in range(4)]
    for mesh in meshes:
        separate_reductions(mesh)
    groups = [_group(mesh.world).reductions for mesh in meshes]
    assert all(group is groups[0] for group in groups)
    assert groups[0] is not _group(meshes[0].world).group
    for mesh in meshes[1:]:
        leave(mesh)
    value = torch.ones(4, device=device)
    meshes[0].world.all_reduce(value).wait()
    assert value.tolist() == [1, 1, 1, 1]
    leave(meshes[0])
    assert not _is_there(groups[0])
    assert dist.is_initialized()
