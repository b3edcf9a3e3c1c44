"""What a script says about its job has to be what the environment says; other parallelism is refused by its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import dsrun
from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.mesh_spec import MeshSpec
from dsrun.runtime.engine.compose.arguments import check_joined, check_parallelism, check_place
from support.models import TinyGPT
from support.training import config


def groups(**sizes: int) -> Any:
    """An `mpu` that answers for each kind of parallelism."""
    return SimpleNamespace(**{f"get_{kind}_world_size": lambda size=size: size for kind, size in sizes.items()})


def grid(world_size: int = 4, **sizes: int) -> MeshSpec:
    return divide(world_size, sizes)


def test_parallelism_of_the_sizes_that_the_config_has_is_taken() -> None:
    check_parallelism(None, None, grid(), rank=0)
    check_parallelism(groups(model_parallel=1, pipe_parallel=1, data_parallel=4), (4, 1), grid(), rank=3)
    check_parallelism(object(), [4], grid(), rank=0)
    cut = groups(model_parallel=2, tensor_model_parallel=2, pipe_parallel=1, data_parallel=2)
    cut.get_data_parallel_rank = lambda: 1
    check_parallelism(cut, (2, 1), grid(tensor=2), rank=2)
    check_parallelism(groups(model_parallel=4, pipe_parallel=2, data_parallel=1), None, grid(pipe=2, tensor=2), rank=1)


@pytest.mark.parametrize(
    ("mpu", "mesh_param", "sizes", "message"),
    [
        (
            groups(model_parallel=2),
            None,
            {},
            r"mpu\.get_model_parallel_world_size\(\) is 2; .*the 4 ranks so that it is 1",
        ),
        (groups(model_parallel=1), None, {"tensor": 2}, r"mpu\.get_model_parallel_world_size\(\) is 1; .* it is 2"),
        (groups(sequence_parallel=4), None, {}, r"mpu\.get_sequence_parallel_world_size\(\) is 4"),
        (groups(data_parallel=2), None, {}, r"get_data_parallel_world_size\(\) is 2; .*the 4 ranks so that it is 4"),
        (groups(data_parallel=4), None, {"tensor": 2}, r"get_data_parallel_world_size\(\) is 4; .* that it is 2"),
        (None, (2, 2), {}, r"mesh_param is \(2, 2\); expected \(4, 1\)"),
        (None, (4, 1), {"tensor": 2}, r"mesh_param is \(4, 1\); expected \(2, 1\)"),
        (
            SimpleNamespace(get_data_parallel_rank=lambda: 1),
            None,
            {"tensor": 2},
            r"get_data_parallel_rank\(\) is 1 on rank 1, which reads the samples of data rank 0",
        ),
    ],
)
def test_other_parallelism_is_refused(mpu: Any, mesh_param: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_parallelism(mpu, mesh_param, grid(**sizes), rank=1)
    assert caught.value.hint


def test_a_place_is_the_environments() -> None:
    info = RankInfo(rank=1, world_size=2)
    check_place(info, init_method=None, rank=-1, world_size=-1)
    check_place(info, init_method="env://", rank=1, world_size=2)
    for said, message in (
        ({"init_method": "tcp://10.0.0.1:1"}, r"init_method is 'tcp://10\.0\.0\.1:1'"),
        ({"rank": 0}, "rank is 0; the environment says 1"),
        ({"world_size": 3}, "world_size is 3; the environment says 2"),
    ):
        with pytest.raises(InputError, match=message):
            check_place(info, **{"init_method": None, "rank": -1, "world_size": -1, **said})


def test_a_script_that_says_it_has_joined_is_believed_where_it_has() -> None:
    assert not dist.is_initialized()
    with pytest.raises(InputError, match="dist_init_required is False, and this process is in no process group"):
        dsrun.initialize(model=TinyGPT(), config=config(1, micro=2), dist_init_required=False)
    dsrun.init_distributed()
    check_joined(dist_init_required=False)
    mpu = groups(data_parallel=1)
    engine = dsrun.initialize(
        model=TinyGPT(), config=config(1, micro=2), mpu=mpu, mesh_param=(1, 1), distributed_port=29500
    )[0]
    assert engine.mpu is mpu
