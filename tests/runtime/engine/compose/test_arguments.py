"""What a script says about its job has to be what the environment says; other parallelism is refused by its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import dsrun
from dsrun.contract.environment import RankInfo
from dsrun.errors import InputError
from dsrun.runtime.engine.compose.arguments import check_joined, check_parallelism, check_place
from support.models import TinyGPT
from support.training import config


def groups(**sizes: int) -> Any:
    """An `mpu` that answers for each kind of parallelism."""
    return SimpleNamespace(**{f"get_{kind}_world_size": lambda size=size: size for kind, size in sizes.items()})


def test_parallelism_of_size_1_is_taken() -> None:
    check_parallelism(None, None, world_size=4)
    check_parallelism(groups(model_parallel=1, pipe_parallel=1, data_parallel=4), (4, 1), world_size=4)
    check_parallelism(object(), [4], world_size=4)


@pytest.mark.parametrize(
    ("mpu", "mesh_param", "message"),
    [
        (groups(model_parallel=2), None, r"mpu\.get_model_parallel_world_size\(\) is 2; only data parallelism"),
        (groups(sequence_parallel=4), None, r"mpu\.get_sequence_parallel_world_size\(\) is 4"),
        (
            groups(model_parallel=1, data_parallel=2),
            None,
            r"get_data_parallel_world_size\(\) is 2; the job has 4 ranks",
        ),
        (None, (2, 2), r"mesh_param is \(2, 2\); expected \(4, 1\)"),
    ],
)
def test_other_parallelism_is_refused(mpu: Any, mesh_param: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_parallelism(mpu, mesh_param, world_size=4)
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
