"""What an optimizer keeps for one run: values of its elements, codes and scales of such values, and single numbers.

Reads and sets what is there; where it lies is `places.py`'s business, and what it means the optimizer's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsrun.checkpoint_files.index.region import uncut
from dsrun.errors import CheckpointError

from ...layout.unit_layout import ShardPiece
from ...protocols import SOLE_HOLDER, Holders, StateEntry
from ..structure.base import elementwise_entries
from ..structure.codes import BLOCK
from ..structure.runs import Run
from .coded import CodedState, coded, coded_entries, head_of, scale_count
from .format import CODES, SCALES, StateFormat

#: Prefix of the role of a state that is one number for a whole run of elements, and a tensor.
SCALAR = "scalar:"
#: Prefixes of roles of states that are numbers of Python's, without the colon, and how a checkpoint has them.
PYTHON_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def is_elementwise(run: Run, value: object) -> bool:
    """Whether a state has one value, or code, for each element of a run."""
    return isinstance(value, Tensor) and value.shape == run.param.shape


def is_scales(name: str, state: Mapping[str, Any]) -> bool:
    """Whether a state's tensor of that name is the scales of codes beside it."""
    return name.endswith(SCALES) and name.removesuffix(SCALES) + CODES in state


def coded_state(run: Run, state: Mapping[str, Any], name: str) -> CodedState | None:
    """Returns a state that lies in codes; None where there is none of that name that does."""
    if name + CODES not in state:
        return None
    return coded(name, state[name + CODES], state[name + SCALES], head=head_of(run))


def tensor_entries(run: Run, state: Mapping[str, Any]) -> Iterator[StateEntry]:
    """Yields the pieces of all states of a run but single numbers."""
    for role, value in state.items():
        name = role.removesuffix(CODES)
        codes = coded_state(run, state, name) if name != role else None
        if codes is not None:
            yield from coded_entries(run, name, codes)
        elif is_elementwise(run, value):
            yield from elementwise_entries(run, role, value)


def stored_states(roles: Sequence[str]) -> dict[str, bool]:
    """Returns the states of a checkpoint by their name, and whether they are in codes.

    Args:
        roles: roles of states with one value per element, or of their codes and scales.
    """
    coded_names = {role.removesuffix(CODES) for role in roles if role.endswith(CODES)}
    coded_names = {name for name in coded_names if name + SCALES in roles}
    parts = {name + suffix for name in coded_names for suffix in (CODES, SCALES)}
    return dict.fromkeys(sorted(coded_names), True) | {role: False for role in roles if role not in parts}


def place_numel(run: Run, form: StateFormat, part: int) -> int:
    """Returns the elements of a part of a run's state."""
    return scale_numel(run) if form.parts[part].suffix == SCALES else run.numel


def part_of_place(run: Run, place: Tensor, form: StateFormat, part: int, *, before: int) -> Tensor | None:
    """Returns a run's part of the memory for one tensor of a range's state.

    Args:
        run: run of the range to which the part of the memory belongs.
        place: the memory.
        form: format of the state.
        part: number of the tensor among the tensors of the state.
        before: number of runs of the range before this one; each may share a block with the next, and has a scale of
            its own.

    Returns:
        None where the memory is too small, for more runs share blocks than was foreseen.
    """
    start, numel = run.start - run.owned.start, place_numel(run, form, part)
    if form.parts[part].suffix == SCALES:
        start = run.start // BLOCK - run.owned.start // BLOCK + before
    return place.narrow(0, start, numel) if start + numel <= place.numel() else None


def decoded_piece(run: Run, piece: ShardPiece, state: CodedState) -> Tensor:
    """Returns the fp32 values of a piece of a tensor, a copy."""
    first, last = _whole_blocks(run, piece)
    values = state.decode(first, last)
    return values.narrow(0, piece.shard_offset - first, piece.stop - piece.start)


def code_piece(run: Run, piece: ShardPiece, state: CodedState, values: Tensor) -> None:
    """Sets the values of a piece of a tensor; what shares a block with it is coded anew.

    Args:
        run: run that contains the piece.
        piece: piece of the tensor to set.
        state: state of the run, in codes.
        values: flat, as many as the piece has elements.
    """
    first, last = _whole_blocks(run, piece)
    whole = state.decode(first, last)
    whole.narrow(0, piece.shard_offset - first, piece.stop - piece.start).copy_(values)
    state.encode(first, whole)


