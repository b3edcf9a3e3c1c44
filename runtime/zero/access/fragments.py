"""`safe_get_*` and `safe_set_*`: a parameter's fp32 master, gradient and optimizer states, whole or this rank's piece.

[Note: who gets what]
- `full`: every rank gets the whole tensor, and sets it with the same value on every rank. Getting is collective where
  the optimizer is sharded: one broadcast of each rank's piece, `4 * numel` bytes in all.
- `local`: the part that this rank's optimizer updates, flat, a copy; it may have no elements. At stage 0 that is
  everything. Setting publishes it, so that is collective at stages 1 to 3.
- None: the tensor is no trainable parameter of an engine, there is no such state (yet), or no backward has left a
  gradient since the last step. What is not there cannot be set. All ranks get None, or none does.
With pipeline stages `every rank` are those that have the parameter. Of a parameter that is cut over ranks, these are
the ranks that have the same part, and what is whole is this part, in the shape that the parameter has, as in DeepSpeed:
each rank sets its own part. `engine.module_state_dict` gives whole parameters.
Gradients are the mean over the ranks, summed over the micro steps of the global batch so far, before clipping.
Where some stay on their rank, inside `engine.no_sync` at stages 0 and 1, getting is collective: an all-reduce of
the tensor.

[Note: gradients of the last step]
Accelerate steps inside of its backward, so what a script of DeepSpeed's asks for afterwards (PEFT's AdaLoRA) is the
gradient that the step has used. DeepSpeed's stage 3 still has it. Where dsrun stands for DeepSpeed, it is there as well
until the next backward: clipped, as in plain torch. With an optimizer on the host it is gone, for new parameters take
its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor

from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import ModelError

from ..partition_parameters import home_of
from ..units.unit import ParamUnit
from .pieces import UnitHome
from .script_writes import refuse_tied
from .whole import ParamAccess


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Returns the whole fp32 master, a copy; see [Note: who gets what]."""
    home = _trained(param)
    return None if home is None else _full(home, _unit(home).whole_master())


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Returns the whole gradient in fp32, a copy; see [Note: who gets what] and [Note: gradients of the last step]."""
    home = _trained(param)
    if home is None and param.grad is not None:
        return param.grad.to(torch.float32, copy=True)  # of a parameter in no optimizer group
    if home is None:
        return None
    found = _full_grad(home)
    return _used_grad(home) if found is None and stands_for_deepspeed() else found


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Returns an elementwise state of the optimizer (`exp_avg`) whole, a copy; see [Note: who gets what].

    One more all-reduce of one number, for a rank without a piece cannot know whether there is such a state.
    """
    home = _trained(param)
    if home is None:
        return None
    mine = _state(home, optim_state_key)
    there, replicas = torch.tensor([int(mine is not None)], device=_unit(home).device), _unit(home).replicas
    if home.access.pieces.plan.shard_optimizer:
        replicas.all_reduce(there, op="max", label="optimizer states").wait()
    with replicas.reading("optimizer states"):
        found = bool(there.item())
    if not found:
        return None
    return _whole(home, mine)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Returns this rank's piece of the fp32 master; see [Note: who gets what]."""
    home = _trained(param)
    return None if home is None else _local(home, _unit(home).whole_master())


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Returns this rank's piece of the gradient; see [Note: who gets what]."""
    home = _trained(param)
    if home is None or not home.access.reducer.has_unreduced:
        return None if home is None or not home.access.reducer.has_sums else _local(home, _sum(home))
    whole, piece = _full_grad(home), _piece(home, _unit(home).master)
    assert whole is not None, "there are gradients that no reduction has taken"
    flat = whole.reshape(-1)
    return flat.new_empty(0) if piece is None else flat.narrow(0, piece[0], piece[1].numel()).clone()


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Returns this rank's piece of an optimizer state; see [Note: who gets what]."""
    home = _trained(param)
    if home is None:
        return None
    found = _state(home, optim_state_key)
    if found is not None:
        return found.to(param.device, copy=True)
    dtype = _dtype_elsewhere(home, optim_state_key)
    return None if dtype is None else torch.empty(0, dtype=dtype, device=param.device)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets the master, and what forward reads; see [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, another shape, or the parameter is open.
    """
    home = _settable(param, value, "safe_set_full_fp32_param")
    home.access.pieces.write(home, value, exact=True)
    home.access.pieces.publish([_unit(home)])


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Sets the gradient that the next step uses; see [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, another shape, or there is no gradient yet.
    """
    home = _settable(param, value, "safe_set_full_grad")
    _check_sums(home, "safe_set_full_grad")
    _note_grad(home)
    piece = _piece(home, home.access.reducer.sums.edit(_unit(home).index))
    if piece is not None:
        piece[1].copy_(value.detach().reshape(-1).narrow(0, piece[0], piece[1].numel()))


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets an elementwise state of the optimizer; see [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, another shape, or there is no such state (yet).
    """
    who = "safe_set_full_optimizer_state"
    home = _settable(param, value, who)
    piece = _piece(home, _unit(home).master)
    if piece is not None:
        target = _state(home, optim_state_key)
        if target is None:
            _no_state(home, optim_state_key, who)
        mine = value.detach().reshape(-1).narrow(0, piece[0], piece[1].numel())
        _set_state(home, optim_state_key, target, mine)
    elif _dtype_elsewhere(home, optim_state_key) is None:
        _no_state(home, optim_state_key, who)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Sets this rank's piece of the master, and publishes it; every rank must call. See [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, or the piece has another size.
    """
    who = "safe_set_local_fp32_param"
    home = _home(param, who)
    home.access.check_closed(home, who)
    if _local_target(home, _unit(home).master, value, who) is not None:
        home.access.pieces.set_piece(home, lambda start, stop: value.detach().reshape(-1))
    home.access.pieces.spread([_unit(home)])


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Sets this rank's piece of the gradient; see [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, the piece has another size, or there is no gradient yet.
    """
    home = _home(param, "safe_set_local_grad")
    _check_sums(home, "safe_set_local_grad")
    _note_grad(home)
    sums = home.access.reducer.sums.edit(_unit(home).index)
    target = _local_target(home, sums, value, "safe_set_local_grad")
    if target is not None:
        target.copy_(value.detach().reshape(-1))


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Sets this rank's piece of an optimizer state; see [Note: who gets what].

    Raises:
        ModelError: no trainable parameter of an engine, the piece has another size, or there is no such state (yet).
    """
    who = "safe_set_local_optimizer_state"
    home = _home(param, who)
    if _local_target(home, _unit(home).master, value, who) is None:
        if _dtype_elsewhere(home, optim_state_key) is None:
            _no_state(home, optim_state_key, who)
        return
    target = _state(home, optim_state_key)
    if target is None:
        _no_state(home, optim_state_key, who)
    _set_state(home, optim_state_key, target, value.detach().reshape(-1))


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Sets each gradient to what `update_func` makes of it; see [Note: who gets what].

    Args:
        param_list: parameters, of which those that are not trained are left out.
        update_func: function that gets a whole gradient and its parameter, and returns the new gradient.

    Raises:
        ModelError: no trainable parameter of an engine, another shape, or there is no gradient yet.
    """
    for param in param_list:
        if param.requires_grad:
            _check_sums(_home(param, "safe_update_full_grad_vectorized"), "safe_update_full_grad_vectorized")
            present = safe_get_full_grad(param)
            assert present is not None, "there are sums"
            safe_set_full_grad(param, update_func(present, param))


def _trained(param: Tensor) -> UnitHome | None:
    home = home_of(param)
    if not (isinstance(home, UnitHome) and home.unit is not None and home.unit.trains):
        return None
    home.settle()
    home.access.check_states("safe_get")
    return home


def _home(param: Tensor, who: str) -> UnitHome:
    home = _trained(param)
    if home is None:
        raise ModelError(
            f"{who}: a tensor of shape {tuple(param.shape)} is no trainable parameter of an engine",
            hint="pass a parameter of engine.module that has requires_grad",
        )
    return home


def _unit(home: UnitHome) -> ParamUnit:
    assert home.unit is not None, "a trainable parameter is in a unit"
    return home.unit


def _full_grad(home: UnitHome) -> Tensor | None:
    """Returns the whole gradient, with what stays on each rank inside `engine.no_sync`; None where there is none."""
    reducer, extent = home.access.reducer, home.extent
    whole = _full(home, _sum(home)) if reducer.has_sums else None
    if not reducer.has_unreduced:
        return whole
    assert extent is not None, "a trainable parameter has a place"
    unreduced = reducer.reduced_copy_of_unreduced(_unit(home), extent.offset, extent.numel).view(extent.shape)
    return unreduced if whole is None else whole.add_(unreduced)


def _used_grad(home: UnitHome) -> Tensor | None:
    """Returns the whole gradient that the last step used; None where it is gone."""
    factor = home.access.reducer.used_factor
    if factor is None:
        return None
    whole = _full(home, _sum(home))
    return whole if factor == 1 else whole.mul_(factor)


def _sum(home: UnitHome) -> Tensor:
    return home.access.reducer.sums.read(_unit(home).index)


def _settable(param: Tensor, value: Tensor, who: str) -> UnitHome:
    home = _home(param, who)
    if value.shape != param.shape:
        cut_over = _unit(home).placement.cut_over
        part = (
            f"this rank's part: the parameter is cut over {' and '.join(cut_over)}" if cut_over else "the whole value"
        )
        raise ModelError(
            f"{who}: the value has shape {tuple(value.shape)}; `{home.name}` has {tuple(param.shape)}",
            hint=f"pass {part}; `safe_set_local_*` take this rank's piece",
        )
    home.access.check_closed(home, who)
    refuse_tied(home, who)
    return home


def _check_sums(home: UnitHome, who: str) -> None:
    if not home.access.reducer.has_sums:
        raise ModelError(
            f"{who}: `{home.name}` has no gradient: there was no engine.backward since the last step",
            hint="call it between engine.backward and engine.step",
        )


def _no_state(home: UnitHome, key: str, who: str) -> NoReturn:
    raise ModelError(
        f"{who}: the optimizer has no elementwise state `{key}` of `{home.name}`",
        hint="optimizers make their states in the first step; `safe_get_full_optimizer_state` returns None before",
    )


def _piece(home: UnitHome, owned: Tensor) -> tuple[int, Tensor] | None:
    """Returns the parameter's part of a tensor over the owned range."""
    return home.access.pieces.own_piece(home, owned, start=_unit(home).owned[0])


def _local(home: UnitHome, owned: Tensor) -> Tensor:
    piece = _piece(home, owned)
    device = home.param.device
    return owned.new_empty(0, device=device) if piece is None else piece[1].to(device, copy=True)


def _local_target(home: UnitHome, owned: Tensor, value: Tensor, who: str) -> Tensor | None:
    """Returns what `value` shall be written to; None where the rank has no piece."""
    refuse_tied(home, who)
    piece = _piece(home, owned)
    numel = 0 if piece is None else piece[1].numel()
    if value.numel() != numel:
        raise ModelError(
            f"{who}: the value has {value.numel()} elements; this rank's piece of `{home.name}` has {numel}",
            hint="pass a tensor of the size that `safe_get_local_*` returns",
        )
    return None if piece is None else piece[1]


def _full(home: UnitHome, owned: Tensor) -> Tensor:
    piece = _piece(home, owned)
    return _whole(home, None if piece is None else piece[1])


def _whole(home: UnitHome, mine: Tensor | None) -> Tensor:
    """Puts an fp32 tensor together of all ranks' pieces, or of this rank's where it has everything."""
    access: ParamAccess = home.access
    if not access.pieces.plan.shard_optimizer:
        shape = home.param.shape
        if mine is None:
            return torch.empty(shape, device=home.param.device)
        return mine.to(torch.float32, copy=True).view(shape)
    whole, pending = access.pieces.assemble(home, mine, dtype=torch.float32)
    for work in pending:
        work.wait()
    return whole


def _note_grad(home: UnitHome) -> None:
    """Says that the parameter is used, if nothing but the script has given it a gradient."""
    unused = home.access.reducer.unused
    if unused is not None and home.extent is not None:
        unused.note(_unit(home), home.extent.name)


def _state(home: UnitHome, key: str) -> Tensor | None:
    """Returns this rank's piece of an optimizer state, flat; a copy only where it lies in codes."""
    access = home.access
    if access.optimizer.torch_optimizer is None:
        return None
    assert home.extent is not None, "a trainable parameter has a place"
    entries = access.optimizer.saved.state_entries()
    mine = (e for e in entries if e.name == home.extent.name and e.role == key and e.whole == home.extent.whole)
    found = next((e.tensor for e in mine), None)
    return access.optimizer.saved.decoded_state(home.extent.name, key) if found is None else found


def _dtype_elsewhere(home: UnitHome, key: str) -> torch.dtype | None:
    """Returns the dtype of a state that only other ranks have a piece of; None where there is none, or a piece here."""
    access = home.access
    if access.optimizer.torch_optimizer is None or _piece(home, _unit(home).master) is not None:
        return None
    assert home.extent is not None, "a trainable parameter has a place"
    return access.optimizer.saved.dtype_elsewhere(home.extent.name, key)


def _set_state(home: UnitHome, key: str, target: Tensor, values: Tensor) -> None:
    """Sets this rank's piece of an optimizer state: `target`, or the codes that it was made of."""
    assert home.extent is not None, "a trainable parameter has a place"
    home.access.pieces.before_change(_unit(home))
    if not home.access.optimizer.saved.code_state(home.extent.name, key, values):
        target.copy_(values)
