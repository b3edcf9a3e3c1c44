"""Which ranks share what, by the names of DeepSpeed's `utils.groups`: those of the axes of the last engine's ranks.

Groups are torch's, and those that the engine's ranks have made; nothing is set up here. Before there is an engine every
rank is a data-parallel one. An axis of one rank has size 1, and a rank's place on it is 0, as in DeepSpeed where it is
not set up; who asks for its group is told so. What the axes are, `dsrun.mesh_spec` says.
"""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import torch.distributed as dist

from dsrun.config.axes import AXES, divide
from dsrun.contract.environment import noted_axes
from dsrun.errors import ModelError
from dsrun.mesh_spec import MeshSpec, Role

from ..mesh.join.groups import group_of

__all__ = [
    "_clone_world_group",
    "_get_broadcast_src_rank",
    "_get_data_parallel_group",
    "_get_data_parallel_group_ranks",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_expert_broadcast_src_rank",
    "_get_expert_data_parallel_group",
    "_get_expert_data_parallel_group_dict",
    "_get_expert_data_parallel_group_ranks",
    "_get_expert_data_parallel_rank",
    "_get_expert_data_parallel_world_size",
    "_get_expert_model_parallel_world_size",
    "_get_expert_parallel_group",
    "_get_expert_parallel_group_dict",
    "_get_expert_parallel_group_ranks",
    "_get_expert_parallel_rank",
    "_get_expert_parallel_src_rank",
    "_get_expert_parallel_world_size",
    "_get_max_expert_size",
    "_get_model_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "_get_zero_param_intra_parallel_group",
    "_zero_param_parallel_is_initialized",
    "expert_tensor_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "mesh_device",
    "mpu",
]

#: Megatron's object and torch's mesh, which would say more; nothing sets them here.
mpu: Any = None
mesh_device: Any = None
#: Ranks that share an expert's matrices.
expert_tensor_parallel_world_size = 1


class NoGroupError(ModelError, KeyError):
    """There is no such group; a KeyError as well, as scripts expect."""

    def __str__(self) -> str:
        """Returns the message as it is: a KeyError's has quotes around it."""
        return self.problems[0].message


def get_data_parallel_group() -> Any:
    """Returns the group of the ranks that differ from this one in their samples alone.

    Raises:
        ModelError: ranks have not joined, or the engine that had the group has ended.
    """
    return _group("batch", "get_data_parallel_group")


def get_data_parallel_world_size() -> int:
    """Returns the number of ranks with samples of their own.

    Raises:
        ModelError: ranks have not joined.
    """
    return len(_peers("batch"))


def get_data_parallel_rank() -> int:
    """Returns this rank's place among those with samples of their own.

    Raises:
        ModelError: ranks have not joined.
    """
    return _peers("batch").index(dist.get_rank())


def get_tensor_model_parallel_world_size() -> int:
    """Returns the number of ranks that share each layer; 1 before ranks join."""
    return _size("tensor")


def get_tensor_model_parallel_rank() -> int:
    """Returns this rank's place among those that share each layer; 0 before ranks join."""
    return _place("tensor")


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the first of the ranks that share each layer with this one, by its number in the job.

    Raises:
        ModelError: ranks have not joined.
    """
    return _peers("tensor")[0]


def get_tensor_model_parallel_group() -> Any:
    """Returns the group of the ranks that share each layer.

    Raises:
        NoGroupError: each rank has its layers whole.
        ModelError: the engine that had the group has ended.
    """
    return _group_of_several("tensor", "get_tensor_model_parallel_group", "tensor-parallel")


def get_model_parallel_group() -> Any:
    """Returns the group of the ranks that share each layer: DeepSpeed calls them model-parallel ones, too.

    Raises:
        NoGroupError: each rank has its layers whole.
        ModelError: the engine that had the group has ended.
    """
    return _group_of_several("tensor", "get_model_parallel_group", "model-parallel")


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank


def _clone_world_group() -> Any:
    """Returns the group of all ranks."""
    _check_joined()
    return dist.group.WORLD


def _get_data_parallel_group_ranks() -> tuple[int, ...]:
    """Returns the ranks that differ from this one in their samples alone."""
    return _peers("batch")


def _get_broadcast_src_rank() -> int:
    """Returns the first of the ranks that have the same parameters, by its number in the job.

    Raises:
        ModelError: ranks have not joined.
    """
    return _peers("shard")[0]


def _get_sequence_data_parallel_group() -> Any:
    """Returns the group of the ranks that have the same parameters, and other samples or other parts of sequences.

    Raises:
        ModelError: ranks have not joined, or the engine that had the group has ended.
    """
    return _group("shard", "_get_sequence_data_parallel_group")


def _get_sequence_data_parallel_world_size() -> int:
    """Returns the number of ranks that have the same parameters."""
    return len(_peers("shard"))


def _get_sequence_data_parallel_rank() -> int:
    """Returns this rank's place among those that have the same parameters."""
    return _peers("shard").index(dist.get_rank())


