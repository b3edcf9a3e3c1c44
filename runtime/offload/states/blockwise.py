"""States of a range as they lie, and in fp32 one block at a time: as they are, rounded to bf16, or coded in 8 bits.

No optimizer is known here; how codes are made is `optim/states/coded.py`'s business.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...optim.states.coded import CodedState, coded, scale_count
from ...optim.states.format import CODES, SCALES
from .range_work import RangeWork
from .scratch import Scratch

_HALVES = (torch.bfloat16, torch.float16)


class StateAccess(Protocol):
    """One state of a range."""

    def open(self, start: int, stop: int, scratch: Scratch, name: str) -> Tensor:
        """Returns the values of [start, stop) for a step to work on, until `close`.

        Args:
            start: first element.
            stop: one past the last.
            scratch: scratch memory in which the values are widened.
            name: name of the scratch memory: one for each state that is open at once.
        """
        ...

    def close(self, start: int, values: Tensor) -> None:
        """Puts values where they belong.

        Args:
            start: first element of the values.
            values: values that `open` returned, or others in their place; not read any more afterwards.
        """
        ...


class AsItLies:
    """A state that the optimizer works on where it lies, in whatever dtype.

    Args:
        values_N: the state.
    """

    def __init__(self, values_N: Tensor) -> None:
        self._values = values_N

    def open(self, start: int, stop: int, scratch: Scratch, name: str) -> Tensor:
        """See `StateAccess`."""
        return self._values[start:stop]

    def close(self, start: int, values: Tensor) -> None:
        """See `StateAccess`."""
        part = self._values[start : start + values.numel()]
        if part.data_ptr() != values.data_ptr():
            part.copy_(values)


class RoundedAccess:
    """A state of 16 bits, rounded to nearest after each step.

    Args:
        values_N: the state.
    """

    def __init__(self, values_N: Tensor) -> None:
        self._values = values_N

    def open(self, start: int, stop: int, scratch: Scratch, name: str) -> Tensor:
        """See `StateAccess`."""
        return scratch.take(name, stop - start).copy_(self._values[start:stop])

    def close(self, start: int, values: Tensor) -> None:
        """See `StateAccess`."""
        self._values[start : start + values.numel()].copy_(values)


class CodedAccess:
    """A state in codes with a scale a block.

    Args:
        state: codes and scales.
    """

    def __init__(self, state: CodedState) -> None:
        self._state = state

    def open(self, start: int, stop: int, scratch: Scratch, name: str) -> Tensor:
        """See `StateAccess`."""
        return self._state.decode(start, stop)

    def close(self, start: int, values: Tensor) -> None:
        """See `StateAccess`."""
        self._state.encode(start, values)


def held_state(work: RangeWork, name: str, *, widens: bool) -> StateAccess | None:
    """Returns a state as a step works on it; None where there is none of that name yet.

    Args:
        work: step of the range as a value: its masters, gradients and states.
        name: the optimizer's.
        widens: the optimizer computes in fp32 whatever the state is in; else a state that its own code has made in
            another dtype is given as it is.
    """
    if name + CODES in work.states:
        return CodedAccess(coded(name, work.states[name + CODES], work.states[name + SCALES], head=work.head))
    if name not in work.states:
        return None
    values_N = work.states[name]
    return RoundedAccess(values_N) if widens and values_N.dtype in _HALVES else AsItLies(values_N)


def held_names(work: RangeWork) -> list[str]:
    """Returns the optimizer's names of all states of a range."""
    names = (name.removesuffix(CODES) for name in work.states)
    return [name for name in names if not (name.endswith(SCALES) and name.removesuffix(SCALES) + CODES in work.states)]


def made_state(work: RangeWork, name: str, dtype: torch.dtype = torch.float32) -> StateAccess:
    """Returns a new state of zeros, in the range's format.

    Args:
        work: step of the range as a value, which has the new state from here on.
        name: the optimizer's.
        dtype: dtype that the optimizer has the state in; another dtype than fp32 is kept as it is.
    """
    if dtype != torch.float32 or work.form.name == "fp32":
        return AsItLies(work.add_state(name, dtype))
    if not work.form.is_coded:
        return RoundedAccess(work.add_state(name, work.form.parts[0].dtype))
    codes_N = work.add_state(name + CODES, torch.uint8)
    scales_B = work.add_state(name + SCALES, torch.float32, numel=scale_count(work.head, work.numel))
    return CodedAccess(coded(name, codes_N, scales_B, head=work.head).clear())
