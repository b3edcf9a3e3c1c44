"""What an engine takes over, it takes alone: other wrappers, a second engine and late changes are refused by name.

Nothing is wrapped here. Whether a model stays as it was taken over is looked at in `guard.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.nn.parameter import is_lazy

from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import ModelError, Problem

from ...activation.activate import Activations
from ...zero.hooks.modules import UnitHooks
from ...zero.partition_parameters import OF_AN_ENGINE, home_of, unsettle

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

    Nothing is changed. An engine whose model may get another one goes on until `end_earlier_engines`.

    Raises:
        ModelError: naming the module and what has it, or every such parameter.
    """
    is_engine = hasattr(type(model), OF_AN_ENGINE)
    if is_engine or not isinstance(model, nn.Module):
        kind, hint = f"a {type(model).__name__}", "pass the plain model"
        if isinstance(model, type):
            kind, hint = f"the class {model.__name__}", f"pass a model of that class, {model.__name__}(...)"
        elif is_engine:
            kind, hint = "an engine", "pass the plain model, engine.module after engine.destroy()"
        raise ModelError(f"dsrun.initialize: model is {kind}; expected a torch.nn.Module", hint=hint)
    _check_parameters(model)
    may_end: dict[_Taken, bool] = {}  # an engine has marked all its modules alike
    for name, module in model.named_modules():
        where = f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        wrapper = next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise ModelError(
                f"dsrun.initialize: {where} is wrapped by {wrapper} already, which reduces or shards by itself",
                hint="pass the plain model; the engine takes the wrapper's place",
            )
        taken = module.__dict__.get(_TAKEN)
        if isinstance(taken, _Taken) and taken not in may_end:
            may_end[taken] = taken.is_left() or _hands_over(taken, model)
        if taken and not may_end[taken]:
            raise ModelError(
                f"dsrun.initialize: {where} has an engine already",
                hint="use that engine, or call its destroy() first",
            )
    if may_end:
        _check_closed(model)


def end_earlier_engines(model: nn.Module) -> None:
    """Ends engines that a model has and that `check_unwrapped` let pass; values stay, states do not.

    Every rank must call, once nothing that the script has given can be refused any more: a script that catches the
    error goes on with the engine that it has.
    """
    for module in model.modules():
        taken = module.__dict__.get(_TAKEN)
        if isinstance(taken, _Taken):
            if not taken.is_left():
                _end(taken)
            taken.release()


def is_taken(optimizer: object) -> bool:
    """Whether an optimizer is, or was, the one of an engine."""
    return getattr(optimizer, _TAKEN, False) is True


def _hands_over(taken: _Taken, model: nn.Module) -> bool:
    """Whether an engine ends where a script of DeepSpeed's makes another one of the same model.

    TRL evaluates a reference before training, and keeps that engine; others initialize anew for each epoch, and still
    refer to the last engine meanwhile. One that trains a part of the model is another matter, and stays.
    """
    engine: Any = taken.engine()
    return stands_for_deepspeed() and (engine.optimizer is None or engine.module is model)


def _end(taken: _Taken) -> None:
    engine: Any = taken.engine()
    if engine.global_rank == 0:
        does = "evaluated" if engine.optimizer is None else "trained"
        print(f"dsrun: the engine that {does} this model has ended, for another one takes it over", flush=True)
    engine.destroy()


def _check_closed(model: nn.Module) -> None:
    """Refuses a model that a `GatheredParameters` has whole: its end would close what the new engine has."""
    homes = ((name, home_of(param)) for name, param in model.named_parameters())
    gathered = next((name for name, home in homes if home is not None and home.is_open), None)
    if gathered is not None:
        raise ModelError(
            f"dsrun.initialize: the model's parameters are gathered, `{gathered}` among them, by their earlier engine",
            hint="leave `GatheredParameters` first",
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


def take_over(
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    *,
    loss_scale: float = 1.0,
    engine: object,
    release: Callable[[], None],
) -> None:
    """Marks the model as taken, and lets its optimizer refuse groups of parameters that no engine knows.

    The optimizer gets the attributes that accelerate, DeepSpeed's and Megatron's scripts read: `overflow`, and the loss
    scale, which is 1 where no fp16 is trained.

    Args:
        model: the model.
        optimizer: its optimizer, if it has one.
        loss_scale: loss scale of the first step.
        engine: engine that takes the model over.
        release: function that removes the engine's hooks and marks from the model, once nothing refers to the engine
            and the model gets another one. It must not refer to the engine.
    """
    taken = _Taken(engine, release)
    for module in model.modules():
        module.__dict__[_TAKEN] = taken
    if optimizer is not None:
        optimizer.add_param_group = _refuse_group
        script_optimizer: Any = optimizer
        setattr(script_optimizer, _TAKEN, True)
        script_optimizer.cur_scale = script_optimizer.loss_scale = loss_scale
        script_optimizer.overflow = False


class _Taken:
    """Marks a module that an engine has; a copy of the module, pickled or not, has False instead.

    Args:
        engine: engine that has the module; only a weak reference to it is kept.
        release: function that removes the engine's hooks and marks from the model; see `take_over`.
    """

    def __init__(self, engine: object, release: Callable[[], None]) -> None:
        self.engine = weakref.ref(engine)
        self.release = release

    def is_left(self) -> bool:
        """Whether nothing refers to the engine any more, cycles left aside."""
        if self.engine() is not None:
            gc.collect()
        return self.engine() is None

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def note_outcome(optimizer: optim.Optimizer | None, *, overflow: bool, loss_scale: float) -> None:
    """Lets the optimizer tell whether its last update was left out, and the next loss scale; see `take_over`."""
    script_optimizer: Any = optimizer
    if script_optimizer is not None:
        script_optimizer.overflow = overflow
        script_optimizer.cur_scale = script_optimizer.loss_scale = loss_scale


def let_go(model: nn.Module, hooks: UnitHooks, activations: Activations | None, *, stays_sharded: bool) -> None:
    """Takes an engine's hooks and marks off its model; parameters that are whole are ordinary ones again.

    Args:
        model: the model.
        hooks: hooks of the model's units.
        activations: activation handling that was switched on for the model's blocks; None where nothing was.
        stays_sharded: parameters stay slices, for the next engine.
    """
    if activations is not None:
        activations.remove()
    hooks.remove()
    for module in model.modules():
        module.__dict__.pop(_TAKEN, None)
    if not stays_sharded:
        for param in model.parameters():
            unsettle(param)
            param.grad = None


def _refuse_group(param_group: dict[str, object]) -> None:
    raise ModelError(
        f"optimizer.add_param_group: a group of {sorted(param_group)} comes after dsrun.initialize, which has cut the "
        "parameters into shards",
        hint="give all groups to dsrun.initialize; the learning rate of a group may be 0 until it is its turn",
    )
