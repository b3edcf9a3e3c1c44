"""An optimizer over the owned ranges of all units, and its state as named tensors.

It steps; it neither reduces gradients nor publishes parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from dsrun.errors import ModelError

from ..compat import foreach_mul
from ..layout.unit_layout import ShardPiece
from ..memory.arenas import Arenas
from ..memory.host_pool import HostPool
from ..mesh.collectives import Collectives
from ..protocols import ChangeFence, OwnedRange, StateEntry
from .coded_states import CodedState
from .housing import Housing, StatePlaces, adam_state_names, adam_step_count, house, move_here
from .registry import adopt, check_range_by_range, check_rounded_states, states_of_group
from .run_states import (
    FormatChange,
    code_piece,
    coded_state,
    copy_state,
    decoded_piece,
    is_elementwise,
    is_scales,
    part_of_place,
    place_numel,
    stored_states,
    tensor_entries,
)
from .runs import Run, cut_runs
from .state_format import CODES, FP32_STATES, StateFormat
from .structured import StructuredOptimizer, TensorInfo
from .windowed import step_range_by_range

#: Prefix of the role of a state that is one number for a whole run of elements.
_SCALAR = "scalar:"


class ShardOptimizer:
    """Updates the masters of every unit's owned range.

    Args:
        ranges: what this rank owns of every unit.
        group_count: number of optimizer groups.
        axis: over which ranges are spread; None where this rank owns everything.
        stays: for each range whether it is stepped here all the same where a step is taken elsewhere, see
            `begin_away`; None: none is.
        fence: keeps ranges as they are while a checkpoint copies them, by their number; None: nothing does.

    Attributes:
        torch_optimizer: that holds the leaves.
        put_away: masters, states or sums are in host memory for a while, and must not be touched.
        form: how states lie, where a step is taken elsewhere.
    """

    def __init__(
        self,
        ranges: Sequence[OwnedRange],
        *,
        group_count: int,
        axis: Collectives | None = None,
        stays: Sequence[bool] | None = None,
        fence: ChangeFence | None = None,
    ) -> None:
        self._fence = fence
        self._ranges = ranges
        self._staying = [owned for owned, one in zip(ranges, stays or [False] * len(ranges), strict=True) if one]
        self._runs = [run for owned in ranges for run in cut_runs(owned)]
        self._group_count = group_count
        self._axis = axis
        self.torch_optimizer: optim.Optimizer | None = None
        self.put_away = False
        self.form = FP32_STATES
        self._changes: list[FormatChange] = []
        self._housing: Housing | None = None
        self._is_housed = False
        self._stepping = False
        self._is_windowed = any(owned.window is not None for owned in ranges)

    def shards_by_group(self) -> list[list[nn.Parameter]]:
        """Returns the leaves that a torch optimizer shall update, group by group."""
        return [[run.param for run in self._runs if run.group == group] for group in range(self._group_count)]

    def drive(self, optimizer: optim.Optimizer) -> None:
        """Says which torch optimizer holds the leaves; one that knows their structure gets them cut as it needs.

        Raises:
            ModelError: it must see all leaves at once, and masters or sums are in another dtype than it computes in.
        """
        if self._is_windowed:
            check_range_by_range(optimizer)
        self.torch_optimizer = optimizer
        if isinstance(optimizer, StructuredOptimizer):
            self._runs = [run for owned in self._ranges for run in cut_runs(owned, optimizer.kind_of)]
            adopt(optimizer, self.shards_by_group())
            optimizer.bind(self._runs, self._tensors(), self._axis, device=self._ranges[0].seen_master.device)
        optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def house_states(
        self,
        memory: Arenas,
        host: HostPool | None = None,
        *,
        away: StatePlaces | None = None,
        form: StateFormat = FP32_STATES,
        moves: bool = False,
    ) -> None:
        """Reserves the memory of the optimizer's states, where their number is known before they exist.

        Those of other optimizers, and those made with the optimizer (Adagrad's), stay where torch has put them.

        Args:
            memory: where it is reserved.
            host: makes it, where masters lie in host memory apart from the device; not of ranges that stay.
            away: has places of its own, where masters are not always in memory; likewise.
            form: how they lie there, whatever the optimizer computes in.
            moves: ranges in host memory may come to the device later, see `take_over`.

        Raises:
            ModelError: the optimizer's states cannot lie so.
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        if form is not FP32_STATES:
            check_rounded_states(self.torch_optimizer, form.name)
            self.form = form
            self.torch_optimizer.register_load_state_dict_post_hook(lambda _: self._take_over_loaded())
        if self.torch_optimizer.state:
            return
        of_group = [states_of_group(self.torch_optimizer, group) for group in self.torch_optimizer.param_groups]
        counts = [(owned, max((of_group[group] for group in owned.groups), default=0)) for owned in self._ranges]
        if any(count for _, count in counts):
            self._housing = house(counts, memory, host, away=away, staying=self._staying, form=form, moves=moves)

    def step(self, factor: float = 1.0) -> None:
        """Takes one optimizer step on the local ranges.

        Args:
            factor: gradients are multiplied by it first, in the dtype the optimizer computes in.
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        if self._fence is not None:
            self._fence.wait_all()
        self._stepping = True
        try:
            if self._is_windowed:
                self._step_through_window(self.torch_optimizer, factor)
                return
            if factor != 1:
                foreach_mul([owned.grad_sum for owned in self._ranges], factor)
            self._step_runs(self.torch_optimizer, self._runs)
        finally:
            self._stepping = False

    # Where the step is taken elsewhere, run by run --------------------------------------------------------------------

    @property
    def runs(self) -> Sequence[Run]:
        """Parts of the ranges that are in one group, in order."""
        return self._runs

    def begin_away(self, factor: float = 1.0) -> list[dict[str, Any]]:
        """Begins a step that others take, and takes it for the ranges that stay, if any do.

        Runs what hangs on the optimizer's own `step`, which finds no gradients of the others: hooks of scripts and
        profilers, and the mark by which a schedule knows that it comes after a step.

        Args:
            factor: gradients of the ranges that stay are multiplied by it first.

        Returns:
            each group's options, as the optimizer's own code would find them: behind all hooks, before it counts.
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        for run in self._runs:
            run.param.grad = None
        options: list[dict[str, Any]] = []

        def note(optimizer: optim.Optimizer, *_: object) -> None:
            if not options:  # a first step may come in parts
                for group in optimizer.param_groups:
                    options.append({key: value for key, value in group.items() if key != "params"})

        if self._staying and self._fence is not None:
            self._fence.wait_all()
        last_hook = self.torch_optimizer.register_step_pre_hook(note)
        self._stepping = True
        try:
            if factor != 1 and self._staying:
                foreach_mul([owned.grad_sum for owned in self._staying], factor)
            stay = {id(owned) for owned in self._staying}
            self._step_runs(self.torch_optimizer, [run for run in self._runs if id(run.owned) in stay])
        finally:
            self._stepping = False
            last_hook.remove()
        return options

    def take_over(
        self, moved: Mapping[int, tuple[Tensor, Tensor]], memory: Arenas, copy: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Steps ranges here from now on that others have stepped; between steps. All tensors keep their identity.

        Args:
            moved: numbers of the ranges, each with its masters and its gradient sums on the device.
            memory: where places for their states are reserved.
            copy: copies a state, its first argument, from host memory to the device.
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        for number, (master_N, sum_N) in moved.items():
            owned = self._ranges[number]
            owned.master.data, owned.grad_sum.data = master_N, sum_N
            for run in self._runs:
                if run.owned is owned:
                    first = run.start - owned.start
                    run.param.grad = None
                    run.param.data = master_N.narrow(0, first, run.numel)
                    run.grad.data = sum_N.narrow(0, first, run.numel)
        ranges = [self._ranges[number] for number in moved]
        give_up = move_here(self._housing, ranges, memory)
        for run in self._runs:
            if any(run.owned is owned for owned in ranges):
                states, scalars = self.split_state(run)
                for name, value in states.items():
                    housed = self._housed(run, name)
                    states[name] = torch.empty_like(value, device=run.param.device) if housed is None else housed
                    copy(value, states[name])
                options = self.torch_optimizer.param_groups[run.group]
                on_device = bool(options.get("fused") or options.get("capturable"))
                counts = {
                    k: v.to(run.param.device) if on_device and isinstance(v, Tensor) else v for k, v in scalars.items()
                }
                if states or counts:
                    self.torch_optimizer.state[run.param] = {**counts, **states}
        give_up()
        self._staying += ranges

    def end_away(self, changed: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes over options that the step has set anew, by group; states are housed from here on."""
        assert self.torch_optimizer is not None, "drive() was not called"
        for group, options in changed.items():
            self.torch_optimizer.param_groups[group].update(options)
        self._is_housed = True

    def split_state(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns a run's states of one value an element, or their codes and scales, and all others; both by name."""
        state = self._state(run)
        states = {k: v for k, v in state.items() if is_elementwise(run, v) or is_scales(k, state)}
        return states, {name: value for name, value in state.items() if name not in states}

    def place_state(self, run: Run, name: str, dtype: torch.dtype) -> Tensor:
        """Returns memory for a tensor of a state that a run's first step makes: where it is housed, if foreseen."""
        _, part = self.form.part_of(name)
        if dtype == (run.param.dtype if self.form is FP32_STATES else self.form.parts[part].dtype):
            housed = self._housed(run, name)
            if housed is not None:
                return housed
        return torch.empty(place_numel(run, self.form, part), dtype=dtype)

    def keep_state(self, run: Run, states: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Takes over what a run's step has made of its state."""
        assert self.torch_optimizer is not None, "drive() was not called"
        self.torch_optimizer.state[run.param] = {**scalars, **states}

    # ------------------------------------------------------------------------------------------------------------------

    def state_entries(self, *, replicated: bool) -> list[StateEntry]:
        """Returns the optimizer's state as pieces of the parameters it belongs to.

        One-number states (Adam's `step`) have the role `scalar:<name>` and the shape (), once a parameter: with the
        piece that holds the parameter's first element.

        Args:
            replicated: every rank owns everything (stage 0).
        """
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            return list(self.torch_optimizer.entries(replicated=replicated))
        return [entry for run in self._runs for entry in self._entries(run, replicated=replicated)]

    def leading_scalars(self, *, replicated: bool) -> list[StateEntry]:
        """Returns one-number states that runs would ask for in `loadable_entries`, and other ranks have in theirs.

        For a copy of the state that is to be loaded without the other ranks'.

        Args:
            replicated: every rank owns everything (stage 0).
        """
        entries: list[StateEntry] = []
        for run in [] if isinstance(self.torch_optimizer, StructuredOptimizer) else self._runs:
            first = next(_cut(run, run.grad), None)
            if first is None or first[0].start == 0:
                continue
            state = self._state(run)
            for name, value in state.items():
                if isinstance(value, Tensor) and not is_elementwise(run, value) and not is_scales(name, state):
                    role = f"{_SCALAR}{name}"
                    entries.append(StateEntry(first[0].extent.name, role, (), 0, 1, value.view(1), replicated))
        return entries

    def wanted_states(self, roles: Collection[str]) -> list[tuple[str, str]]:
        """Returns (name, role) of every state that a checkpoint must have for this optimizer, on whichever rank.

        Args:
            roles: those that the checkpoint has of any tensor.
        """
        optimizer, wanted = self.torch_optimizer, list[tuple[str, str]]()
        for info in self._tensors():
            if info.numel:
                is_known = isinstance(optimizer, StructuredOptimizer)
                of_tensor = optimizer.state_roles(info.name, info.shape) if is_known else sorted(roles)
                wanted += [(info.name, role) for role in of_tensor]
        return wanted

    def loadable_entries(self, roles: Collection[str], *, replicated: bool) -> list[StateEntry]:
        """Allocates zeroed state for `roles`, as a checkpoint names them, and returns it as pieces to fill.

        In contrast to `state_entries`, each run asks for its one-number states, from the first parameter it holds.

        Args:
            roles: elementwise ones by their name, one-number ones as `scalar:<name>`.
            replicated: every rank owns everything (stage 0).
        """
        assert self.torch_optimizer is not None, "drive() was not called"
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            return self.state_entries(replicated=replicated)
        if self._housing is not None:
            self._housing.vacate()
        self._is_housed = True
        entries: list[StateEntry] = []
        for run in self._runs:
            state: dict[str, Any] = {}
            first = next(_cut(run, run.grad), None)
            for role in roles:
                name = role.removeprefix(_SCALAR)
                if role != name and first is not None:
                    state[name] = scalar = torch.zeros((), dtype=torch.float32, device=run.grad.device)
                    extent = first[0].extent
                    entries.append(StateEntry(extent.name, role, (), 0, 1, scalar.view(1), replicated))
            self.torch_optimizer.state[run.param] = state
            for name, in_codes in stored_states([role for role in roles if not role.startswith(_SCALAR)]).items():
                self._make_zeros(run, name, state)
                if in_codes != (name + CODES in state):
                    self._changes.append(FormatChange(run, name, in_codes, state, replicated))
            entries += [e for e in tensor_entries(run, state, replicated=replicated) if e.role in roles]
        return entries

    def format_changes(self) -> list[FormatChange]:
        """Returns the states that a checkpoint has in another format, since `loadable_entries`; once."""
        changes, self._changes = self._changes, []
        return changes

    def decoded_state(self, name: str, key: str) -> Tensor | None:
        """Returns this rank's piece of a state that lies in codes, fp32 and a copy; None where there is none.

        Args:
            name: of the parameter.
            key: the optimizer's name of the state.
        """
        found = self._coded_piece(name, key)
        return None if found is None else decoded_piece(*found)

    def code_state(self, name: str, key: str, values: Tensor) -> bool:
        """Sets this rank's piece of a state that lies in codes; False where there is none.

        Args:
            name: of the parameter.
            key: the optimizer's name of the state.
            values: flat.
        """
        found = self._coded_piece(name, key)
        if found is not None:
            code_piece(*found, values)
        return found is not None

    def options(self) -> list[dict[str, Any]]:
        """Returns each group's hyperparameters that JSON can hold (lr, betas, weight_decay, ...)."""
        assert self.torch_optimizer is not None, "drive() was not called"
        return [
            {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple | None)}
            for group in self.torch_optimizer.param_groups
        ]

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Takes over hyperparameters that `options` returned, where the number of groups is the same."""
        assert self.torch_optimizer is not None, "drive() was not called"
        groups = self.torch_optimizer.param_groups
        if len(groups) == len(options):
            for group, saved in zip(groups, options, strict=True):
                # JSON has no tuples.
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in group})

    def tensors(self) -> list[Tensor]:
        """Returns every state tensor, and what they are views of, for memory reports."""
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            return list(self.torch_optimizer.state_tensors())
        housed = [] if self._housing is None or not self._is_housed else self._housing.buffers()
        states = [value for run in self._runs for value in self._state(run).values() if isinstance(value, Tensor)]
        return [*housed, *states]

    def _tensors(self) -> list[TensorInfo]:
        """Returns all tensors that are trained, whether or not this rank holds a piece of them."""
        return [
            TensorInfo(extent.name, extent.shape, group, owned.layout, extent.offset)
            for owned in self._ranges
            for extent, group in zip(owned.layout.extents, owned.groups, strict=True)
        ]

    def _step_runs(self, optimizer: optim.Optimizer, runs: Sequence[Run]) -> None:
        """Takes one step of these runs; the leaves of others have no gradient."""
        for run in runs:
            # A script's own optimizer.zero_grad() sets gradients to None; they are views and come back here.
            if run.param.grad is None:
                run.param.grad = run.grad
        if runs and self._housing is not None and not self._is_housed:
            self._first_step(optimizer, runs, self._housing)
        else:
            optimizer.step()

    def _first_step(self, optimizer: optim.Optimizer, runs: Sequence[Run], housing: Housing) -> None:
        """Takes the first step so that states lie where they belong, with torch's own values to the bit."""
        if isinstance(optimizer, optim.Adam | optim.AdamW):
            self._place_zeros(optimizer, runs, housing)
            optimizer.step()
        else:
            self._step_and_house(optimizer, runs, housing)
        self._is_housed = True

    def _step_through_window(self, optimizer: optim.Optimizer, factor: float) -> None:
        """Takes a step where the optimizer computes in another dtype; in the first one, states find their places."""
        housing = None if self._is_housed else self._housing
        if housing is None:
            step_range_by_range(self._runs, optimizer, factor=factor)
            return
        if isinstance(optimizer, optim.Adam | optim.AdamW):
            self._place_zeros(optimizer, self._runs, housing)
            step_range_by_range(self._runs, optimizer, factor=factor)
        else:
            step_range_by_range(self._runs, optimizer, factor=factor, after=lambda run: self._move_states(run, housing))
        self._is_housed = True

    def _place_zeros(self, optimizer: optim.Optimizer, runs: Sequence[Run], housing: Housing) -> None:
        """Gives Adam's states their places, zeroed as torch begins with them."""
        for run in runs:
            options = optimizer.param_groups[run.group]
            states = {name: housing.place(run.owned, name) for name in adam_state_names(options)}
            housed = {name: _part(run, flat) for name, flat in states.items() if flat is not None}
            optimizer.state[run.param] = {"step": adam_step_count(options, run.grad.device), **housed}

    def _step_and_house(self, optimizer: optim.Optimizer, runs: Sequence[Run], housing: Housing) -> None:
        """Takes the first step run by run, and moves the states that torch makes in it to where they belong.

        So no more than one run's states are there twice. Elementwise optimizers do the same for each run, whatever they
        do for others; leaves without a gradient are left out.
        """
        for run in runs:
            run.param.grad = None
        try:
            for run in runs:
                run.param.grad = run.grad
                optimizer.step()
                run.param.grad = None
                self._move_states(run, housing)
        finally:
            for run in runs:
                run.param.grad = run.grad

    def _move_states(self, run: Run, housing: Housing) -> None:
        """Moves the states that torch has made for a run to where they belong."""
        state = self._state(run)
        for name, value in state.items():
            if isinstance(value, Tensor) and is_elementwise(run, value) and value.dtype == run.grad.dtype:
                housed = housing.place(run.owned, name)
                state[name] = value if housed is None else _part(run, housed).copy_(value)

    def _refuse_foreign_step(self, *_: object) -> None:
        """A script's own `optimizer.step()` would update shards that no reduction has filled, and publish nothing."""
        if not self._stepping:
            raise ModelError(
                "optimizer.step: the engine takes the steps of this optimizer",
                hint="call engine.backward(loss) and engine.step() instead",
            )

    def _state(self, run: Run) -> dict[str, Any]:
        assert self.torch_optimizer is not None, "drive() was not called"
        return self.torch_optimizer.state.get(run.param, {})

    def _entries(self, run: Run, *, replicated: bool) -> Iterator[StateEntry]:
        state = self._state(run)
        yield from tensor_entries(run, state, replicated=replicated)
        for role, value in state.items():
            if isinstance(value, Tensor) and not is_elementwise(run, value) and not is_scales(role, state):
                for piece in run.pieces():
                    if piece.start == 0:
                        role_ = f"{_SCALAR}{role}"
                        yield StateEntry(piece.extent.name, role_, (), 0, 1, value.view(1), replicated)

    def _housed(self, run: Run, name: str) -> Tensor | None:
        """Returns a run's part of where a tensor of its state is housed; None where that was not foreseen."""
        housed = None if self._housing is None else self._housing.place(run.owned, name)
        if housed is None:
            return None
        before = sum(other.owned is run.owned and other.start < run.start for other in self._runs)
        return part_of_place(run, housed, self.form, self.form.part_of(name)[1], before=before)

    def _make_zeros(self, run: Run, name: str, state: dict[str, Any]) -> None:
        """Adds a state of zeros to a run's, where it belongs."""
        for number, part in enumerate(self.form.parts):
            dtype = run.grad.dtype if self.form is FP32_STATES else part.dtype
            housed = self._housed(run, name + part.suffix)
            numel = place_numel(run, self.form, number)
            fresh = torch.zeros(numel, dtype=dtype, device=run.grad.device) if housed is None else housed.zero_()
            state[name + part.suffix] = fresh
        codes = coded_state(run, state, name)
        if codes is not None:
            codes.clear()

    def _coded_piece(self, name: str, key: str) -> tuple[Run, ShardPiece, CodedState] | None:
        for run in self._runs:
            for piece in run.pieces():
                if piece.extent.name == name:
                    codes = coded_state(run, self._state(run), key)
                    return None if codes is None else (run, piece, codes)
        return None

    def _take_over_loaded(self) -> None:
        """Brings states that torch's `load_state_dict` has put into fp32 to where they belong, as they were saved."""
        assert self.torch_optimizer is not None, "drive() was not called"
        if self._housing is not None:
            self._housing.vacate()
        self._is_housed = True
        for run in self._runs:
            # They may be the very tensors that are to be set.
            loaded = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self._state(run).items()}
            state = {
                name: value
                for name, value in loaded.items()
                if not (is_elementwise(run, value) or is_scales(name, loaded))
            }
            for name in stored_states([name for name in loaded if name not in state]):
                self._make_zeros(run, name, state)
                copy_state(run, name, loaded, state)
            self.torch_optimizer.state[run.param] = state


def _part(run: Run, flat: Tensor) -> Tensor:
    """Returns the run's part of a buffer that is laid out as the owned range."""
    return flat.narrow(0, run.start - run.owned.start, run.grad.numel())


def _cut(run: Run, flat: Tensor) -> Iterator[tuple[ShardPiece, Tensor]]:
    """Yields the parts of parameters inside a run, with the view of `flat` (one value an element) for each."""
    for piece in run.owned.layout.pieces(run.start, run.start + flat.numel()):
        yield piece, flat.narrow(0, piece.shard_offset, piece.stop - piece.start)
