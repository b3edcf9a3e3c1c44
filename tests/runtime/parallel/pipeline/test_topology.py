"""Ranks on a grid are numbered and found as DeepSpeed does; the values were recorded from DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest

from dsrun.errors import LayoutError
from dsrun.runtime.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

CUBE = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
FLAT = ProcessTopology(["x", "y"], [2, 3])


def test_the_last_axis_is_the_fastest() -> None:
    assert (list(CUBE.get_axis_names()), list(CUBE.dims), CUBE.world_size()) == (
        ["pipe", "data", "model"],
        [2, 2, 2],
        8,
    )
    assert CUBE.get_rank(pipe=1, data=0, model=1) == 5
    assert tuple(CUBE.get_coord(6)) == (1, 1, 0)
    assert (CUBE.get_coord(6).pipe, CUBE.get_coord(6)._fields) == (1, ("pipe", "data", "model"))
    assert [PipeDataParallelTopology(2, 3).get_rank(pipe=1, data=place) for place in range(3)] == [3, 4, 5]


def test_every_rank_is_found_by_its_coordinate() -> None:
    assert [CUBE.get_rank(**CUBE.get_coord(rank)._asdict()) for rank in range(8)] == list(range(8))
    assert list(CUBE.mapping.values()) == list(range(8))


@pytest.mark.parametrize(
    ("axis", "size", "lists"),
    [
        ("pipe", 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("data", 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("model", 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("nope", 0, []),
    ],
)
def test_lines_along_an_axis_are_those_of_deepspeed(axis: str, size: int, lists: list[list[int]]) -> None:
    assert (CUBE.get_dim(axis), CUBE.get_axis_comm_lists(axis)) == (size, lists)


def test_ranks_are_found_by_some_of_their_places() -> None:
    assert CUBE.filter_match(pipe=0, data=1) == [2, 3]
    assert CUBE.filter_match(model=1) == [1, 3, 5, 7]
    assert CUBE.filter_match() == list(range(8))
    assert CUBE.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert CUBE.get_axis_list(axis="model", idx=0) == [0, 2, 4, 6]
    assert (FLAT.get_axis_list("x", 0), FLAT.get_axis_list("y", 0)) == ([0, 1, 2], [0, 3])


def test_a_rank_is_named_by_the_axes_that_are_not_left_out() -> None:
    assert [CUBE.get_rank_repr(rank) for rank in range(3)] == ["model_00", "model_01", "model_00"]
    assert CUBE.get_rank_repr(5, omit_axes=["data"]) == "pipe_01-model_01"
    assert CUBE.get_rank_repr(5, omit_axes=[], inner_sep="+", outer_sep="/") == "pipe+01/data+00/model+01"


def test_the_text_of_a_grid_is_that_of_deepspeed() -> None:
    assert str(ProcessTopology(["x", "y"], [1, 2])) == "{ProcessCoord(x=0, y=0): 0, ProcessCoord(x=0, y=1): 1}"


def test_places_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"'x'.*expected one place on each of"):
        FLAT.get_rank(x=0)
    with pytest.raises(AssertionError, match="no rank is at"):  # DeepSpeed's class
        FLAT.get_rank(x=2, y=0)
    with pytest.raises(ValueError, match="there is no rank 6 of 6"):  # DeepSpeed's class
        FLAT.get_coord(6)
    with pytest.raises(LayoutError, match="there is no axis 'z'"):
        FLAT.get_axis_list("z", 0)
    with pytest.raises(LayoutError, match=r"axes \['x'\] have sizes \[2, 3\]"):
        ProcessTopology(["x"], [2, 3])