def _whole_blocks(run: Run, piece: ShardPiece) -> tuple[int, int]:
    """Returns the elements of the run in the blocks that a piece has elements in."""
    head = head_of(run)
    first = (head + piece.shard_offset) // BLOCK * BLOCK - head
    last = -(-(head + piece.shard_offset + piece.stop - piece.start) // BLOCK) * BLOCK - head
    return max(0, first), min(run.numel, last)


@dataclass(slots=True)
class FormatChange:
    """One state of a run that a checkpoint has in codes and the run as values, or the other way round.

    Attributes:
        run: run that the state belongs to.
        name: name of the state.
        from_codes: the checkpoint has codes.
        state: state that the optimizer keeps for the run, by name.
    """

    run: Run
    name: str
    from_codes: bool
    state: Mapping[str, Any]
    _values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def begin(self) -> list[StateEntry]:
        """Returns pieces in the checkpoint's format, to be filled from it; their memory is this object's."""
        run = self.run
        if self.from_codes:
            self._values = {
                self.name + CODES: torch.zeros(run.numel, dtype=torch.uint8),
                self.name + SCALES: torch.zeros(scale_count(head_of(run), run.numel)),
            }
        else:
            self._values = {self.name: torch.zeros(run.numel)}
        return list(tensor_entries(run, self._values))

    def end(self) -> None:
        """Brings what has been read to where it belongs."""
        copy_state(self.run, self.name, self._values, self.state)
        self._values = {}


@dataclass(slots=True)
class PythonNumber:
    """One state of a run that is a number of Python's, which no tensor that is read can be.

    Attributes:
        run: run that the state belongs to.
        role: role of the state in the checkpoint, with its type as prefix, such as `int:`.
        state: state that the optimizer keeps for the run, by name.
    """

    run: Run
    role: str
    state: dict[str, Any]
    _value: Tensor | None = None

    def begin(self) -> list[StateEntry]:
        """Returns what is to be filled from the checkpoint: one number of the first parameter that the run is of."""
        first = next(iter(self.run.pieces()), None)
        if first is None:
            return []
        self._value = torch.zeros((), dtype=PYTHON_NUMBERS[_kind_of(self.role)])
        return [number_entry(first, self.role, self._value, SOLE_HOLDER)]

    def end(self) -> None:
        """Sets the state to what has been read."""
        if self._value is not None:
            self.state[self.role.partition(":")[2]] = self._value.item()


def is_python_number(role: str) -> bool:
    """Whether a checkpoint's role is that of a number of Python's."""
    return _kind_of(role) in PYTHON_NUMBERS


def _kind_of(role: str) -> str:
    return role.partition(":")[0]


def numbers(run: Run, state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields the roles and values of the states of a run that are one number each.

    Raises:
        CheckpointError: a state is neither that nor of one value an element.
    """
    for name, value in state.items():
        kind = type(value).__name__
        if isinstance(value, Tensor) and value.numel() == 1 and not is_elementwise(run, value):
            if not is_scales(name, state):
                yield SCALAR + name, value
        elif kind in PYTHON_NUMBERS and not (kind == "int" and abs(value) >> 63):
            yield f"{kind}:{name}", torch.tensor(value, dtype=PYTHON_NUMBERS[kind])
        elif value is not None and not is_elementwise(run, value) and not is_scales(name, state):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {kind}"
            raise CheckpointError(
                f"optimizer state `{name}` is {what}; a checkpoint has tensors of the parameter's elements, and "
                "numbers (bool, int of 64 bits, float, or a tensor of one element)",
                hint="keep it in one of these forms, or in the client state",
            )


def has_first_element(piece: ShardPiece) -> bool:
    """Whether a piece holds the first element of its whole tensor: the ranks that do save the tensor's numbers."""
    first = piece.extent.whole.first
    return first is not None and piece.start <= first < piece.stop


def number_entry(piece: ShardPiece, role: str, value: Tensor, holders: Holders) -> StateEntry:
    """Returns a one-number state as that of the parameter that a piece is of.

    Args:
        piece: piece of the parameter.
        role: role of the state in a checkpoint.
        value: the number.
        holders: ranks that hold the same piece.
    """
    return StateEntry(piece.extent.name, role, uncut(()), 0, 1, value.view(1), holders)


def part_of_state(run: Run, part: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a run's state belongs to a part of the run that is to be a run of its own.

    Values and codes are views; scales and single numbers are copies, for each part has its own from here on.

    Args:
        run: the run.
        part: part of the run that becomes a run of its own.
        state: state of the whole run.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if is_scales(name, state):
            found[name] = value.narrow(0, part.start // BLOCK - run.start // BLOCK, scale_numel(part)).clone()
        elif is_elementwise(run, value):
            found[name] = value.narrow(0, part.start - run.start, part.numel)
        else:
            found[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return found


def scale_numel(run: Run) -> int:
    """Returns the blocks that a run has elements in."""
    return scale_count(head_of(run), run.numel)


def copy_state(run: Run, name: str, source: Mapping[str, Tensor], target: Mapping[str, Any]) -> None:
    """Copies one state of a run to where it belongs, whatever the formats of both.

    Args:
        run: run that both states belong to.
        name: name of the state.
        source: its values, or codes and scales, in any dtype; left as they are.
        target: state to write to: values, or codes and scales, in any dtype.
    """
    parts = (name + CODES, name + SCALES)
    codes = coded_state(run, target, name)
    if name in source and codes is not None:
        codes.encode(0, source[name].to(torch.float32, copy=True))
    elif name in source:
        target[name].copy_(source[name])
    elif codes is not None:
        for part in parts:
            target[part].copy_(source[part])
    else:
        whole = coded(name, source[parts[0]].to(torch.uint8), source[parts[1]].float(), head=head_of(run))
        target[name].copy_(whole.decode(0, run.numel))
