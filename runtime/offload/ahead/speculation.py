"""Steps that are taken during backward, before the norm says whether they count.

Ranges are stepped here as soon as their last gradient is on the host; `offload/step/cpu_optimizer.py` steps all others,
and sends parameters away. Where what is written lies meanwhile: `double_buffer.py`.

[Note: a step ahead]
Most steps of most runs neither clip nor overflow: their gradients are multiplied by one over the loss scale, which is
known when the last backward begins. So a range is stepped on that assumption, out of place. Nothing that anybody can
see has changed until the norm is known. If what was assumed is what came, the two sets change places. If not (clipping,
a norm that is not finite, options or states that a script has set in between, a backward that failed), the range is
stepped again from where it was, with the bits of a step that was never taken ahead.
Each range is judged by itself: what was not stepped in time is stepped in place, in the order of the next forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...optim.sharded import ShardOptimizer
from ...optim.structure.runs import Run
from ..host_gradients import HostGradients
from ..states.host_range import HostRange, part_of
from ..states.range_work import BlockStep, RangeWork
from .double_buffer import DoubleBuffer
from .step_inputs import RunBefore, kept_options, kept_scalars, run_before, same, taken_over

#: Why a step that was begun ahead was taken again.
Reason = Literal["clipped", "not finite", "options changed", "interrupted"]
#: Steps that are looked back on, and how many of them may be for nothing before somebody is told.
_WINDOW, _MOST = 50, 25


@dataclass(frozen=True, slots=True)
class AheadCounts:
    """What came of the steps that were begun during backward.

    Attributes:
        accepted: steps of which what was stepped ahead counts.
        redone: steps that were taken again, by why.
        elements_ahead: elements whose update was computed before the norm was known, and counts.
        elements_behind: number of elements in the accepted steps that were not stepped in time.
        last_share: share of the last step's elements that were stepped ahead, and count.
    """

    accepted: int
    redone: Mapping[Reason, int]
    elements_ahead: int
    elements_behind: int
    last_share: float


@dataclass(frozen=True, slots=True)
class _Assumption:
    """What a step is taken with."""

    coefficient: float
    options: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class RangeAhead:
    """A range that was stepped ahead: for each run what it was stepped from, and the work that was done."""

    runs: Sequence[tuple[Run, RunBefore, RangeWork]]


class Speculation:
    """See [Note: a step ahead]. All but `adopt` is called by the thread that trains.

    Args:
        ranges: ranges of all units, by their number.
        optimizer: optimizer that has the ranges' options and states.
        gradients: gradients in host memory, which tell when they have come.
        steps: object that steps a range.
        second: second set of memory that ranges are stepped to ahead of time.
        submit: function that gives work to the thread that steps, behind all that it already has.
        say: function that prints a warning where most of the last steps ahead were for nothing.
    """

    def __init__(
        self,
        ranges: Sequence[HostRange],
        optimizer: ShardOptimizer,
        gradients: HostGradients,
        steps: BlockStep,
        second: DoubleBuffer,
        *,
        submit: Callable[[Callable[[], RangeAhead]], Future[RangeAhead]],
        say: Callable[[str], None],
    ) -> None:
        self._ranges = ranges
        self._optimizer = optimizer
        self._gradients = gradients
        self._steps = steps
        self._second = second
        self._submit = submit
        self._say = say
        self._assumption: _Assumption | None = None
        self._futures: dict[int, Future[RangeAhead]] = {}
        self._last: deque[bool] = deque(maxlen=_WINDOW)
        self._accepted = 0
        self._redone: dict[Reason, int] = {}
        self._elements = [0, 0]
        self._last_share = 0.0
        gradients.listener = self

    def counts(self) -> AheadCounts:
        """Returns what came of all steps so far."""
        ahead, behind = self._elements
        return AheadCounts(self._accepted, dict(self._redone), ahead, behind, self._last_share)

    def buffers(self) -> list[Tensor]:
        """Returns the memory that it takes."""
        return self._second.buffers()

    def assume(self, coefficient: float | None) -> None:
        """A backward begins: what gradients will be multiplied by, if it is the last of its step and all goes well."""
        self.give_up("interrupted")
        self._gradients.is_last = coefficient is not None
        if coefficient is not None:
            self._assumption = _Assumption(coefficient, kept_options(_options_of(self._optimizer)))

    def arrives(self, index: int) -> None:
        """A range's last gradient is on its way to the host."""
        if self._assumption is not None:
            assumption = self._assumption
            self._futures[index] = self._submit(partial(self._step, index, assumption))

    def changes(self, index: int) -> None:
        """A range's gradient is about to change: returns when nothing reads it."""
        future = self._futures.pop(index, None)
        if future is not None and not future.cancel():
            wait([future])

    def give_up(self, reason: Reason) -> None:
        """What was stepped ahead does not count; returns when nothing reads gradients or states any more."""
        assumption, self._assumption = self._assumption, None
        self._last_share = 0.0
        self._gradients.is_last = False
        if assumption is not None and self._futures:
            self._note(reason)
        for index in list(self._futures):
            self.changes(index)

    def spare(self, indices: Sequence[int]) -> None:
        """Parameters of these ranges are to be left as they are: what was stepped ahead of theirs does not count."""
        for index in indices:
            self.changes(index)

    def judge(self, coefficient: float, options: Sequence[dict[str, Any]]) -> dict[int, Future[RangeAhead]]:
        """The norm is known: returns the ranges whose step is taken, or under way, and counts.

        Args:
            coefficient: gradients are multiplied by it.
            options: options of each group, as the step begins.
        """
        assumption = self._assumption
        self._last_share = 0.0
        if assumption is None:
            return {}
        self._assumption = None
        self._gradients.is_last = False
        # What has not begun is stepped in place, in a better order, and what is under way ends before that begins.
        found = {index: future for index, future in self._futures.items() if not future.cancel()}
        began, self._futures = bool(self._futures), {}
        if coefficient != assumption.coefficient or not same(assumption.options, options):
            if began:
                self._note("clipped" if coefficient != assumption.coefficient else "options changed")
            return {}
        ahead = sum(self._ranges[index].numel for index in found)
        total = sum(item.numel for item in self._ranges)
        self._elements[0] += ahead
        self._elements[1] += total - ahead
        self._last_share = ahead / total
        self._note(None)
        return found

    def adopt(self, index: int, ahead: RangeAhead) -> dict[int, dict[str, Any]] | None:
        """Lets a range's step count; in the thread that steps.

        Args:
            index: number of the range.
            ahead: result of the range's step ahead.

        Returns:
            options that the step has set anew, by group. None where somebody has set masters or states since: nothing
            has changed then, and the range is to be stepped again.
        """
        item = self._ranges[index]
        if any(not before.is_now(item, run, self._optimizer) for run, before, _ in ahead.runs):
            return None
        self._second.exchange(index)
        changed: dict[int, dict[str, Any]] = {}
        for run, before, work in ahead.runs:
            states: dict[str, Tensor] = {}
            for name, then in work.states.items():
                states[name] = then
                if name in before.states:
                    states[name] = before.states[name][0]
                    states[name].data = then
            now = self._optimizer.states.split(run)[1]
            scalars = {name: taken_over(now.get(name), value) for name, value in work.scalars.items()}
            self._optimizer.states.keep(run, states, scalars)
            changed.setdefault(run.group, {}).update(work.changed)
        return changed

    @torch.no_grad()
    def _step(self, index: int, assumption: _Assumption) -> RangeAhead:
        """Steps a range out of place; in the thread that steps."""
        item = self._ranges[index]
        gradient = self._gradients.fetch(index)
        out_N = self._second.parameters(index)
        done: list[tuple[Run, RunBefore, RangeWork]] = []
        for run in item.runs:
            states, scalars = self._optimizer.states.split(run)
            before = run_before(item, run, states, scalars, self._optimizer)
            master_N = part_of(run, self._second.master(index))
            targets = {name: self._second.state(run, name, now_N) for name, now_N in states.items()}
            work = RangeWork(
                master_N=master_N,
                grads_N=part_of(run, gradient.values_N),
                states=dict(targets),
                scalars=kept_scalars(scalars, self._optimizer),
                options=kept_options([assumption.options[run.group]])[0],
                grad_scale=assumption.coefficient * gradient.factor,
                params_out_N=None if out_N is None else part_of(run, out_N),
                place=partial(self._optimizer.states.place, run),
                origins=[(master_N, run.param.data), *((targets[name], states[name]) for name in states)],
            )
            self._steps.step(work)
            done.append((run, before, work))
        if out_N is not None:
            out_N[item.end :].zero_()
        return RangeAhead(done)

    def _note(self, reason: Reason | None) -> None:
        self._last.append(reason is not None)
        if reason is None:
            self._accepted += 1
            return
        self._redone[reason] = self._redone.get(reason, 0) + 1
        if len(self._last) == _WINDOW and sum(self._last) > _MOST:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self._redone.items())
            self._say(
                f"dsrun: `offload_optimizer.super_offload`: {sum(self._last)} of the last {_WINDOW} steps were taken "
                f"ahead for nothing and then again (in all: {reasons}). Turn it off, or raise `gradient_clipping` if "
                "that acts more often than it should."
            )
            self._last.clear()


def _options_of(optimizer: ShardOptimizer) -> list[dict[str, Any]]:
    assert optimizer.torch_optimizer is not None, "ranges are stepped for one"
    groups = optimizer.torch_optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]
