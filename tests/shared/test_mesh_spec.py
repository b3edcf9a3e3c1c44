"""Ranks, coordinates and roles of the grid, for thousands of ranks."""

from __future__ import annotations

import pytest

from dsrun.errors import LayoutError
from dsrun.mesh_spec import ROLES, Axis, MeshSpec, Role

LARGE = MeshSpec(
    (
        Axis("pipe", 8, ("pipe",), cuts=True),
        Axis("data", 16, ("replica", "batch", "shard")),
        Axis("expert", 2, ("replica", "batch", "shard", "expert"), cuts=True),
        Axis("ring", 2, ("replica", "shard", "context")),
        Axis("tensor", 8, ("replica", "tensor"), cuts=True),
    )
)


def test_coordinates_go_there_and_back_for_4096_ranks() -> None:
    assert LARGE.world_size == 4096
    assert [LARGE.rank(LARGE.coordinate(rank)) for rank in range(4096)] == list(range(4096))
    assert LARGE.coordinate(4095) == {"pipe": 7, "data": 15, "expert": 1, "ring": 1, "tensor": 7}


@pytest.mark.parametrize("role", ROLES)
def test_groups_of_a_role_hold_every_rank_once_and_its_own_peers(role: Role) -> None:
    axes = LARGE.role_axes(role)
    groups = LARGE.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(4096))
    assert {len(group) for group in groups} == {LARGE.role_size(role)}
    for group in groups[:: max(1, len(groups) // 4)]:
        assert list(group) == sorted(group)
        here = [LARGE.coordinate(rank) for rank in group]
        fixed = [{name: at for name, at in one.items() if name not in axes} for one in here]
        assert all(one == fixed[0] for one in fixed), "they differ on these axes alone"
        assert all(LARGE.peers(rank, axes) == group for rank in group[:: max(1, len(group) // 8)])


def test_the_last_axis_runs_over_neighbours() -> None:
    assert LARGE.peers(8, ("tensor",)) == tuple(range(8, 16))
    assert LARGE.peers(0, ("ring",)) == (0, 8)
    assert LARGE.peers(0, ("ring", "tensor")) == tuple(range(16))


def test_the_sizes_of_roles() -> None:
    assert {role: LARGE.role_size(role) for role in ROLES} == {
        "world": 4096,
        "replica": 512,
        "batch": 32,
        "shard": 64,
        "tensor": 8,
        "pipe": 8,
        "context": 2,
        "expert": 2,
    }


def test_a_view_is_made_once_for_all_roles_with_the_same_ranks() -> None:
    alone = MeshSpec((Axis("data", 8, ("replica", "batch", "shard")), Axis("tensor", 1, ("replica", "tensor"), True)))
    assert alone.views() == [("data",), ()], "one group: with one axis all roles are one, but for those of one rank"
    two = MeshSpec((Axis("data", 4, ("replica", "batch", "shard")), Axis("tensor", 2, ("replica", "tensor"), True)))
    assert two.views() == [("data", "tensor"), ("data",), ("tensor",), ()]
    assert two.replica_views() == [("data", "tensor"), ("data",)]


def test_a_rank_of_five_axes_is_in_ten_groups_at_most() -> None:
    several = [view for view in LARGE.views() if view]
    assert len(several) == 10
    assert LARGE.wide(LARGE.replica_axes(("expert", "tensor"))) == ("data", "ring")
    assert ("data", "ring") in several, "the ranks that hold the same part of a cut expert"
    assert len(LARGE.replica_views()) == 4


def test_one_axis_of_one_rank_is_a_mesh() -> None:
    one = MeshSpec((Axis("data", 1, ("replica", "batch", "shard")),))
    assert one.groups(("data",)) == [(0,)]
    assert one.views() == [()]


@pytest.mark.parametrize("axes", [(("a", 2), ("a", 2)), (("a", 0),), (("a", -1),)])
def test_axes_that_make_no_grid_are_refused(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(LayoutError, match="mesh axes are a "):
        MeshSpec(tuple(Axis(*axis) for axis in axes))


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(AssertionError, match="outside the mesh"):
        LARGE.coordinate(4096)
    with pytest.raises(AssertionError, match="outside the mesh"):
        LARGE.peers(4096, ("data",))


def test_stages_are_numbered_along_the_pipe_axis_and_a_tied_parameter_has_the_ranks_of_all_its_stages() -> None:
    assert LARGE.stages == 8
    assert [LARGE.stage_of(rank) for rank in (0, 511, 512, 4095)] == [0, 0, 1, 7]
    small = MeshSpec((Axis("pipe", 4, ("pipe",)), Axis("data", 2, ("replica", "batch", "shard"))))
    assert small.replicas_over(7, (), (0, 3)) == (0, 1, 6, 7)
    assert small.replicas_over(0, (), (0, 1, 2, 3)) == small.peers(0, small.role_axes("world"))
    plain = MeshSpec((Axis("data", 2, ("replica", "batch", "shard")),))
    assert (plain.stages, plain.stage_of(1)) == (1, 0)
