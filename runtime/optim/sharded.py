"""An optimizer over the owned ranges of all units: its leaves, and the steps it takes over them.

It neither reduces gradients nor publishes parameters. What it keeps for its leaves stands in `optim/states/placed.py`,
what a checkpoint has of that in `optim/states/saved.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim

from dsrun.errors import ModelError

from ..compat import foreach_mul
from ..memory.arenas import Arenas
from ..memory.host_pool import HostPool
from ..mesh.collectives import Collectives
from ..protocols import ChangeFence, OwnedRange
from .registry import adopt, check_range_by_range, check_rounded_states, states_of_group
from .states.coded import check_coded_parts
from .states.format import FP32_STATES, StateFormat
from .states.histories import Histories
from .states.lookup import answer_for_shards
from .states.option_values import kept_option
from .states.placed import PlacedStates
from .states.places import StatePlaces, house
from .states.saved import SavedStates
from .structure.base import StructuredOptimizer, TensorInfo
from .structure.runs import Run, cut_points, cut_run, cut_runs
from .windowed import step_range_by_range


class ShardOptimizer:
    """Updates the masters of every unit's owned range.

    Args:
        ranges: ranges that this rank owns, one for each unit.
        group_count: number of optimizer groups.
        axis: collectives of the ranks that the ranges are spread over; None where this rank owns everything.
        stays: flag for each range, whether it is stepped here although a step is taken elsewhere, see `begin_away`;
            None for no range.
        fence: fence at which changes wait while a checkpoint copies ranges, by their number; None for no fence.

    Attributes:
        torch_optimizer: torch optimizer that holds the leaves; None before `drive`.
        put_away: masters, states or sums are in host memory for a while, and must not be touched.
        histories: histories of the tensors: records of which steps have left them out.
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
        self._runs: list[Run] = []
        self._runs_of: dict[int, list[Run]] = {}
        self._set_runs([run for owned in ranges for run in cut_runs(owned)])
        self._left_out: frozenset[Run] = frozenset()
        self.histories = Histories()
        self._group_count = group_count
        self._axis = axis
        self.torch_optimizer: optim.Optimizer | None = None
        self.put_away = False
        self._states: PlacedStates | None = None
        self._saved: SavedStates | None = None
        self._stepping = False
        self._is_windowed = any(owned.window is not None for owned in ranges)

    @property
    def runs(self) -> Sequence[Run]:
        """Parts of the ranges that are in one group, in order."""
        return self._runs

    def runs_of(self, number: int) -> Sequence[Run]:
        """Returns the runs of a range, in order: one list for good, which changes where runs are cut."""
        return self._runs_of[id(self._ranges[number])]

    @property
    def left_out(self) -> Collection[Run]:
        """The runs that the present step leaves as they are."""
        return self._left_out

    @property
    def is_stepping(self) -> bool:
        """Whether the engine takes a step just now."""
        return self._stepping

    @property
    def states(self) -> PlacedStates:
        """What is kept for the runs; only of an optimizer that is driven."""
        assert self._states is not None, "drive() was not called"
        return self._states

    @property
    def saved(self) -> SavedStates:
        """What a checkpoint has of them; likewise."""
        assert self._saved is not None, "drive() was not called"
        return self._saved

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
        tensors = self._tensors()
        if isinstance(optimizer, StructuredOptimizer):
            self._set_runs([run for owned in self._ranges for run in cut_runs(owned, optimizer.kind_of)])
            adopt(optimizer, self.shards_by_group())
            optimizer.bind(self._runs, tensors, self._axis, device=self._ranges[0].seen_master.device)
        self.torch_optimizer = optimizer
        answer_for_shards(optimizer)
        self._states = PlacedStates(optimizer, self._runs)
        self._saved = SavedStates(self._states, tensors)
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

        Those of other optimizers stay where torch has put them, and so do those made with the optimizer (Adagrad's),
        unless they shall not stay in memory.

        Args:
            memory: arenas in which memory for the states is reserved.
            host: pool that makes the memory where masters lie in host memory apart from the device, except for ranges
                that stay; None otherwise.
            away: separate places for states where masters are not always in memory, except for ranges that stay; None
                otherwise.
            form: format of the stored states, whatever dtype the optimizer computes in.
            moves: ranges in host memory may come to the device later, see `take_over`.

        Raises:
            ModelError: the optimizer's states cannot lie so.
        """
        states, optimizer = self.states, self.states.optimizer
        if form is not FP32_STATES:
            check_rounded_states(optimizer, form.name)
            check_coded_parts(form, self._tensors())
            states.form = form
        if form is not FP32_STATES or away is not None:
            states.take_loaded(self._wait_for_copies)
        if optimizer.state and away is None:
            return
        of_group = [states_of_group(optimizer, group) for group in optimizer.param_groups]
        counts = [(owned, max((of_group[group] for group in owned.groups), default=0)) for owned in self._ranges]
        if any(count for _, count in counts):
            states.housing = house(counts, memory, host, away=away, staying=self._staying, form=form, moves=moves)
            if optimizer.state:
                for run in self._runs:
                    states.move_in(run)
                states.end_first_step()

    def step(self, factor: float = 1.0, unused: Collection[str] = ()) -> float:
        """Takes one optimizer step on the local ranges.

        Args:
            factor: gradients are multiplied by it first, in the dtype the optimizer computes in.
            unused: tensors that no rank has a gradient of, which are left as they are; the same on every rank.

        Returns:
            what the sums are still to be multiplied by to be the gradients that were used.
        """
        states = self.states
        self._wait_for_copies()
        self._leave_out(unused)
        self._stepping = True
        try:
            if self._is_windowed:
                self._step_through_window(states, factor)
                return factor
            if factor != 1:
                foreach_mul([owned.grad_sum for owned in self._ranges], factor)
            self._step_runs(states, self._runs)
            return 1.0
        finally:
            self._stepping = False
            self.saved.has_begun = True

    # Where the step is taken elsewhere, run by run --------------------------------------------------------------------

    def begin_away(self, factor: float = 1.0, unused: Collection[str] = ()) -> list[dict[str, Any]]:
        """Begins a step that others take, and takes it for the ranges that stay, if any do.

        Runs what hangs on the optimizer's own `step`, which finds no gradients of the others: hooks of scripts and
        profilers, and the mark by which a schedule knows that it comes after a step.

        Args:
            factor: gradients of the ranges that stay are multiplied by it first.
            unused: names of tensors that no rank has a gradient of, see `step`; the code that steps the others must use
                `left_out`, too.

        Returns:
            each group's options, as the optimizer's own code would find them: behind all hooks, before it counts.
            Those that are tensors are copies, for a schedule may write into them while the others step.
        """
        states = self.states
        self._leave_out(unused)
        for run in self._runs:
            run.param.grad = None
        options: list[dict[str, Any]] = []

        def note(optimizer: optim.Optimizer, *_: object) -> None:
            if not options:  # a first step may come in parts
                for group in optimizer.param_groups:
                    options.append({key: kept_option(value) for key, value in group.items() if key != "params"})

        if self._staying:
            self._wait_for_copies()
        last_hook = states.optimizer.register_step_pre_hook(note)
        self._stepping = True
        try:
            if factor != 1 and self._staying:
                foreach_mul([owned.grad_sum for owned in self._staying], factor)
            stay = {id(owned) for owned in self._staying}
            self._step_runs(states, [run for run in self._runs if id(run.owned) in stay])
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
            memory: arenas in which places for the ranges' states are reserved.
            copy: copies a state, its first argument, from host memory to the device.
        """
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
        self.states.move_here(ranges, memory, copy)
        self._staying += ranges

    def end_away(self, changed: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes over options that the step has set anew, by group; states are housed from here on."""
        for group, options in changed.items():
            self.states.optimizer.param_groups[group].update(options)
        self.states.end_first_step()
        self.saved.has_begun = True

    # ------------------------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Returns every state tensor, and what they are views of, for memory reports."""
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            return list(self.torch_optimizer.state_tensors())
        return self.states.tensors()

    def _tensors(self) -> list[TensorInfo]:
        """Returns all tensors that are trained, whether or not this rank holds a piece of them."""
        return [
            TensorInfo(
                extent.name,
                extent.shape,
                group,
                owned.layout,
                extent.offset,
                extent.whole,
                owned.ranks,
                owned.over_stages,
            )
            for owned in self._ranges
            for extent, group in zip(owned.layout.extents, owned.groups, strict=True)
        ]

    def _wait_for_copies(self) -> None:
        if self._fence is not None:
            self._fence.wait_all()

    def _set_runs(self, runs: list[Run]) -> None:
        self._runs = runs
        self._runs_of = {id(owned): [run for run in runs if run.owned is owned] for owned in self._ranges}

    def _leave_out(self, names: Collection[str]) -> None:
        """The step that begins leaves these tensors as they are, see [Note: one history]."""
        if names and self.histories.leave_out(names):
            self.cut(self.histories.of)
        self._left_out = frozenset(run for run in self._runs if run.first_name in names) if names else frozenset()
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            self.torch_optimizer.leave_out(names, self.histories.missed())

    def cut(self, history_of: Callable[[str], int]) -> None:
        """Cuts runs for good, and what is kept for them, so that the tensors of each share a history; between steps.

        Args:
            history_of: function that returns the number of a tensor's history by its name; see `Histories`.
        """
        self._wait_for_copies()
        for run in list(self._runs):
            points = cut_points(run, history_of)
            if points:
                self._replace(run, cut_run(run, points))

    def cut_as(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Cuts runs for states that are to be loaded.

        Args:
            saved: histories of the tensors, as `Histories.to_json` returned them.
        """
        histories = Histories()
        histories.load(saved)
        self.cut(histories.of)

    def take_histories(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from histories that `cut_as` was given."""
        self.histories.load(saved)
        if isinstance(self.torch_optimizer, StructuredOptimizer):
            self.torch_optimizer.leave_out((), self.histories.missed())

    def _replace(self, run: Run, parts: Sequence[Run]) -> None:
        for runs in (self._runs, self._runs_of[id(run.owned)]):
            at = runs.index(run)
            runs[at : at + 1] = parts
        leaves: list[nn.Parameter] = self.states.optimizer.param_groups[run.group]["params"]
        at = next(number for number, leaf in enumerate(leaves) if leaf is run.param)
        leaves[at : at + 1] = [part.param for part in parts]
        self.states.cut(run, parts)

    def _step_runs(self, states: PlacedStates, runs: Sequence[Run]) -> None:
        """Takes one step of these runs; the leaves of others have no gradient."""
        for run in runs:
            # A script's own optimizer.zero_grad() sets gradients to None; they are views and come back here.
            if run in self._left_out:
                run.param.grad = None
            elif run.param.grad is None:
                run.param.grad = run.grad
        first = self._first_steps(states, runs)
        others = runs
        if first and isinstance(states.optimizer, optim.Adam | optim.AdamW):
            states.place_adam_zeros(first)
        elif first:
            others = self._step_and_house(states, [run for run in runs if run not in self._left_out], first)
        if others or not first:
            states.optimizer.step()
        for run in first:
            if run not in self._left_out:
                run.param.grad = run.grad
        self._end_first_steps(states, runs, first)

    def _step_through_window(self, states: PlacedStates, factor: float) -> None:
        """Takes a step where the optimizer computes in another dtype; in the first one, states find their places."""
        runs = [run for run in self._runs if run not in self._left_out]
        for run in self._left_out:
            run.param.grad = None
        first = self._first_steps(states, self._runs)
        if first and isinstance(states.optimizer, optim.Adam | optim.AdamW):
            states.place_adam_zeros(first)
        elif first:
            step_range_by_range([r for r in runs if r in first], states.optimizer, factor=factor, after=states.move_in)
            runs = [run for run in runs if run not in first]
        step_range_by_range(runs, states.optimizer, factor=factor)
        self._end_first_steps(states, self._runs, first)

    def _first_steps(self, states: PlacedStates, runs: Sequence[Run]) -> Collection[Run]:
        """Returns the runs of which this step is the first, where states have places that are still empty."""
        if runs and states.waits_for_places:
            return set(runs) - self._left_out
        if not states.late:
            return ()
        return {run for run in runs if run in states.late and run not in self._left_out}

    def _end_first_steps(self, states: PlacedStates, runs: Sequence[Run], first: Collection[Run]) -> None:
        if runs and states.waits_for_places:
            states.late = set(runs) - set(first)
            states.end_first_step()
        elif states.late:
            states.late -= set(first)

    def _step_and_house(self, states: PlacedStates, runs: Sequence[Run], first: Collection[Run]) -> list[Run]:
        """Takes first steps run by run, and moves the states that torch makes in them to where they belong.

        So no more than one run's states are there twice. Elementwise optimizers do the same for each run, whatever they
        do for others; leaves without a gradient are left out.

        Args:
            states: states of the runs.
            runs: runs that this step updates.
            first: those of them whose first step this is.

        Returns:
            the others, which alone have their gradients now.
        """
        for run in runs:
            run.param.grad = None
        others: list[Run] = []
        for run in runs:
            if run not in first:
                others.append(run)
                continue
            run.param.grad = run.grad
            states.optimizer.step()
            run.param.grad = None
            states.move_in(run)
        for run in others:
            run.param.grad = run.grad
        return others

    def _refuse_foreign_step(self, *_: object) -> None:
        """A script's own `optimizer.step()` would update shards that no reduction has filled, and publish nothing."""
        if not self._stepping:
            raise ModelError(
                "optimizer.step: the engine takes the steps of this optimizer",
                hint="call engine.backward(loss) and engine.step() instead",
            )
