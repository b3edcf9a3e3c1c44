"""A rank finds its place among stages and copies as in DeepSpeed; the values were recorded from DeepSpeed 0.19.8."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dsrun.errors import LayoutError, ModelError
from dsrun.runtime.parallel.pipeline.grid import PipelineParallelGrid
from dsrun.runtime.parallel.pipeline.ranks import JobRank
from dsrun.runtime.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

RECORDED: list[tuple[int, ProcessTopology, dict[str, Any]]] = [
    (
        5,
        PipeModelDataParallelTopology(2, 2, 2),
        {
            "stage": 1,
            "data": 0,
            "pipe_size": 2,
            "data_size": 2,
            "model": (3, 4),
            "slice": (1, 2),
            "groups": ([1, 5], [5, 7], [4, 5]),
            "p2p": [[0, 4], [1, 5], [2, 6], [3, 7], [4, 0], [5, 1], [6, 2], [7, 3]],
            "ends": (False, True),
            "to": [1, 5],
        },
    ),
    (
        3,
        PipeDataParallelTopology(3, 2),
        {
            "stage": 1,
            "data": 1,
            "pipe_size": 3,
            "data_size": 2,
            "model": (1, 3),
            "slice": (0, 1),
            "groups": ([1, 3, 5], [2, 3], [3]),
            "p2p": [[0, 2], [1, 3], [2, 4], [3, 5], [4, 0], [5, 1]],
            "ends": (False, False),
            "to": [1, 3, 5],
        },
    ),
    (
        0,
        PipeDataParallelTopology(1, 2),
        {
            "stage": 0,
            "data": 0,
            "pipe_size": 1,
            "data_size": 2,
            "model": (0, 1),
            "slice": (0, 1),
            "groups": ([0], [0, 1], [0]),
            "p2p": [[0, 0], [1, 1]],
            "ends": (True, True),
            "to": [0],
        },
    ),
]


@pytest.mark.parametrize(("rank", "topology", "recorded"), RECORDED)
def test_places_and_sizes_are_those_of_deepspeed(
    rank: int, topology: ProcessTopology, recorded: dict[str, Any]
) -> None:
    grid = PipelineParallelGrid(topology, job=JobRank(rank, topology.world_size()))
    assert {
        "stage": grid.get_pipe_parallel_rank(),
        "data": grid.get_data_parallel_rank(),
        "pipe_size": grid.get_pipe_parallel_world_size(),
        "data_size": grid.get_data_parallel_world_size(),
        "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
        "slice": (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()),
        "groups": (grid.pp_group, grid.get_data_parallel_group_ranks(), grid.slice_group),
        "p2p": grid.p2p_groups,
        "ends": (grid.is_first_stage, grid.is_last_stage),
        "to": [grid.stage_to_global(stage) for stage in range(grid.pipe_parallel_size)],
    } == recorded
    assert grid.topology() is topology
    assert (grid.get_global_rank(), grid.get_pipeline_model_parallel_rank()) == (rank, recorded["stage"])
    assert grid.get_tensor_model_parallel_world_size() == recorded["slice"][1]


def test_another_line_is_reached_by_its_place() -> None:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2), job=JobRank(5, 8))
    assert grid.stage_to_global(0, data=1) == 3


@pytest.mark.parametrize(
    ("ranks", "dims"), [(1, [1, 1]), (2, [2, 1]), (6, [2, 3]), (12, [6, 2]), (24, [4, 6]), (30, [10, 3])]
)
def test_without_a_topology_stages_and_copies_get_prime_factors_in_turn(ranks: int, dims: list[int]) -> None:
    assert list(PipelineParallelGrid(job=JobRank(0, ranks)).topology().dims) == dims


def test_the_rank_is_that_of_the_job_before_ranks_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1))
    assert (grid.global_rank, grid.world_size, grid.stage_id) == (1, 2, 1)


def test_a_grid_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'pipe': 2, 'data': 2.* has 4 ranks; the job has 2"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 2), job=JobRank(0, 2))


def test_groups_are_refused_before_ranks_have_joined() -> None:
    grid = PipelineParallelGrid(PipeDataParallelTopology(2, 1), job=JobRank(0, 2))
    for ask in (grid.get_pipe_parallel_group, grid.get_data_parallel_group, grid.get_model_parallel_group):
        with pytest.raises(ModelError, match="ranks have not joined, so there is no group of ranks"):
            ask()


def test_groups_are_of_the_ranks_that_they_name() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=6, store=FakeStore())
    try:
        grid = PipelineParallelGrid(PipeDataParallelTopology(3, 2))
        assert dist.get_process_group_ranks(grid.get_pipe_parallel_group()) == [1, 3, 5]
        assert dist.get_process_group_ranks(grid.dp_proc_group) == [2, 3]
        assert dist.get_process_group_ranks(grid.slice_proc_group) == [3]
        assert grid.get_model_parallel_group() is grid.get_pipe_parallel_group(), "the same ranks, made once"
        one_stage = PipelineParallelGrid(PipeDataParallelTopology(1, 6))
        assert one_stage.get_data_parallel_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()
