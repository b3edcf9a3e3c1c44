"""What `deepspeed.comm` has beyond torch.distributed works before an engine is made, on one rank and on several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import dsrun
from support.ranks import run_ranks


def _talk() -> list[Any]:
    before = dsrun.comm.is_initialized()
    backend = dsrun.comm.TorchBackend("gloo")
    again = dsrun.comm.TorchBackend("gloo", name="again")
    tensor = torch.full((2,), float(dist.get_rank() + 1))
    dsrun.comm.inference_all_reduce(tensor)
    return [
        before,
        backend.is_initialized(),
        again.name,
        backend.get_world_size(),
        tensor.tolist(),
        dsrun.comm.get_all_ranks_from_group(),
        dsrun.comm.get_all_ranks_from_group(dsrun.comm.get_world_group()),
    ]


def test_ranks_join_by_it_and_sum() -> None:
    for said in run_ranks(2, _talk):
        assert said == [False, True, "again", 2, [3.0, 3.0], [0, 1], [0, 1]]
