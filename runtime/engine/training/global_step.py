"""An optimizer step with all that goes by it: loss scale, schedule, counters, the report. Its arithmetic: `step.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...memory.arenas import Arenas
from ...mesh.join.groups import ProcessGroupMesh
from ...observe.flops.step_flops import StepFlops
from ...observe.flops.step_profile import StepProfile
from ...observe.memory_watch import MemoryWatch
from ...observe.peaks import PeakSummary
from ...trace_labels import labelled
from ..memory_queries import MemoryQueries
from ..model.guard import ModelGuard
from ..model.ownership import note_outcome
from ..progress import Progress
from ..report import StepReport
from ..step import StepParts, take_step
from ..update import Update
from ..watchers import StepWatcher


class GlobalSteps:
    """Takes optimizer steps; every rank must call.

    Args:
        mesh: Ranks, with the place in training that they tell each other.
        step: Units, reducer and optimizer that a step works on.
        update: Schedule, loss scale and clipping.
        progress: Counters.
        guard: Guard of the model, which is asked before each update.
        arenas: Arenas of the long-lived buffers, which are made dense between steps.
        memory: Bytes that this rank holds, by owner.
        memory_watch: Sampler of memory during a step.
        peaks: Summary of the peaks of memory.
        report: Report of each step.
        flops: Counter of the operations of forwards; None for none.
        profile: Table of one step's arithmetic.
        watchers: Watchers of each step, told once it is over.
    """

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        step: StepParts,
        update: Update,
        progress: Progress,
        *,
        guard: ModelGuard,
        arenas: Arenas,
        memory: MemoryQueries,
        memory_watch: MemoryWatch,
        peaks: PeakSummary,
        report: StepReport,
        flops: StepFlops | None,
        profile: StepProfile,
        watchers: Sequence[StepWatcher],
    ) -> None:
        self._mesh = mesh
        self._step = step
        self._update = update
        self._progress = progress
        self._guard = guard
        self._arenas = arenas
        self._memory = memory
        self._memory_watch = memory_watch
        self._peaks = peaks
        self._report = report
        self._flops = flops
        self._profile = profile
        self._watchers = watchers

    def take(self, lr_kwargs: Mapping[str, Any] | None, *, stop_request: Callable[[], float]) -> None:
        """Updates the parameters from the accumulated gradients, and tells those who watch.

        Args:
            lr_kwargs: Arguments of the schedule's `step`; None: the script steps the schedule itself.
            stop_request: Function that returns the number by which this rank tells the others of a signal, see
                `stop_signals`.

        Raises:
            ModelError: the model is not what the engine took over, or ranks have gathered different units.
        """
        with labelled("step"):
            self._take(lr_kwargs, stop_request)
        for watcher in self._watchers:
            watcher.end_step(self._progress.counters.global_steps)

    def _take(self, lr_kwargs: Mapping[str, Any] | None, stop_request: Callable[[], float]) -> None:
        step, update, progress = self._step, self._update, self._progress
        self._guard.check()
        step.writes.take_over()
        if self._flops is not None:
            self._report.add_flops(*self._flops.take_step())
        if number := stop_request():
            self._report.add_stop_request(number)
        result = take_step(
            step,
            at=str(self._mesh.where),
            numbers_N=self._report.numbers.values_N(),
            clipping=update.clipping,
            skip_non_finite=update.skip_non_finite,
            loss_scale=update.loss_scale.value,
        )
        # Between steps nothing is under way: buffers that have come and gone leave no holes.
        self._arenas.compact()
        progress.last = result
        progress.step_applied = result.applied
        update.loss_scale.follow(overflow=not result.applied, at=str(self._mesh.where), what=result.trouble)
        note_outcome(update.optimizer, overflow=not result.applied, loss_scale=update.loss_scale.value)
        lr = update.learning_rates()
        if result.applied:
            if update.scheduler is not None and lr_kwargs is not None:
                advance: Any = update.scheduler.step
                advance(**lr_kwargs)
        else:
            progress.counters.skipped_steps += 1
        progress.counters.global_steps += 1
        samples = self._samples()
        progress.backwards = 0
        progress.counters.global_samples += samples
        self._report.step(result, progress.counters, lr=lr, samples=samples, next_scale=update.loss_scale.value)
        self._profile.end_step(progress.counters.global_steps - 1, samples=samples)
        if result.applied and self._peaks.wants_state:
            self._peaks.take_state(self._memory.state_bytes())
        self._memory_watch.end_step(progress.counters.global_steps, self._memory.kinds)

    def _samples(self) -> int:
        """Returns the samples of all ranks in the step that was just taken."""
        answers, progress = self._progress.answers, self._progress
        if progress.counts_micro_steps:
            return answers.train_batch_size()
        return answers.train_micro_batch_size_per_gpu() * self._mesh.batch.size * progress.backwards
