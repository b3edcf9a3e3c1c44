"""What `deepspeed.comm` has beyond `torch.distributed`. For scripts: the engine's own collectives are elsewhere.

[Note: words of the log] DeepSpeed's collectives take `prof`, `log_name` and `debug`, which say how a log of collectives
is to name a call. That log is off unless it is asked for, and dsrun has none: so these are taken and change nothing, as
they do there with the log off. Some of DeepSpeed's names for tensors are not torch's; both are taken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d

from dsrun.contract.environment import RankInfo, is_first_rank

from ...accelerator import get_accelerator
from ...compat import all_gather_single, reduce_scatter_single
from ...mesh.comms_log import newest_log
from ..compose.distributed import init_distributed

#: DeepSpeed's arguments of a collective that torch has not.
_LOG_WORDS = ("prof", "log_name", "debug")


def _in_deepspeeds_words(function: Callable[..., Any], **renamed: str) -> Callable[..., Any]:
    """Returns one of torch's functions that takes DeepSpeed's arguments too; see [Note: words of the log].

    Args:
        function: function of torch.distributed.
        **renamed: torch's name of a parameter, by DeepSpeed's.
    """

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **options: Any) -> Any:
        del prof, log_name, debug
        return function(*args, **{renamed.get(name, name): value for name, value in options.items()})

    signature = inspect.signature(function)
    back = {torchs: deepspeeds for deepspeeds, torchs in renamed.items()}
    known = [param.replace(name=back.get(name, name)) for name, param in signature.parameters.items()]
    words = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _LOG_WORDS]
    vars(call)["__signature__"] = signature.replace(parameters=[*known, *words])
    return call


def _at_least_1d(tensor: Tensor) -> Tensor:
    """Returns a number as a tensor of one element: Gloo takes no other, nor says so."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _gather_into(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    return all_gather_single(_at_least_1d(output_tensor), _at_least_1d(input_tensor), group=group, async_op=async_op)


