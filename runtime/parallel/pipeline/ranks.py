"""Who this process is in its job, before ranks have joined as well as after. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from dsrun.contract.environment import RankInfo


@dataclass(frozen=True, slots=True)
class JobRank:
    """A rank of the job.

    Attributes:
        rank: number of the rank.
        world_size: ranks of the job.
    """

    rank: int
    world_size: int


def job_rank() -> JobRank:
    """Returns this rank: of torch's process group once ranks have joined, before that of the job's environment.

    Raises:
        InputError: the environment contradicts itself.
    """
    if dist.is_available() and dist.is_initialized():
        return JobRank(dist.get_rank(), dist.get_world_size())
    info = RankInfo.from_env()
    return JobRank(info.rank, info.world_size)
