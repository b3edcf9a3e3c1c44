"""What a script gives to be saved beside the model: JSON values, tuples, tensors and numpy's arrays. Nothing else.

A tensor or array becomes an entry of the checkpoint, and leaves its name in the JSON value. What JSON has no word for
is an object with one key of `_RESERVED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import uncut
from dsrun.errors import CheckpointError

from ...protocols import SOLE_HOLDER, StateEntry

ROLE = "client"
_TENSOR = "__tensor__"
_ARRAY = "__array__"
_SCALAR = "__scalar__"
_TUPLE = "__tuple__"
_ITEMS = "__items__"
_NAMED = frozenset({_TENSOR, _ARRAY, _SCALAR})
_RESERVED = _NAMED | {_TUPLE, _ITEMS}
_HINT = (
    "it takes numbers, text, lists, tuples and dicts of them, tensors, and numpy's arrays of numbers; never a pickle"
)


def take_apart(state: Mapping[str, Any], *, stores: bool) -> tuple[dict[str, Any], list[StateEntry]]:
    """Returns the JSON value of a client state, and the entries of its tensors.

    Args:
        state: client state that the script passed.
        stores: whether the tensors of this rank are the ones that are stored; true on rank 0.

    Raises:
        CheckpointError: naming the key of a value that cannot be saved.
    """
    entries: list[StateEntry] = []

    def walk(value: Any, place: str) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, Tensor):
            return {_TENSOR: store(value.detach(), place)}
        if isinstance(value, np.ndarray | np.generic):
            return {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: store(_as_tensor(value, place), place)}
        if isinstance(value, list | tuple):
            items = [walk(item, f"{place}[{number}]") for number, item in enumerate(value)]
            if isinstance(value, list):
                return items
            if type(value) is tuple:  # one with named fields would come back without them
                return {_TUPLE: items}
        if isinstance(value, dict):
            return walk_dict(value, place)
        raise CheckpointError(f"client_state{place} is a {type(value).__name__}, which cannot be saved", hint=_HINT)

    def store(tensor: Tensor, place: str) -> str:
        name = f"client_state{place}"
        if stores:
            flat = tensor.contiguous().view(-1)
            entries.append(StateEntry(name, ROLE, uncut(tensor.shape), 0, flat.numel(), flat, SOLE_HOLDER))
        return name

    def walk_dict(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, str | int | float | None) or key in _RESERVED:
                raise CheckpointError(f"client_state{place} has the key {key!r}, which cannot be saved", hint=_HINT)
        members = {key: walk(item, f"{place}[{key!r}]") for key, item in value.items()}
        if all(isinstance(key, str) for key in members):
            return members
        return {_ITEMS: [[key, item] for key, item in members.items()]}

    return walk_dict(state, ""), entries


def _as_tensor(value: np.ndarray[Any, Any] | np.generic, place: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"client_state{place} is an array of {value.dtype}, which cannot be saved", hint=_HINT
        ) from error


def tensors_in(state: Any) -> list[str]:
    """Returns the names of the tensors that a saved client state refers to."""
    if isinstance(state, list):
        return [name for item in state for name in tensors_in(item)]
    if not isinstance(state, dict):
        return []
    if len(state) == 1 and not _NAMED.isdisjoint(state):
        return [str(name) for name in state.values()]
    return [name for item in state.values() for name in tensors_in(item)]


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `take_apart` was given.

    Args:
        state: JSON value that a checkpoint has.
        tensors: tensors of the checkpoint by name.
    """
    if isinstance(state, list):
        return [put_together(item, tensors) for item in state]
    if not isinstance(state, dict):
        return state
    match state:
        case {"__tensor__": name} if len(state) == 1:
            return tensors[name]
        case {"__array__": name} if len(state) == 1:
            return tensors[name].numpy()
        case {"__scalar__": name} if len(state) == 1:
            return tensors[name].numpy()[()]
        case {"__tuple__": items} if len(state) == 1:
            return tuple(put_together(items, tensors))
        case {"__items__": items} if len(state) == 1:
            return {key: put_together(item, tensors) for key, item in items}
        case _:
            return {key: put_together(item, tensors) for key, item in state.items()}
