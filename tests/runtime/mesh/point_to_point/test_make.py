"""A mesh has links among the ranks that share the layers, made with its groups, counted, and closed as it is left."""

from __future__ import annotations

import torch

from dsrun.contract.environment import RankInfo
from dsrun.mesh_spec import Axis, MeshSpec
from dsrun.runtime.mesh.join.groups import join, leave, make_mesh
from dsrun.runtime.mesh.point_to_point.links import Lane
from support.ranks import run_ranks

CPU = torch.device("cpu")


def spec_of(stages: int, *, data: int) -> MeshSpec:
    return MeshSpec((Axis("pipe", stages, ("pipe",)), Axis("data", data, ("replica", "batch", "shard"))))


def two_meshes() -> list[object]:
    """Two meshes after each other, of two stages of two ranks."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    found: list[object] = []
    meshes = [make_mesh(spec_of(2, data=2), info, device=CPU) for _ in range(2)]
    for mesh in meshes:
        links = mesh.links
        links.send([torch.full((2, 3), float(info.rank))], to=1 - links.rank, lane=Lane.ACTIVATIONS)
        value = links.receive(source=1 - links.rank, lane=Lane.ACTIVATIONS).wait().tensors[0]
        moved = mesh.traffic()
        found.append((type(links).__name__, links.rank, links.size, float(value[0, 0])))
        found.append((moved.calls["send"], moved.bytes["send"], moved.calls["receive"], moved.bytes["receive"]))
        leave(mesh)
    return found


def test_links_join_the_ranks_of_the_stages() -> None:
    for rank, found in enumerate(run_ranks(4, two_meshes)):
        links = ("MailboxPointToPoint", rank // 2, 2, float((rank + 2) % 4))
        assert found == [links, (1, 24, 1, 24)] * 2


def one_stage() -> tuple[str, int, int]:
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    mesh = make_mesh(spec_of(1, data=2), info, device=CPU)
    found = type(mesh.links).__name__, mesh.links.size, mesh.traffic().calls["send"]
    leave(mesh)
    return found


def test_one_stage_has_nobody_to_send_to() -> None:
    assert run_ranks(2, one_stage) == [("AlonePointToPoint", 1, 0)] * 2


def end_without_leaving() -> int:
    """The process ends as a script does that leaves nothing."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    mesh = make_mesh(spec_of(2, data=1), info, device=CPU)
    mesh.links.send([torch.ones(3)], to=1 - mesh.links.rank, lane=Lane.GRADIENTS)
    return int(mesh.links.receive(source=1 - mesh.links.rank, lane=Lane.GRADIENTS).wait().tensors[0].sum())


def test_a_mesh_that_is_not_left_hinders_no_end() -> None:
    assert run_ranks(2, end_without_leaving) == [3, 3]
