"""Every rank is a data-parallel one; other axes are of one rank, and have no group."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.deepspeed import groups
from support.ranks import run_ranks

ALONE = ("tensor_model_parallel", "model_parallel")


def _ask() -> list[Any]:
    dsrun.init_distributed("gloo")
    assert groups._get_data_parallel_group() is groups.get_data_parallel_group() is dist.group.WORLD
    assert groups._get_sequence_data_parallel_group() is groups._clone_world_group() is dist.group.WORLD
    assert dist.get_global_rank(groups._get_data_parallel_group(), 1) == 1
    return [
        groups._get_data_parallel_world_size(),
        groups._get_data_parallel_rank(),
        list(groups._get_data_parallel_group_ranks()),
        groups._get_sequence_data_parallel_world_size(),
        groups._get_sequence_data_parallel_rank(),
        groups._get_broadcast_src_rank(),
        groups.get_tensor_model_parallel_src_rank(),
    ]


def test_ranks_share_their_data_and_nothing_else() -> None:
    for rank, seen in enumerate(run_ranks(2, _ask)):
        assert seen == [2, rank, [0, 1], 2, rank, 0, rank]


def test_other_axes_are_of_one_rank() -> None:
    assert [groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()] == [1, 0]
    assert [groups._get_model_parallel_world_size(), groups._get_expert_model_parallel_world_size()] == [1, 1]
    for axis in ALONE:
        assert [getattr(groups, f"get_{axis}_{what}")() for what in ("world_size", "rank")] == [1, 0]
    assert groups._get_expert_parallel_group_dict() == groups._get_expert_data_parallel_group_dict() == {}
    assert groups._get_zero_param_intra_parallel_group() is groups._get_max_expert_size() is groups.mpu is None
    assert not groups._zero_param_parallel_is_initialized()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_get_sequence_parallel_group", ()),
        ("get_model_parallel_group", ()),
        ("get_tensor_model_parallel_group", ()),
        ("_get_expert_parallel_group", ("ep_size_2",)),
        ("_get_expert_data_parallel_world_size", ("ep_size_2",)),
    ],
)
def test_groups_that_are_not_there_are_refused(name: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=r"there is no \w+-parallel group") as raised:
        getattr(groups, name)(*arguments)
    assert isinstance(raised.value, AssertionError | KeyError)
    assert str(raised.value).startswith("deepspeed.utils.groups: ")


def test_who_asks_before_ranks_join_is_told() -> None:
    for name in ("_get_data_parallel_group", "_get_data_parallel_rank", "_get_broadcast_src_rank"):
        with pytest.raises(AssertionError, match="ranks have not joined"):
            getattr(groups, name)()
