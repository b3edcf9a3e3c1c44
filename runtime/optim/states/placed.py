"""The states that an optimizer keeps for all runs, and the places that they have.

Finds, makes and moves them. Takes no step, and knows neither names of parameters nor checkpoints; what one run's state
is made of stands in `of_run.py`, where the places lie in `places.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from ...memory.arenas import Arenas
from ...protocols import OwnedRange
from ..structure.base import StructuredOptimizer
from ..structure.runs import Run
from .format import FP32_STATES
from .of_run import (
    coded_state,
    copy_state,
    is_elementwise,
    is_scales,
    part_of_place,
    part_of_state,
    place_numel,
    stored_states,
)
from .places import StateAllocator, adam_state_names, adam_step_count, move_here


class PlacedStates:
    """States of all runs; torch's optimizer holds them, by the runs' leaves.

    Args:
        optimizer: optimizer that holds the leaves.
        runs: all, in order.

    Attributes:
        optimizer: optimizer that holds the leaves.
        runs: runs of this rank, all of them and in order.
        housing: places for states; None: they stay where torch has put them.
        form: format of the states where the step is taken elsewhere, in host memory.
        late: runs that have had no step so far, although others have had one; their states do not exist yet.
    """

    def __init__(self, optimizer: optim.Optimizer, runs: Sequence[Run]) -> None:
        self.optimizer = optimizer
        self.runs = runs
        self.housing: StateAllocator | None = None
        self.form = FP32_STATES
        self.late: set[Run] = set()
        self._is_housed = False

    @property
    def waits_for_places(self) -> bool:
        """Whether there are places, and no states in them yet."""
        return self.housing is not None and not self._is_housed

    def of(self, run: Run) -> dict[str, Any]:
        """Returns what the optimizer keeps for a run, by its own names; empty where it has not made anything yet."""
        return self.optimizer.state.get(run.param, {})

    def split(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns a run's states of one value an element, or their codes and scales, and all others; both by name."""
        state = self.of(run)
        states = {k: v for k, v in state.items() if is_elementwise(run, v) or is_scales(k, state)}
        return states, {name: value for name, value in state.items() if name not in states}

    def keep(self, run: Run, states: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Takes over what a run's step has made of its state."""
        self.optimizer.state[run.param] = {**scalars, **states}

    def place(self, run: Run, name: str, dtype: torch.dtype) -> Tensor:
        """Returns memory for a tensor of a state that a run's first step makes: where it is housed, if foreseen."""
        _, part = self.form.part_of(name)
        if dtype == (run.param.dtype if self.form is FP32_STATES else self.form.parts[part].dtype):
            housed = self._housed(run, name)
            if housed is not None:
                return housed
        return torch.empty(place_numel(run, self.form, part), dtype=dtype)

    def tensors(self) -> list[Tensor]:
        """Returns every state tensor, and what they are views of."""
        housed = [] if self.housing is None or not self._is_housed else self.housing.buffers()
        states = [value for run in self.runs for value in self.of(run).values() if isinstance(value, Tensor)]
        return [*housed, *states]

    # A first step's states -------------------------------------------------------------------------------------------

    def place_adam_zeros(self, runs: Collection[Run]) -> None:
        """Gives Adam's states of these runs their places, zeroed as torch begins with them."""
        for run in runs:
            options = self.optimizer.param_groups[run.group]
            states = {name: self._range_part(run, name) for name in adam_state_names(options)}
            housed = {name: part.zero_() for name, part in states.items() if part is not None}
            self.optimizer.state[run.param] = {"step": adam_step_count(options, run.grad.device), **housed}

    def move_in(self, run: Run) -> None:
        """Moves the states that torch has made for a run to where they belong."""
        state = self.of(run)
        for name, value in state.items():
            if isinstance(value, Tensor) and is_elementwise(run, value) and value.dtype == run.grad.dtype:
                housed = self._range_part(run, name)
                state[name] = value if housed is None else housed.copy_(value)

    def end_first_step(self) -> None:
        """Says that states are where they belong from here on."""
        self._is_housed = True

    def cut(self, run: Run, parts: Sequence[Run]) -> None:
        """Divides a run's states among its parts, which are in `runs` in its place."""
        if run in self.late:
            self.late = (self.late - {run}) | set(parts)
        state = self.optimizer.state.pop(run.param, None)
        if state is not None:
            structured = self.optimizer if isinstance(self.optimizer, StructuredOptimizer) else None
            divide = part_of_state if structured is None else structured.part_of_state
            self.optimizer.state.update({part.param: divide(run, part, state) for part in parts})
        if self.form.is_coded and self.housing is not None:
            self._place_scales([other for other in self.runs if other.owned is run.owned])

    def _place_scales(self, runs: Sequence[Run]) -> None:
        """Moves the scales of a range's runs to where they belong, now that there are more of them."""
        moved: list[tuple[Tensor, Tensor]] = []
        for run in runs:
            state = self.of(run)
            for name in [name for name in state if is_scales(name, state)]:
                housed = self._housed(run, name)
                target = torch.empty_like(state[name]) if housed is None else housed
                moved.append((target, state[name].clone()))  # another's scales may lie there still
                state[name] = target
        for target, values in moved:
            target.copy_(values)

    # States that come from elsewhere ---------------------------------------------------------------------------------

    def vacate(self, *, anew: bool) -> None:
        """Forgets which state lies where.

        Args:
            anew: others are made in their places, with `make_zeros`; otherwise the next step makes them.
        """
        if self.housing is not None:
            self.housing.vacate()
        self.late = set()
        self._is_housed = anew

    def renew(self, run: Run) -> dict[str, Any]:
        """Returns a run's state, from now on: nothing, to be added to."""
        self.optimizer.state[run.param] = state = dict[str, Any]()
        return state

    def make_zeros(self, run: Run, name: str, state: dict[str, Any]) -> None:
        """Adds a state of zeros to a run's, where it belongs; after `vacate`.

        Args:
            run: run that gets the state.
            name: name of the state.
            state: state of the run, to which the zeros are added; codes and scales are added under names of their own.
        """
        for number, part in enumerate(self.form.parts):
            dtype = run.grad.dtype if self.form is FP32_STATES else part.dtype
            housed = self._housed(run, name + part.suffix)
            numel = place_numel(run, self.form, number)
            fresh = torch.zeros(numel, dtype=dtype, device=run.grad.device) if housed is None else housed.zero_()
            state[name + part.suffix] = fresh
        codes = coded_state(run, state, name)
        if codes is not None:
            codes.clear()

    def take_loaded(self, before_change: Callable[[], None]) -> None:
        """Has states that torch's `load_state_dict` brings lie where they belong from here on.

        Args:
            before_change: callback before the loaded states are written to their places.
        """
        self.optimizer.register_load_state_dict_post_hook(lambda _: self._take_over_loaded(before_change))

    def move_here(self, ranges: Sequence[OwnedRange], memory: Arenas, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Brings the states of ranges whose masters have come to the device there.

        Args:
            ranges: ranges with masters that have come to the device.
            memory: arenas in which places are reserved.
            copy: copies a state, its first argument, from host memory to the device.
        """
        give_up = move_here(self.housing, ranges, memory)
        for run in self.runs:
            if any(run.owned is owned for owned in ranges):
                self._move_run(run, copy)
        give_up()

    def _move_run(self, run: Run, copy: Callable[[Tensor, Tensor], None]) -> None:
        states, scalars = self.split(run)
        for name, value in states.items():
            housed = self._housed(run, name)
            states[name] = torch.empty_like(value, device=run.param.device) if housed is None else housed
            copy(value, states[name])
        options = self.optimizer.param_groups[run.group]
        on_device = bool(options.get("fused") or options.get("capturable"))
        counts = {k: v.to(run.param.device) if on_device and isinstance(v, Tensor) else v for k, v in scalars.items()}
        if states or counts:
            self.keep(run, states, counts)
        else:
            self.late.add(run)

    def _take_over_loaded(self, before_change: Callable[[], None]) -> None:
        """Brings states that torch's `load_state_dict` has put into fp32 to where they belong, as they were saved."""
        before_change()
        self.vacate(anew=any(self.of(run) for run in self.runs))
        for run in self.runs:
            # They may be the very tensors that are to be set.
            loaded = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.of(run).items()}
            state = {
                name: value
                for name, value in loaded.items()
                if not (is_elementwise(run, value) or is_scales(name, loaded))
            }
            for name in stored_states([name for name in loaded if name not in state]):
                self.make_zeros(run, name, state)
                copy_state(run, name, loaded, state)
            self.optimizer.state[run.param] = state

    def _housed(self, run: Run, name: str) -> Tensor | None:
        """Returns a run's part of where a tensor of its state is housed; None where that was not foreseen."""
        housed = None if self.housing is None else self.housing.place(run.owned, name)
        if housed is None:
            return None
        before = sum(other.owned is run.owned and other.start < run.start for other in self.runs)
        return part_of_place(run, housed, self.form, self.form.part_of(name)[1], before=before)

    def _range_part(self, run: Run, name: str) -> Tensor | None:
        """Returns a run's part of where a state of one value an element is housed, whatever the form elsewhere."""
        housed = None if self.housing is None else self.housing.place(run.owned, name)
        return None if housed is None else housed.narrow(0, run.start - run.owned.start, run.grad.numel())
