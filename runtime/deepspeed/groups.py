"""Which ranks share what, by the names of DeepSpeed's `utils.groups`: ranks of one stage are data-parallel ones.

Groups are torch's. An axis that dsrun does not have is of one rank: its size is 1 and a rank's place 0, as in DeepSpeed
where it is not set up; who asks for the group itself is told so. Nothing is set up here.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from dsrun.contract.environment import noted_stages
from dsrun.errors import ModelError

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
    """Returns the group of all ranks.

    Raises:
        ModelError: ranks have not joined, or the last engine has several pipeline stages.
    """
    _check_joined()
    if noted_stages() > 1:
        raise ModelError(
            "deepspeed.utils.groups: a pipeline stage has some of all ranks, and no group of them is kept",
            hint="engine.grid.get_data_parallel_group() makes one; the getters of ranks and sizes know the stages",
        )
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """Returns the number of ranks with samples of their own: those of one pipeline stage.

    Raises:
        ModelError: ranks have not joined.
    """
    _check_joined()
    return dist.get_world_size() // noted_stages()


def get_data_parallel_rank() -> int:
    """Returns this rank among those with samples of their own: those of its pipeline stage.

    Raises:
        ModelError: ranks have not joined.
    """
    return _rank() % get_data_parallel_world_size()


def _rank() -> int:
    _check_joined()
    return dist.get_rank()


def get_tensor_model_parallel_world_size() -> int:
    """Returns 1: no layer is cut."""
    return 1


def get_tensor_model_parallel_rank() -> int:
    """Returns 0: no layer is cut."""
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """Returns this rank: it has each layer whole.

    Raises:
        ModelError: ranks have not joined.
    """
    return _rank()


def get_tensor_model_parallel_group() -> NoReturn:
    """Has nothing to return.

    Raises:
        NoGroupError: always.
    """
    _refuse("get_tensor_model_parallel_group", "tensor-parallel")


def get_model_parallel_group() -> NoReturn:
    """Has nothing to return.

    Raises:
        NoGroupError: always.
    """
    _refuse("get_model_parallel_group", "model-parallel")


get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group


def _clone_world_group() -> Any:
    """Returns the group of all ranks."""
    _check_joined()
    return dist.group.WORLD


_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank


def _get_data_parallel_group_ranks() -> range:
    """Returns all ranks."""
    first, size = _rank() - get_data_parallel_rank(), get_data_parallel_world_size()
    return range(first, first + size)


def _get_broadcast_src_rank() -> int:
    """Returns 0, the first of the ranks that have the same parameters.

    Raises:
        ModelError: ranks have not joined.
    """
    _check_joined()
    return 0


def _get_sequence_parallel_world_size() -> int:
    """Returns 1: no sequence is cut."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """Returns 0: no sequence is cut."""
    return 0


def _get_sequence_parallel_group() -> NoReturn:
    """Has nothing to return.

    Raises:
        NoGroupError: always.
    """
    _refuse("_get_sequence_parallel_group", "sequence-parallel")


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


def _check_joined() -> None:
    if not dist.is_initialized():
        raise ModelError(
            "deepspeed.utils.groups: ranks have not joined",
            hint="call init_distributed or initialize before",
        )


def _refuse(name: str, axis: str) -> NoReturn:
    raise NoGroupError(
        f"deepspeed.utils.groups: {name}: there is no {axis} group",
        hint="every rank is a data-parallel one; torch.distributed.group.WORLD has all",
    )
