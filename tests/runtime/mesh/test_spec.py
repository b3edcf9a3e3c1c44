"""Ranks and coordinates of the grid, for thousands of ranks."""

from __future__ import annotations

import pytest

from dsrun.errors import LayoutError
from dsrun.runtime.mesh.spec import MeshSpec

LARGE = MeshSpec((("data", 64), ("pipe", 8), ("tensor", 8)))


def test_coordinates_go_there_and_back_for_4096_ranks() -> None:
    assert LARGE.world_size == 4096
    assert [LARGE.rank(LARGE.coordinate(rank)) for rank in range(4096)] == list(range(4096))
    assert LARGE.coordinate(4095) == {"data": 63, "pipe": 7, "tensor": 7}


@pytest.mark.parametrize("axis", ["data", "pipe", "tensor"])
def test_groups_of_an_axis_hold_every_rank_once_and_its_own_peers(axis: str) -> None:
    groups = LARGE.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(4096))
    assert {len(group) for group in groups} == {LARGE.size(axis)}
    for group in groups[:: len(groups) // 4]:
        for rank in group:
            assert LARGE.peers(rank, axis) == group


def test_the_last_axis_runs_over_neighbours() -> None:
    assert LARGE.peers(8, "tensor") == list(range(8, 16))
    assert LARGE.peers(0, "data")[:2] == [0, 64]


def test_one_axis_of_one_rank_is_a_mesh() -> None:
    assert MeshSpec((("data", 1),)).groups("data") == [[0]]


@pytest.mark.parametrize("axes", [(("a", 2), ("a", 2)), (("a", 0),), (("a", -1),)])
def test_axes_that_make_no_grid_are_refused(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(LayoutError, match="mesh axes are"):
        MeshSpec(axes)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(AssertionError, match="outside the mesh"):
        LARGE.coordinate(4096)