def _scatter_into(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return reduce_scatter_single(_at_least_1d(output), _at_least_1d(input), op=op, group=group, async_op=async_op)


def _reduce_each(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    return _all_done([dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor in tensors], async_op)


def _take_part(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@dataclass(frozen=True)
class _Works:
    """Several collectives that were begun, as one."""

    parts: Sequence[Any]

    def wait(self) -> None:
        """Waits for all of them."""
        for part in self.parts:
            part.wait()

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(part.is_completed() for part in self.parts)


def _all_done(parts: Sequence[Any], async_op: bool) -> _Works | None:
    works = _Works(parts)
    if async_op:
        return works
    works.wait()
    return None


all_gather = _in_deepspeeds_words(dist.all_gather)
all_gather_into_tensor = _in_deepspeeds_words(_gather_into, tensor="input_tensor")
all_gather_object = _in_deepspeeds_words(dist.all_gather_object)
all_reduce = _in_deepspeeds_words(dist.all_reduce)
all_reduce_coalesced = _in_deepspeeds_words(_reduce_each)
all_to_all = _in_deepspeeds_words(dist.all_to_all)
all_to_all_single = _in_deepspeeds_words(dist.all_to_all_single, tensor="input")
allgather_fn = _in_deepspeeds_words(_gather_into)
barrier = _in_deepspeeds_words(dist.barrier)
batch_isend_irecv = _in_deepspeeds_words(dist.batch_isend_irecv)
broadcast = _in_deepspeeds_words(dist.broadcast)
broadcast_object_list = _in_deepspeeds_words(dist.broadcast_object_list)
gather = _in_deepspeeds_words(dist.gather)
inference_all_reduce = _in_deepspeeds_words(_take_part)
irecv = _in_deepspeeds_words(dist.irecv)
isend = _in_deepspeeds_words(dist.isend)
monitored_barrier = _in_deepspeeds_words(dist.monitored_barrier)
recv = _in_deepspeeds_words(dist.recv)
reduce = _in_deepspeeds_words(dist.reduce)
reduce_scatter = _in_deepspeeds_words(dist.reduce_scatter)
reduce_scatter_tensor = _in_deepspeeds_words(_scatter_into, output_tensor="output", tensor="input")
reduce_scatter_fn = reduce_scatter_tensor
scatter = _in_deepspeeds_words(dist.scatter)
send = _in_deepspeeds_words(dist.send)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """Gathers several tensors, each into one; every rank of the group must call.

    Args:
        output_tensors: for each of the others a tensor with as many elements as all ranks have.
        input_tensors: this rank's tensors.
        group: process group; None: all ranks.
        async_op: return what can be waited for.
    """
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _all_done([_gather_into(output, mine, group, async_op=True) for output, mine in pairs], async_op)


class P2POp(dist.P2POp):
    """One message of `batch_isend_irecv`: torch's, for which `isend` and `irecv` may be DeepSpeed's or torch's.

    Args:
        op: `isend` or `irecv`.
        tensor: tensor that is sent or written to.
        peer: the other rank.
        group: process group; None: all ranks.
        tag: number by which messages are told apart.
        group_peer: the other rank by its place in the group.
    """

    def __new__(
        cls,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> P2POp:
        """Makes torch's object, with torch's function."""
        made: Any = super().__new__(cls, _torchs(op), tensor, peer, group, tag, group_peer)
        return made

    def __init__(
        self,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        super().__init__(_torchs(op), tensor, peer, group, tag, group_peer)


def _torchs(op: Any) -> Any:
    return {isend: dist.isend, irecv: dist.irecv}.get(op, op)


class TorchBackend:
    """torch.distributed as an object, which joins the job's process group where that has not happened.

    Args:
        backend: `nccl` or `gloo`.
        timeout: longest wait for the other ranks; None: the default.
        init_method: None or `env://`.
        rank: -1, or what the environment says.
        world_size: -1, or what the environment says.
        name: DeepSpeed's name for it.
    """

    def __init__(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("_") else globals().get(name)
        return getattr(dist, name) if found is None else found


def get_world_group() -> Any:
    """Returns the process group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns the ranks of a process group, by their place in it.

    Args:
        group: process group; None: all ranks.
    """
    return dist.get_process_group_ranks(group)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns the rank in the job of a rank of a process group.

    Args:
        group: process group; None: all ranks.
        group_rank: place in the group.
    """
    return dist.get_process_group_ranks(group)[group_rank]


def get_local_rank_from_launcher() -> int:
    """Returns this process's rank among those of its host; may be asked before ranks join."""
    return RankInfo.from_env().local_rank


def get_world_rank_from_launcher() -> int:
    """Returns this process's rank; may be asked before ranks join."""
    return RankInfo.from_env().rank


def get_world_size_from_launcher() -> int:
    """Returns the number of ranks; may be asked before ranks join."""
    return RankInfo.from_env().world_size


def has_all_gather_into_tensor() -> bool:
    """Whether `all_gather_into_tensor` is there."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Whether `reduce_scatter_tensor` is there."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Whether `all_reduce_coalesced` is there."""
    return True


def has_coalescing_manager() -> bool:
    """Whether torch can put several collectives together."""
    return hasattr(distributed_c10d, "_coalescing_manager")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, dict[int, dict[str, Any]]] | None:
    """Prints the table of the engine's collectives on rank 0, where the config has `comms_logger`; enters none.

    Args:
        show_straggler: DeepSpeed's argument, without effect: `dsrun show JOB --waits` compares the ranks.
        return_dict: whether the figures are returned: by kind and bytes, those of all axes together.

    Returns:
        for each size `calls`, `bytes`, `seconds`, `algbw` and `busbw` in bytes a second; None without `return_dict`.
    """
    del show_straggler
    log = newest_log()
    if is_first_rank():
        lines = ["dsrun: log_summary: nothing was counted: set `comms_logger.enabled`"] if log is None else log.lines()
        print("\n".join(lines), flush=True)
    if not return_dict:
        return None
    return {} if log is None else log.summary()


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> device_mesh.DeviceMesh:
    """Returns torch's mesh of all ranks, with groups along each dimension; every rank must call.

    It is the script's: an engine does not look at it.

    Args:
        mesh_shape: ranks along each dimension.
        mesh_dim_names: name of each dimension.
    """
    return device_mesh.init_device_mesh(get_accelerator().device_name(), mesh_shape, mesh_dim_names=mesh_dim_names)
