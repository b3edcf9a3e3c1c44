"""What a script says of tensor parallelism before `initialize`: kept on its model, and read there. Cuts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsrun.config.load import ScriptTensorParallel
from dsrun.config.text.source import ConfigSource
from dsrun.errors import InputError
from dsrun.mesh_spec import MeshSpec

_MARK = "_dsrun_tensor_parallel"
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class TensorRequest:
    """Arguments of `tp_model_init`.

    Attributes:
        terms: those that the config is to agree with.
        group: ranks that share a layer, as torch's process group; None: whichever the config leads to.
    """

    terms: ScriptTensorParallel
    group: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves the group behind: copies of the model, in memory or in a file, cannot take it along."""
        return TensorRequest, (self.terms,)


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype,
    config: ConfigSource | None = None,
    tp_group: Any = None,
) -> nn.Module:
    """Says that `initialize` is to cut the model's layers over ranks; nothing else is done here.

    The same as `tensor_parallel.autotp_size` in the config, which may be left out then.

    Args:
        model: the model, or a part of what `initialize` is given.
        tp_size: ranks that share a layer.
        dtype: format of the model, as the config's `bf16` and `fp16` say it.
        config: DeepSpeed's argument, without use, as there: `initialize` has the config.
        tp_group: torch's process group of the ranks that share a layer: `tp_size` neighbours.

    Returns:
        the model, as it is.

    Raises:
        InputError: an argument is none of these, or another one than in a call before.
    """
    del config
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"tp_model_init: model is a {type(model).__name__}", hint="pass a torch.nn.Module")
    if not isinstance(tp_size, int) or tp_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"tp_model_init: tp_size is {tp_size!r}; expected a whole number of 1 or more")
    if dtype not in _NAMES:
        raise InputError(f"tp_model_init: dtype is {dtype}; expected torch.float32, torch.float16 or torch.bfloat16")
    asked = TensorRequest(ScriptTensorParallel(tp_size, _NAMES[dtype]), tp_group)
    _check_same(request_of(model), asked)
    setattr(model, _MARK, asked)
    return model


def request_of(model: nn.Module) -> TensorRequest | None:
    """Returns what `tp_model_init` was given with a model, or with a part of it; None where it was not called.

    Raises:
        InputError: it was called with several parts, and not alike.
    """
    found: TensorRequest | None = None
    for module in model.modules():
        one = module.__dict__.get(_MARK)
        if isinstance(one, TensorRequest):
            _check_same(found, one)
            found = one
    return found


def check_group(asked: TensorRequest | None, spec: MeshSpec, *, rank: int, has_mpu: bool) -> None:
    """Refuses a group of the script's that has other ranks than those which share a layer.

    Args:
        asked: arguments of `tp_model_init`; None where it was not called.
        spec: the grid of ranks that the config leads to.
        rank: this rank.
        has_mpu: whether the script has given `initialize` an object of groups, too.

    Raises:
        InputError: the group has other ranks, or is given twice.
    """
    if asked is None or asked.group is None:
        return
    if has_mpu:
        raise InputError(
            "dsrun.initialize: mpu is given, and tp_model_init had a tp_group", hint="say it in one of the two places"
        )
    given, peers = tuple(dist.get_process_group_ranks(asked.group)), spec.peers(rank, spec.role_axes("tensor"))
    if given != peers:
        raise InputError(
            f"tp_model_init: tp_group has the ranks {_listed(given)}; rank {rank} shares its layers with the ranks "
            f"{_listed(peers)}",
            hint="leave tp_group out: ranks that share a layer are neighbours",
        )


def _check_same(before: TensorRequest | None, now: TensorRequest) -> None:
    if before is not None and before.terms != now.terms:
        raise InputError(
            f"tp_model_init: called with {_words(before.terms)} before, and now with {_words(now.terms)}",
            hint="call it once for a model",
        )
    if before is not None and before.group is not now.group:
        raise InputError("tp_model_init: called with another tp_group before", hint="call it once for a model")


def _words(terms: ScriptTensorParallel) -> str:
    return f"tp_size {terms.size} and dtype {terms.dtype}"


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