def _get_sequence_parallel_world_size() -> int:
    """Returns the number of ranks that share a sequence; 1 before ranks join."""
    return _size("context")


def _get_sequence_parallel_rank() -> int:
    """Returns this rank's place among those that share a sequence; 0 before ranks join."""
    return _place("context")


def _get_sequence_parallel_group() -> Any:
    """Returns the group of the ranks that share a sequence.

    Raises:
        NoGroupError: each rank has sequences of its own.
        ModelError: the engine that had the group has ended.
    """
    return _group_of_several("context", "_get_sequence_parallel_group", "sequence-parallel")


def _get_expert_model_parallel_world_size() -> int:
    """Returns 1: no expert is cut."""
    return expert_tensor_parallel_world_size


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Returns the groups of experts by their names: none."""
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Returns the groups that have the same experts, by their names: none."""
    return {}


def _get_max_expert_size() -> None:
    """Returns None: there are no groups of experts."""


def _get_zero_param_intra_parallel_group() -> None:
    """Returns None: no second partition of parameters is kept."""


def _zero_param_parallel_is_initialized() -> bool:
    """Returns False: no second partition of parameters is kept."""
    return False


def _get_expert_parallel_group(group_name: str) -> NoReturn:
    """Has nothing to return.

    Raises:
        NoGroupError: always.
    """
    _refuse(f"expert group {group_name!r}", "expert-parallel")


_get_expert_parallel_group_ranks = _get_expert_parallel_world_size = _get_expert_parallel_group
_get_expert_parallel_rank = _get_expert_parallel_src_rank = _get_expert_parallel_group
_get_expert_data_parallel_group = _get_expert_data_parallel_group_ranks = _get_expert_parallel_group
_get_expert_data_parallel_world_size = _get_expert_data_parallel_rank = _get_expert_parallel_group
_get_expert_broadcast_src_rank = _get_expert_parallel_group


def _spec() -> MeshSpec:
    """Returns how the ranks of the last engine are divided."""
    _check_joined()
    world_size, noted = dist.get_world_size(), noted_axes()
    if prod(noted.values()) != world_size:  # of no engine, or of one that other ranks had
        noted = {}
    return divide(world_size, {row.name: noted.get(row.name, 1) for row in AXES if row.size is not None})


def _peers(role: Role) -> tuple[int, ...]:
    spec = _spec()
    return spec.peers(dist.get_rank(), spec.role_axes(role))


def _size(role: Role) -> int:
    return len(_peers(role)) if dist.is_initialized() else 1


def _place(role: Role) -> int:
    return _peers(role).index(dist.get_rank()) if dist.is_initialized() else 0


def _group(role: Role, name: str) -> dist.ProcessGroup:
    found = group_of(_peers(role))
    if found is None:
        raise ModelError(
            f"deepspeed.utils.groups: {name}: the engine that had the group has ended",
            hint="ask while there is an engine, and use the group until it ends",
        )
    return found


def _group_of_several(role: Role, name: str, title: str) -> dist.ProcessGroup:
    return _group(role, name) if _size(role) > 1 else _refuse(name, title)


def _check_joined() -> None:
    if not dist.is_initialized():
        raise ModelError(
            "deepspeed.utils.groups: ranks have not joined",
            hint="call init_distributed or initialize before",
        )


def _refuse(name: str, title: str) -> NoReturn:
    raise NoGroupError(
        f"deepspeed.utils.groups: {name}: there is no {title} group",
        hint="no axis but those of the config has several ranks; torch.distributed.group.WORLD has all",
    )
