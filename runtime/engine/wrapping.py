"""What an engine takes over, it takes alone: other wrappers, a second engine and late changes are refused by name.

Nothing is wrapped here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, optim

from dsrun.errors import ModelError

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
    """Refuses what is a wrapper already, or belongs to another engine.

    Raises:
        ModelError: naming the module and what has it.
    """
    if not isinstance(model, nn.Module):
        kind = "an engine" if hasattr(model, "_parts") else f"a {type(model).__name__}"
        raise ModelError(
            f"dsrun.initialize: model is {kind}; expected a torch.nn.Module",
            hint="pass the plain model" + (", engine.module after engine.destroy()" if kind == "an engine" else ""),
        )
    for name, module in model.named_modules():
        where = f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        wrapper = next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ModelError(
                f"dsrun.initialize: {where} is wrapped by {wrapper} already, which reduces or shards by itself",
                hint="pass the plain model; the engine takes the wrapper's place",
            )
        if _TAKEN in module.__dict__:
            raise ModelError(
                f"dsrun.initialize: {where} has an engine already",
                hint="use that engine, or call its destroy() first",
            )


def take_over(model: nn.Module, optimizer: optim.Optimizer | None) -> None:
    """Marks the model as taken, and lets its optimizer refuse groups of parameters that no engine knows."""
    for module in model.modules():
        module.__dict__[_TAKEN] = True
    if optimizer is not None:
        optimizer.add_param_group = _refuse_group


def let_go(model: nn.Module) -> None:
    """Undoes the marks of `take_over`."""
    for module in model.modules():
        module.__dict__.pop(_TAKEN, None)


def check_frozen(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that were frozen when the engine was made and want gradients now.

    Args:
        frozen: (qualified name, parameter) of all that were frozen.

    Raises:
        ModelError: naming the first of them; nobody would reduce or update it.
    """
    for name, param in frozen:
        if param.requires_grad:
            raise ModelError(
                f"model: `{name}` was frozen when the engine was made and has been unfrozen since, so it would not be "
                "trained",
                hint="set requires_grad before dsrun.initialize; a checkpoint of one engine loads into the next one",
            )


def _refuse_group(param_group: dict[str, object]) -> None:
    raise ModelError(
        f"optimizer.add_param_group: a group of {sorted(param_group)} comes after dsrun.initialize, which has cut the "
        "parameters into shards",
        hint="give all groups to dsrun.initialize; the learning rate of a group may be 0 until it is its turn",
    )
