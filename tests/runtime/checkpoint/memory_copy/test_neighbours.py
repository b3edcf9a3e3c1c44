"""What several ranks hold is shared out among those of them that run on one host."""

from __future__ import annotations

import pytest

from dsrun.mesh_spec import Axis, MeshSpec
from dsrun.runtime.checkpoint.memory_copy.neighbours import holders_on_host
from dsrun.runtime.protocols import SOLE_HOLDER, Holders

GRID = MeshSpec((Axis("data", 4), Axis("tensor", 2)))


@pytest.mark.parametrize(
    ("axes", "rank", "here", "expected"),
    [
        (("data", "tensor"), 5, (4, 5, 6, 7), (1, 4)),
        (("data",), 5, (4, 5, 6, 7), (0, 2)),
        (("data",), 7, (4, 5, 6, 7), (1, 2)),
        (("tensor",), 7, (4, 5, 6, 7), (1, 2)),
        (("tensor",), 7, (1, 3, 5, 7), (0, 1)),
        (("data",), 7, (1, 3, 5, 7), (3, 4)),
        ((), 7, (4, 5, 6, 7), (0, 1)),
    ],
)
def test_the_holders_of_a_host_are_those_that_differ_on_the_axes_alone(
    axes: tuple[str, ...], rank: int, here: tuple[int, ...], expected: tuple[int, int]
) -> None:
    size = 1
    for axis in axes:
        size *= GRID.size(axis)
    found = holders_on_host(Holders(axes, 0, size), GRID, rank=rank, here=here)
    assert found == Holders(axes, *expected)


def test_a_rank_alone_stays_alone() -> None:
    assert holders_on_host(SOLE_HOLDER, GRID, rank=3, here=(2, 3)) == SOLE_HOLDER


def test_an_axis_that_the_grid_has_not_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="no axes"):
        holders_on_host(Holders(("pipe",), 0, 2), GRID, rank=3, here=(2, 3))


def test_of_what_some_pipeline_stages_hold_those_of_the_host_that_are_of_these_stages() -> None:
    grid = MeshSpec((Axis("pipe", 3, ("pipe",)), Axis("data", 2, ("replica",))))
    tied = Holders(("pipe", "data"), 3, 4, (0, 2))
    assert holders_on_host(tied, grid, rank=5, here=(2, 3, 4, 5)) == Holders(("pipe", "data"), 1, 2, (0, 2))
