"""What a script gives to be saved beside the model: JSON values, with tensors anywhere among them. Nothing else.

A tensor becomes an entry of the checkpoint, and leaves its name in the JSON value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsrun.checkpoint_files.index.region import uncut
from dsrun.errors import CheckpointError

from ...protocols import SOLE_HOLDER, StateEntry

ROLE = "client"
_TENSOR = "__tensor__"
_HINT = "it takes JSON values (numbers, text, lists, and dicts with text keys) and tensors; never a pickle"


def take_apart(state: Mapping[str, Any], *, stores: bool) -> tuple[dict[str, Any], list[StateEntry]]:
    """Returns the JSON value of a client state, and the entries of its tensors.

    Args:
        state: client state that the script passed: JSON values and tensors.
        stores: whether the tensors of this rank are the ones that are stored; true on rank 0.

    Raises:
        CheckpointError: naming the key of a value that is neither.
    """
    entries: list[StateEntry] = []

    def walk(value: Any, place: str) -> Any:
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, Tensor):
            name = f"client_state{place}"
            if stores:
                flat = value.detach().contiguous().view(-1)
                entries.append(StateEntry(name, ROLE, uncut(value.shape), 0, flat.numel(), flat, SOLE_HOLDER))
            return {_TENSOR: name}
        if isinstance(value, list):
            return [walk(item, f"{place}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, dict):
            return _walk_dict(value, place)
        raise CheckpointError(f"client_state{place} is a {type(value).__name__}, which cannot be saved", hint=_HINT)

    def _walk_dict(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
        for key in value:
            if not isinstance(key, str) or key == _TENSOR:
                raise CheckpointError(f"client_state{place} has the key {key!r}, which cannot be saved", hint=_HINT)
        return {key: walk(item, f"{place}[{key!r}]") for key, item in value.items()}

    return _walk_dict(state, ""), entries


def tensors_in(state: Any) -> list[str]:
    """Returns the names of the tensors that a saved client state refers to."""
    if isinstance(state, list):
        return [name for item in state for name in tensors_in(item)]
    if not isinstance(state, dict):
        return []
    if state.keys() == {_TENSOR}:
        return [str(state[_TENSOR])]
    return [name for item in state.values() for name in tensors_in(item)]


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `take_apart` was given."""
    if isinstance(state, list):
        return [put_together(item, tensors) for item in state]
    if not isinstance(state, dict):
        return state
    if state.keys() == {_TENSOR}:
        return tensors[state[_TENSOR]]
    return {key: put_together(item, tensors) for key, item in state.items()}
