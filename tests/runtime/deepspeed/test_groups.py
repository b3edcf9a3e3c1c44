"""Ranks share what the axes of the last engine say; an axis of one rank has no group."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsrun
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import ModelError
from dsrun.runtime.compat import HashStore
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


def _ask_along(pipe: int, context: int, tensor: int, gathers: bool) -> dict[str, Any]:
    """Returns what getters say to a rank whose engine has these axes, which are drafts: and sums over each group."""
    rows = [
        AxisRow("draft pipe", "draft", lambda config: pipe, ("pipe",)),
        AXES[1],
        AxisRow("draft context", "draft", lambda config: context, ("replica", "shard", "context")),
        AxisRow("draft tensor", "draft", lambda config: tensor, ("replica", "tensor"), cuts=True),
    ]
    setattr(importlib.import_module("dsrun.config.axes"), "AXES", tuple(rows))  # noqa: B010 - of this process alone
    setattr(groups, "AXES", tuple(rows))  # noqa: B010
    setattr(importlib.import_module("dsrun.runtime.engine.initialize"), "CUT_BY_AXES", ())  # noqa: B010
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine: Any = dsrun.initialize(model=nn.Linear(2, 2), config=config)[0]
    asked = {
        "data": groups.get_data_parallel_group,
        "sequence and data": groups._get_sequence_data_parallel_group,
        "tensor": groups.get_tensor_model_parallel_group,
        "model": groups.get_model_parallel_group,
        "sequence": groups._get_sequence_parallel_group,
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            group = ask()
        except ModelError as error:
            found[name] = str(error)
            continue
        assert ask() is group
        total = torch.tensor([10 ** dist.get_rank()])
        if gathers:
            dist.all_reduce(total, group=group)
        found[name] = dist.get_process_group_ranks(group), int(total)
    found["sizes"] = [
        groups.get_data_parallel_world_size(),
        groups._get_sequence_data_parallel_world_size(),
        groups.get_tensor_model_parallel_world_size(),
        groups._get_model_parallel_world_size(),
        groups._get_sequence_parallel_world_size(),
    ]
    found["places"] = [
        groups.get_data_parallel_rank(),
        groups._get_sequence_data_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
        groups.get_model_parallel_rank(),
        groups._get_sequence_parallel_rank(),
    ]
    found["sources"] = [groups.get_tensor_model_parallel_src_rank(), groups._get_broadcast_src_rank()]
    found["data ranks"] = list(groups._get_data_parallel_group_ranks())
    found["samples"] = engine.train_batch_size()
    found["engine"] = {
        "sizes": [
            engine.dp_world_size,
            engine.seq_dp_world_size,
            engine.mp_world_size,
            engine.sequence_parallel_size,
        ],
        "places": [
            engine.get_data_parallel_rank(),
            engine.get_tensor_parallel_rank(),
            engine.get_model_parallel_rank(),
        ],
        "groups": [
            dist.get_process_group_ranks(engine.data_parallel_group),
            dist.get_process_group_ranks(engine.seq_data_parallel_group),
        ],
    }
    grid = engine.grid
    found["grid"] = {
        "sizes": [grid.pipe_parallel_size, grid.data_parallel_size, grid.model_parallel_size],
        "places": [grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()],
        "data ranks": grid.get_data_parallel_group_ranks(),
    }
    engine.destroy()
    return found


def test_tensor_ranks_are_neighbours_and_data_ranks_the_others() -> None:
    ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank, found in enumerate(run_ranks(4, _ask_along, 1, 1, 2, True)):
        data, tensor = ranks[rank]
        of_data, of_tensor = [tensor, 2 + tensor], [2 * data, 2 * data + 1]
        assert found["data"] == found["sequence and data"] == (of_data, sum(10**one for one in of_data))
        assert found["tensor"] == found["model"] == (of_tensor, sum(10**one for one in of_tensor))
        assert "there is no sequence-parallel group" in found["sequence"]
        assert found["sizes"] == [2, 2, 2, 2, 1]
        assert found["places"] == [data, data, tensor, tensor, 0]
        assert found["sources"] == [2 * data, tensor]
        assert found["data ranks"] == of_data
        assert found["samples"] == 2
        assert found["engine"] == {
            "sizes": [2, 2, 2, 1],
            "places": [data, tensor, tensor],
            "groups": [of_data, of_data],
        }
        assert found["grid"] == {"sizes": [1, 2, 2], "places": [0, data, tensor], "data ranks": of_data}


def test_all_ranks_of_a_layer_are_no_data_ranks() -> None:
    """A group of one rank for its data, and all ranks for its layers."""
    for rank, found in enumerate(run_ranks(2, _ask_along, 1, 1, 2, True)):
        assert found["data"] == ([rank], 10**rank)
        assert found["tensor"] == ([0, 1], 11)
        assert found["sizes"] == [1, 1, 2, 2, 1]
        assert found["sources"] == [0, rank]


def test_stages_and_sequences_have_ranks_of_their_own() -> None:
    """Eight ranks are 2 stages x 1 data x 2 context x 2 tensor ones."""
    for rank, found in enumerate(run_ranks(8, _ask_along, 2, 2, 2, False)):
        stage, context, tensor = rank // 4, rank // 2 % 2, rank % 2
        first = 4 * stage
        assert found["data"][0] == [rank]
        assert found["sequence and data"][0] == [first + tensor, first + 2 + tensor]
        assert found["sequence"][0] == [first + tensor, first + 2 + tensor]
        assert found["tensor"][0] == [first + 2 * context, first + 2 * context + 1]
        assert found["sizes"] == [1, 2, 2, 2, 2]
        assert found["places"] == [0, context, tensor, tensor, context]
        assert found["sources"] == [first + 2 * context, first + tensor]
        assert found["engine"] == {
            "sizes": [1, 2, 2, 2],
            "places": [0, tensor, tensor],
            "groups": [[rank], [first + tensor, first + 2 + tensor]],
        }


def _ask_behind_an_engine() -> tuple[list[int], list[int]]:
    """Returns data ranks while there is an engine, and once ranks have joined anew without one."""
    _ask_along(1, 1, 2, False)
    assert not dist.is_initialized(), "the engine's"
    assert groups.get_tensor_model_parallel_world_size() == 1
    dsrun.init_distributed("gloo")
    with_axes = list(groups._get_data_parallel_group_ranks())
    dist.barrier()  # whoever leaves at once closes the connection that the other one may still be making
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return with_axes, list(groups._get_data_parallel_group_ranks())


def test_ranks_that_are_not_those_of_the_last_engine_are_data_ranks() -> None:
    for rank, (with_axes, alone) in enumerate(run_ranks(2, _ask_behind_an_engine)):
        assert with_axes == [rank]
        assert alone == [0]
