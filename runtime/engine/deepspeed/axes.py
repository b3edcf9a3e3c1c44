"""Where an engine's rank is among those that share something with it, by DeepSpeed's names. Pipeline stages stand in
`batch_calls.py`; the same for the last engine of a process, in runtime/deepspeed/groups.py.
"""

from __future__ import annotations

import torch.distributed as dist

from dsrun.errors import ModelError
from dsrun.mesh_spec import Role

from ...mesh.join.groups import ProcessGroupMesh, group_of


class AxisGetters:
    """What an engine says about its ranks."""

    _mesh: ProcessGroupMesh

    @property
    def mp_world_size(self) -> int:
        """Ranks that share each layer."""
        return self._mesh.tensor.size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks that have the same parameters, and other samples or other parts of sequences."""
        return self._mesh.shard.size

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return self._mesh.context.size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one in their samples alone.

        Raises:
            ModelError: ranks have not joined by torch.distributed, or the engine has ended.
        """
        return self._group("batch", "data_parallel_group")

    @property
    def seq_data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that have the same parameters, and other samples or other parts of sequences.

        Raises:
            ModelError: ranks have not joined by torch.distributed, or the engine has ended.
        """
        return self._group("shard", "seq_data_parallel_group")

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's place among those that have other samples."""
        return self._mesh.batch.rank

    def get_tensor_parallel_rank(self) -> int:
        """Returns this rank's place among those that share each layer."""
        return self._mesh.tensor.rank

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's place among those that share each layer."""
        return self._mesh.tensor.rank

    def _group(self, role: Role, name: str) -> dist.ProcessGroup:
        spec, info = self._mesh.spec, self._mesh.info
        found = group_of(spec.peers(info.rank, spec.role_axes(role))) if dist.is_initialized() else None
        if found is None:
            raise ModelError(
                f"engine.{name}: there is no process group of these ranks, or none any more",
                hint="ask while the engine is there",
            )
        return found
