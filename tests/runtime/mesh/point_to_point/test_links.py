"""Every kind of links keeps the one promise: messages arrive whole, in order, and are the receiver's to keep."""

from __future__ import annotations

import pytest
import torch

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.mesh.loopback import LoopbackWorld
from dsrun.runtime.mesh.point_to_point.alone import AlonePointToPoint
from dsrun.runtime.mesh.point_to_point.c10d import C10dPointToPoint, LaneGroups
from dsrun.runtime.mesh.point_to_point.links import Lane, PointToPoint
from dsrun.runtime.mesh.point_to_point.loopback import LoopbackPointToPoint
from dsrun.runtime.mesh.point_to_point.mailbox import MailboxPointToPoint
from support.link_rounds import run_all
from support.ranks import run_ranks

CPU = torch.device("cpu")


def links_of(kind: str, *, timeout_s: float = 30.0) -> PointToPoint:
    """Returns links of a kind among all ranks of the job."""
    import torch.distributed as dist

    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=timeout_s)
    make_mesh(divide(info.world_size, {}), info, device=CPU)
    world = dist.group.WORLD
    assert world is not None
    if kind == "mailbox":
        return MailboxPointToPoint(world, timeout_s=timeout_s)
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    return C10dPointToPoint({lane: LaneGroups(group, group) for lane, group in zip(Lane, groups, strict=True)})


def battery(kind: str) -> dict[str, int]:
    links = links_of(kind)
    counted = run_all(links)
    links.close()
    return counted


@pytest.mark.parametrize("size", [2, 3])
def test_messages_among_threads_arrive_whole_in_order_and_to_keep(size: int) -> None:
    counted = LoopbackWorld(size).run(lambda axis: run_all(LoopbackPointToPoint(axis)))
    assert counted == [counted[0]] * size


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("mailbox", 2),
        ("mailbox", 3),
        ("gloo", 2),
        pytest.param("gloo", 3, marks=pytest.mark.soak("two ranks over gloo, and three by mailboxes")),
    ],
)
def test_messages_among_processes_arrive_whole_in_order_and_to_keep(kind: str, size: int) -> None:
    counted = run_ranks(size, battery, kind)
    assert counted == [counted[0]] * size
    assert counted[0] == LoopbackWorld(size).run(lambda axis: run_all(LoopbackPointToPoint(axis)))[0]


def test_a_rank_that_is_alone_has_nobody_to_send_to() -> None:
    links = AlonePointToPoint()
    with pytest.raises(AssertionError, match="axis that has one rank"):
        links.send([], to=1, lane=Lane.ACTIVATIONS)
    with pytest.raises(AssertionError, match="axis that has one rank"):
        links.receive(source=1, lane=Lane.ACTIVATIONS)
    assert not links.traffic.calls
    links.close()
