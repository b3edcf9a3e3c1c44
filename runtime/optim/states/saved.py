"""An optimizer's states as checkpoints name them: pieces of the parameters they belong to, for any number of ranks.

Says what there is to save and what a checkpoint must have, and makes room for what comes from one. Reads and writes no
file, takes no step, and leaves where states lie to `placed.py`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn, optim

from dsrun.errors import CheckpointError

from ...layout.unit_layout import ShardPiece
from ...protocols import StateEntry
from ..structure.base import StructuredOptimizer, TensorInfo
from ..structure.runs import Run
from .coded import CodedState, cut_tensors
from .format import CODES
from .of_run import (
    SCALAR,
    FormatChange,
    PythonNumber,
    code_piece,
    coded_state,
    decoded_piece,
    has_first_element,
    is_elementwise,
    is_python_number,
    number_entry,
    numbers,
    stored_states,
    tensor_entries,
)
from .option_values import plain_option, set_option
from .placed import PlacedStates


class SavedStates:
    """What a checkpoint has of an optimizer, and what it gets back.

    Args:
        states: states of all runs of this rank.
        tensors: all that are trained, whether or not this rank holds a piece of them.

    Attributes:
        has_begun: the optimizer has taken a step, or got states from a checkpoint; on all ranks alike.
    """

    def __init__(self, states: PlacedStates, tensors: Sequence[TensorInfo]) -> None:
        self._states = states
        self._tensors = tensors
        self._changes: list[FormatChange | PythonNumber] = []
        self.has_begun = False
        self._structured = states.optimizer if isinstance(states.optimizer, StructuredOptimizer) else None

    def state_entries(self) -> list[StateEntry]:
        """Returns the optimizer's state as pieces of the parameters it belongs to.

        One-number states (Adam's `step`) have the role `scalar:<name>` and the shape (), once a parameter: with the
        piece that holds the whole parameter's first element. Numbers of Python's have the name of their type for
        `scalar`.

        Raises:
            CheckpointError: a state is of a form that no checkpoint has.
        """
        if self._structured is not None:
            return list(self._structured.entries())
        return [entry for run in self._states.runs for entry in self._entries(run)]

    def leading_scalars(self) -> list[StateEntry]:
        """Returns one-number states that runs would ask for in `loadable_entries`, and other ranks have in theirs.

        For a copy of the state that is to be loaded without the other ranks'.
        """
        entries: list[StateEntry] = []
        for run in [] if self._structured is not None else self._states.runs:
            first = next(iter(run.pieces()), None)
            if first is not None and not has_first_element(first):
                for role, value in numbers(run, self._states.of(run)):
                    entries.append(number_entry(first, role, value, run.owned.holders))
        return entries

    def check_codes(self, roles: Collection[str]) -> None:
        """Refuses a checkpoint's states in codes of tensors that are cut over ranks.

        Args:
            roles: roles of the states that the checkpoint has.

        Raises:
            CheckpointError: naming the tensors.
        """
        cut = cut_tensors(self._tensors) if any(stored_states(list(roles)).values()) else []
        if cut and self._structured is None:
            raise CheckpointError(
                "load_checkpoint: optimizer states are stored there in codes of 8 bits, by blocks of whole tensors, "
                "and ranks have parts of " + ", ".join(f"`{name}`" for name in cut),
                hint="load it where these tensors are whole, with `state_format` left out, and save again; or pass "
                "load_optimizer_states=False",
            )

    def wanted_states(self, roles: Collection[str]) -> list[tuple[str, str]]:
        """Returns (name, role) of every state that a checkpoint must have for this optimizer, on whichever rank.

        Args:
            roles: those that the checkpoint has of any tensor.
        """
        known, wanted = self._structured, list[tuple[str, str]]()
        for info in self._tensors:
            if info.numel:
                of_tensor = sorted(roles) if known is None else known.state_roles(info.name, info.shape)
                wanted += [(info.name, role) for role in of_tensor]
        return wanted

    def loadable_entries(self, roles: Collection[str], *, without: Collection[str] = ()) -> list[StateEntry]:
        """Allocates zeroed state for `roles`, as a checkpoint names them, and returns it as pieces to fill.

        In contrast to `state_entries`, each run asks for its one-number states, from the first parameter it holds.

        Args:
            roles: elementwise ones by their name, one-number ones as `scalar:<name>`.
            without: parameters that have no states there; a run is of such ones alone, or of none.
        """
        if self._structured is not None:
            return self.state_entries()
        self._states.vacate(anew=bool(roles))
        self.has_begun = bool(roles)
        scalars = [role.removeprefix(SCALAR) for role in roles if role.startswith(SCALAR)]
        of_python = [role for role in roles if is_python_number(role)]
        stored = stored_states([role for role in roles if not role.startswith(SCALAR) and role not in of_python])
        entries: list[StateEntry] = []
        for run in self._states.runs:
            state = self._states.renew(run)
            if roles and run.first_name in without:
                self._states.late.add(run)
                continue
            entries += _number_room(run, scalars, state)
            self._changes += [PythonNumber(run, role, state) for role in of_python]
            for name, in_codes in stored.items():
                self._states.make_zeros(run, name, state)
                if in_codes != (name + CODES in state):
                    self._changes.append(FormatChange(run, name, in_codes, state))
            entries += [e for e in tensor_entries(run, state) if e.role in roles]
        return entries

    def format_changes(self) -> list[FormatChange | PythonNumber]:
        """Returns the states that a checkpoint has in another form, since `loadable_entries`; once."""
        changes, self._changes = self._changes, []
        return changes

    def decoded_state(self, name: str, key: str) -> Tensor | None:
        """Returns this rank's piece of a state that lies in codes, fp32 and a copy; None where there is none.

        Args:
            name: name of the parameter.
            key: the optimizer's name of the state.
        """
        found = self._coded_piece(name, key)
        return None if found is None else decoded_piece(*found)

    def code_state(self, name: str, key: str, values: Tensor) -> bool:
        """Sets this rank's piece of a state that lies in codes; False where there is none.

        Args:
            name: name of the parameter.
            key: the optimizer's name of the state.
            values: flat.
        """
        found = self._coded_piece(name, key)
        if found is not None:
            code_piece(*found, values)
        return found is not None

    def dtype_elsewhere(self, name: str, key: str) -> torch.dtype | None:
        """Returns the dtype of a state that other ranks have of a parameter; None where they have none.

        Ranks do not ask each other: an optimizer makes the same states of all parameters of a group.

        Args:
            name: name of a parameter that this rank has no piece of.
            key: the optimizer's name of the state.
        """
        info = next(info for info in self._tensors if info.name == name)
        states = [(run, self._states.of(run)) for run in self._states.runs]
        states = [(run, state) for run, state in states if run.group == info.group] or states
        if not (any(state for _, state in states) if states else self.has_begun or self._structured is not None):
            return None
        if self._structured is not None:  # which makes its states with itself
            return torch.float32 if key in self._structured.state_roles(name, info.shape) else None
        for run, state in states:
            if coded_state(run, state, key) is not None:
                return torch.float32
            if is_elementwise(run, state.get(key)):
                return state[key].dtype
        made = None if states else self._states_of_a_leaf(info.group).get(key)
        return made.dtype if isinstance(made, Tensor) and made.numel() > 1 else None

    def made_states(self) -> set[str]:
        """Returns the names of the states that the optimizer makes in its steps, whether or not it has taken one."""
        if self._structured is not None:
            return {role for info in self._tensors for role in self._structured.state_roles(info.name, info.shape)}
        made = [self._states_of_a_leaf(group) for group in range(len(self._states.optimizer.param_groups))]
        return {name for states in made for name, value in states.items() if value is not None}

    def options(self) -> list[dict[str, Any]]:
        """Returns each group's hyperparameters that JSON can hold (lr, betas, ...), with numbers for tensors."""
        plain = [
            {key: plain_option(value) for key, value in group.items()} for group in self._states.optimizer.param_groups
        ]
        return [
            {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple | None)}
            for group in plain
        ]

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Takes over hyperparameters that `options` returned, where the number of groups is the same.

        Tensors among a group's options stay, and get the values.
        """
        groups = self._states.optimizer.param_groups
        if len(groups) == len(options):
            for group, saved in zip(groups, options, strict=True):
                for key, value in saved.items():
                    if key in group:
                        set_option(group, key, tuple(value) if isinstance(value, list) else value)  # JSON has no tuples

    def _entries(self, run: Run) -> Iterator[StateEntry]:
        state = self._states.of(run)
        yield from tensor_entries(run, state)
        for role, value in numbers(run, state):
            for piece in run.pieces():
                if has_first_element(piece):
                    yield number_entry(piece, role, value, run.owned.holders)

    def _states_of_a_leaf(self, group: int) -> dict[str, Any]:
        device = next((run.grad.device for run in self._states.runs), torch.device("cpu"))
        return _states_of_a_leaf(self._states.optimizer, group, device)

    def _coded_piece(self, name: str, key: str) -> tuple[Run, ShardPiece, CodedState] | None:
        for run in self._states.runs:
            for piece in run.pieces():
                if piece.extent.name == name:
                    codes = coded_state(run, self._states.of(run), key)
                    return None if codes is None else (run, piece, codes)
        return None


def _states_of_a_leaf(optimizer: optim.Optimizer, group: int, device: torch.device) -> dict[str, Any]:
    """Returns what a copy of an optimizer makes for a leaf of two zeros; where there is no leaf of its to look at."""
    leaf = nn.Parameter(torch.zeros(2, device=device))
    leaf.grad = torch.zeros(2, device=device)
    twin = copy(optimizer)
    # What torch's own copy leaves behind; a schedule's `step` would step the optimizer itself.
    twin.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    hooks = {key: OrderedDict[int, Any]() for key in vars(optimizer) if key.endswith("_hooks")}
    options = {**optimizer.param_groups[group], "params": [leaf]}
    twin.__dict__.update(hooks, state=defaultdict[Tensor, Any](dict), param_groups=[options])
    twin.step()
    return twin.state[leaf]


def _number_room(run: Run, names: Sequence[str], state: dict[str, Any]) -> list[StateEntry]:
    """Adds zeros to a run's state for its one-number states, and returns them to be filled."""
    first = next(iter(run.pieces()), None)
    if first is None:
        return []
    state |= {name: torch.zeros((), dtype=torch.float32, device=run.grad.device) for name in names}
    return [number_entry(first, SCALAR + name, state[name], run.owned.holders) for name in names]
