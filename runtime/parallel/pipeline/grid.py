"""Where this rank is among stages and their copies, by the names of Megatron's and DeepSpeed's `mpu`.

Numbers are arithmetic. A process group is made when it is first asked for; the engine uses none of these.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dsrun.errors import LayoutError, ModelError

from .ranks import JobRank, job_rank
from .topology import PipeDataParallelTopology, ProcessTopology


class PipelineParallelGrid:
    """This rank's place, and the ranks that it has something in common with.

    Groups are torch's: the first call of a getter makes one, and all ranks of that group must make that call.

    Args:
        topology: grid of the ranks; None: stages and copies by the prime factors of the number of ranks, in turn.
        process_group: DeepSpeed's argument, without effect, as there: all ranks of the job are meant.
        job: this rank and the ranks of the job; None: those of torch's process group, or of the environment.

    Attributes:
        global_rank: rank of this process in the job.
        world_size: ranks of the job.
        data_parallel_size: ranks that have the same stage.
        pipe_parallel_size: stages.
        model_parallel_size: ranks that share a layer.
        slice_parallel_size: the same number.
        stage_id: stage of this rank.
        data_parallel_id: number of the pipeline that this rank is in.
        is_first_stage: whether the stage is the first one.
        is_last_stage: whether the stage is the last one.
        ds_model_rank: place of this rank among those of its pipeline.
        ds_model_world_size: ranks of a pipeline.
        dp_group: ranks that have this rank's stage.
        dp_groups: the same for each stage.
        pp_group: ranks of this rank's line through the stages.
        pipe_groups: the same for each line.
        p2p_groups: each rank, and the one with the stage after it; the first stage comes after the last.
        slice_group: ranks that share a layer with this one.
        model_groups: the same for all, where more than one rank share a layer.

    Raises:
        LayoutError: the grid has another number of ranks than the job.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, job: JobRank | None = None
    ) -> None:
        del process_group
        here = job_rank() if job is None else job
        self.global_rank, self.world_size = here.rank, here.world_size
        topo = _default_topology(self.world_size) if topology is None else topology
        self._topo = topo
        if topo.world_size() != self.world_size:
            sizes = dict(zip(topo.get_axis_names(), topo.dims, strict=True))
            raise LayoutError(
                f"PipelineParallelGrid: the topology {sizes} has {topo.world_size()} ranks; the job has "
                f"{self.world_size}",
                hint="start as many ranks, or make the topology for those that there are",
            )
        self.data_parallel_size = max(topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topo.get_dim("model"), 1)
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups = topo.get_axis_comm_lists("data")
        self.dp_group = self._own(self.dp_groups)
        self.pipe_groups = topo.get_axis_comm_lists("pipe")
        self.pp_group = self._own(self.pipe_groups)
        self.model_groups = topo.get_axis_comm_lists("model") if self.model_parallel_size > 1 else []
        self.slice_group = self._own(self.model_groups)
        self._replica = topo.get_axis_list("data", self.data_parallel_id) if topo.get_dim("data") else [*self._all()]
        self.ds_model_rank = self._replica.index(self.global_rank)
        self.ds_model_world_size = len(self._replica)
        after = {rank: line[(at + 1) % len(line)] for line in self.pipe_groups for at, rank in enumerate(line)}
        self.p2p_groups = [[rank, after.get(rank, rank)] for rank in self._all()]
        self._groups: dict[tuple[int, ...], Any] = {}

    def topology(self) -> ProcessTopology:
        """Returns the grid of the ranks."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Returns the rank that has a stage, on this rank's line or another.

        Args:
            stage_id: number of the stage.
            kwargs: places on other axes, by their names; this rank's where they are left out.

        Raises:
            LayoutError: no rank is there.
        """
        place: dict[str, int] = {**self._coord()._asdict(), "pipe": stage_id, **kwargs}
        return self._topo.get_rank(**place)

    def get_stage_id(self) -> int:
        """Returns this rank's stage."""
        return getattr(self._coord(), "pipe", 0)

    def get_data_parallel_id(self) -> int:
        """Returns the number of the pipeline that this rank is in."""
        return getattr(self._coord(), "data", 0)

    def get_global_rank(self) -> int:
        """Returns this rank's number in the job."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Returns this rank's stage."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Returns the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Returns torch's group of this rank's line through the stages.

        Raises:
            ModelError: ranks have not joined.
        """
        return self.group_of(self.pp_group, "get_pipe_parallel_group")

    def get_data_parallel_rank(self) -> int:
        """Returns the number of the pipeline that this rank is in."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of ranks that have the same stage."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Returns torch's group of the ranks that have this rank's stage.

        Raises:
            ModelError: ranks have not joined.
        """
        return self.group_of(self.dp_group, "get_data_parallel_group")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns the ranks that have this rank's stage."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Returns the place of this rank among all of its pipeline: "model parallel" means all stages here."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Returns the number of ranks of a pipeline."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Returns torch's group of all ranks of this rank's pipeline.

        Raises:
            ModelError: ranks have not joined.
        """
        return self.group_of(self._replica, "get_model_parallel_group")

    def get_slice_parallel_rank(self) -> int:
        """Returns the place of this rank among those that share its layers."""
        return getattr(self._coord(), "model", 0)

    def get_slice_parallel_world_size(self) -> int:
        """Returns the number of ranks that share a layer."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Returns torch's group of the ranks that share a layer with this one.

        Raises:
            ModelError: ranks have not joined.
        """
        return self.group_of(self.slice_group, "get_slice_parallel_group")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    ds_model_proc_group = property(get_model_parallel_group)
    dp_proc_group = property(get_data_parallel_group)
    pp_proc_group = property(get_pipe_parallel_group)
    slice_proc_group = property(get_slice_parallel_group)

    def group_of(self, ranks: list[int], label: str) -> Any:
        """Returns torch's group of some ranks, one of them this; the first call makes it, and all of them must call.

        Args:
            ranks: ranks of the group, ascending.
            label: name of the caller, for errors.

        Raises:
            ModelError: ranks have not joined.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ModelError(
                f"PipelineParallelGrid.{label}: ranks have not joined, so there is no group of ranks {ranks}",
                hint="call init_distributed or initialize before; ranks and sizes are known without",
            )
        if len(ranks) == self.world_size:
            return dist.group.WORLD
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[key]

    def _coord(self) -> Any:
        return self._topo.get_coord(self.global_rank)

    def _all(self) -> range:
        return range(self.world_size)

    def _own(self, groups: list[list[int]]) -> list[int]:
        return next((ranks for ranks in groups if self.global_rank in ranks), [self.global_rank])


def _default_topology(world_size: int) -> PipeDataParallelTopology:
    """Returns a grid of stages and copies, which get the prime factors of a number in turn, the smallest first."""
    sizes = [1, 1]
    left, factor, turn = world_size, 2, 0
    while left > 1:
        if left % factor:
            factor += 1
            continue
        sizes[turn % 2] *= factor
        left //= factor
        turn += 1
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
