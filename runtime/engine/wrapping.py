"""What an engine takes over, it takes alone: other wrappers, a second engine and late changes are refused by name.

Nothing is wrapped here. Whether a model stays as it was taken over is looked at in `taken.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.nn.parameter import is_lazy

from dsrun.errors import ModelError, Problem

_TAKEN = "_dsrun_has_engine"
#: Classes that shard or reduce themselves, by the name of a base: most are never imported here.
_WRAPPERS = {
    "DataParallel": "torch.nn.DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "DeepSpeedEngine": "DeepSpeed's engine",
    "PipelineEngine": "DeepSpeed's engine",
}


def check_unwrapped(model: object) -> None:
    """Refuses what is a wrapper already, belongs to another engine, or has parameters that fit into no flat buffer.

    Raises:
        ModelError: naming the module and what has it, or every such parameter.
    """
    if not isinstance(model, nn.Module):
        kind = "an engine" if hasattr(model, "_parts") else f"a {type(model).__name__}"
        raise ModelError(
            f"dsrun.initialize: model is {kind}; expected a torch.nn.Module",
            hint="pass the plain model" + (", engine.module after engine.destroy()" if kind == "an engine" else ""),
        )
    _check_parameters(model)
    for name, module in model.named_modules():
        where = f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        wrapper = next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ModelError(
                f"dsrun.initialize: {where} is wrapped by {wrapper} already, which reduces or shards by itself",
                hint="pass the plain model; the engine takes the wrapper's place",
            )
        if module.__dict__.get(_TAKEN):
            raise ModelError(
                f"dsrun.initialize: {where} has an engine already",
                hint="use that engine, or call its destroy() first",
            )


def _check_parameters(model: nn.Module) -> None:
    problems: list[Problem] = []
    for name, param in model.named_parameters():
        if is_lazy(param):
            hint = "run one forward of the model before dsrun.initialize, or give the layer its sizes"
            problems.append(Problem(f"model: `{name}` is lazy: it has no shape yet", hint))
        elif param.requires_grad and (param.is_complex() or param.layout is not torch.strided):
            kind = str(param.dtype if param.is_complex() else param.layout).removeprefix("torch.")
            hint = "use real, dense parameters (torch.view_as_complex makes complex values of them in the forward)"
            problems.append(Problem(f"model: `{name}` is {kind}; what is trained has to be real and dense", hint))
    if problems:
        raise ModelError.of(problems)


def take_over(model: nn.Module, optimizer: optim.Optimizer | None, *, loss_scale: float = 1.0) -> None:
    """Marks the model as taken, and lets its optimizer refuse groups of parameters that no engine knows.

    The optimizer gets the attributes that accelerate, DeepSpeed's and Megatron's scripts read: `overflow`, and the loss
    scale, which is 1 where no fp16 is trained.
    """
    for module in model.modules():
        module.__dict__[_TAKEN] = _Taken()
    if optimizer is not None:
        optimizer.add_param_group = _refuse_group
        told: Any = optimizer
        told.cur_scale = told.loss_scale = loss_scale
        told.overflow = False


class _Taken:
    """Marks a module that an engine has; a copy of the module, pickled or not, has False instead."""

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def note_outcome(optimizer: optim.Optimizer | None, *, overflow: bool, loss_scale: float) -> None:
    """Lets the optimizer tell whether its last update was left out, and the next loss scale; see `take_over`."""
    told: Any = optimizer
    if told is not None:
        told.overflow = overflow
        told.cur_scale = told.loss_scale = loss_scale


def let_go(model: nn.Module) -> None:
    """Undoes the marks of `take_over`."""
    for module in model.modules():
        module.__dict__.pop(_TAKEN, None)


def _refuse_group(param_group: dict[str, object]) -> None:
    raise ModelError(
        f"optimizer.add_param_group: a group of {sorted(param_group)} comes after dsrun.initialize, which has cut the "
        "parameters into shards",
        hint="give all groups to dsrun.initialize; the learning rate of a group may be 0 until it is its turn",
    )
