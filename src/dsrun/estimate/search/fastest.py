"""The fastest settings that fit, found by the best bound first: what cannot be the fastest is never priced."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count

from dsrun.estimate.model.units import ModelSize
from dsrun.estimate.prediction import Prediction, predict
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.search.bounds import least_bytes, least_compute_seconds, least_stretch
from dsrun.estimate.search.changes import (
    EVERYTHING,
    RECOMPUTATIONS,
    Choice,
    Free,
    changes,
    offloads,
    recomputation_of,
    rounded,
    stage_in,
    stages_of_zero,
    takes_offload,
    with_offload,
    with_recomputation,
    with_samples,
)
from dsrun.estimate.search.layouts import divisors, layouts

#: How much faster an offloaded step has to be: floors take its transfers for hidden, and the update beside backward.
_OFFLOAD_MARGIN = 1.1
#: (rounded seconds, then what is preferred of equals).
_Order = tuple[float, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Settings on their way through the search.

    Attributes:
        settings: the settings.
        seconds: seconds that a step takes at least, with these settings and with all that needs more memory.
        steps: position among what is offloaded, and among what is recomputed.
        prediction: prediction that says that they fit; None: they are not priced yet.
        is_exact: whether a pipeline's schedule was simulated for it; else its formula has told what ranks wait.
    """

    settings: RunSettings
    seconds: float
    steps: tuple[int, int]
    prediction: Prediction | None = None
    is_exact: bool = False

    @property
    def order(self) -> _Order:
        chosen = self.settings
        return (
            rounded(self.seconds * (_OFFLOAD_MARGIN if self.steps[0] else 1.0)),
            *self.steps,
            chosen.stages,
            chosen.tensor_parallel,
            chosen.chunks_per_rank,
            chosen.stage,
            -chosen.micro_batch,
        )


def fastest(
    model: ModelSize,
    settings: RunSettings,
    machine: Machine,
    *,
    free: Collection[Free] = EVERYTHING,
    accepts: Callable[[RunSettings], bool] | None = None,
    samples: int | None = None,
) -> Choice | None:
    """Returns the fastest settings that fit and that this version runs; None where there are none.

    Samples of an optimizer step stay as they are. Speeds that are not known are taken for cautious ones in choosing,
    and told without. Of equals, the least offloaded, the least recomputed, fewer pipeline stages, fewer ranks that
    share a layer, the lower ZeRO stage and the larger micro batch. Offloading is tried where the memory that it needs
    is known, and of settings that do not fit without; it has to be a tenth faster than what needs none. Ranks that
    share a layer are on one host unless nothing else fits. What the search leaves out is told in
    docs/internals/plan.md.

    Args:
        model: the model.
        settings: settings that are asked about.
        machine: machine to train on.
        free: parts of the settings that may differ.
        accepts: function that tells whether a config can say these settings; None accepts all.
        samples: samples of an optimizer step; None: as many as the settings have.
    """
    search = _Search(model, settings, machine.with_cautious_speeds(), frozenset(free), samples)
    best = search.run(accepts, over_hosts=False)
    if best is None and "tensor" in free and machine.hosts > 1:
        best = search.run(accepts, over_hosts=True)
    if best is None:
        return None
    differs = changes(settings, best.settings, ranks=machine.ranks, asked_ranks=machine.ranks)
    return Choice(predict(model, best.settings, machine), tuple(differs))


class _Search:
    """What one search knows: bounds of its model on its machine, and what has been found not to fit."""

    def __init__(
        self, model: ModelSize, settings: RunSettings, machine: Machine, free: frozenset[Free], samples: int | None
    ) -> None:
        self.model, self.asked, self.machine, self.free = model, settings, machine, free
        asked = settings.micro_batch * settings.accumulation_steps * settings.ranks_of("batch", machine.ranks)
        self.samples = asked if samples is None else samples
        self.offloads = offloads(machine) if "offload" in free else ()
        is_listed = recomputation_of(settings) in RECOMPUTATIONS
        self.recomputations = RECOMPUTATIONS if "recompute" in free and is_listed else ()
        self.compute = least_compute_seconds(model, settings, machine) * self.samples / asked
        #: By all that may differ but the batch: the smallest micro batch that has been found not to fit.
        self.too_large: dict[tuple[object, ...], int] = {}

    def run(self, accepts: Callable[[RunSettings], bool] | None, *, over_hosts: bool) -> Prediction | None:
        """Returns the prediction for the best settings."""
        numbers = count()  # of equals, the one that was there first
        waiting = [(one.order, next(numbers), one) for one in self._first(over_hosts)]
        heapq.heapify(waiting)
        while waiting:
            _, _, candidate = heapq.heappop(waiting)
            if candidate.prediction is None:
                following = self._next(candidate)
            elif accepts is not None and not accepts(candidate.settings):
                continue
            elif candidate.is_exact:
                return candidate.prediction
            else:
                following = self._simulated(candidate)
            for one in following:
                heapq.heappush(waiting, (one.order, next(numbers), one))
        return None

    def _first(self, over_hosts: bool) -> Iterator[_Candidate]:
        """Yields every layout, stage and micro batch, with nothing offloaded and nothing recomputed."""
        base = with_offload(self.asked, *self.offloads[0]) if self.offloads else self.asked
        base = with_recomputation(base, self.recomputations[0]) if self.recomputations else base
        for layout in layouts(self.model, base, self.machine, free=self.free, over_hosts=over_hosts):
            each = self.samples // layout.ranks_of("batch", self.machine.ranks)
            for micro in divisors(each) if "batch" in self.free and each else [self.asked.micro_batch]:
                cut = with_samples(layout, self.samples, micro, self.machine)
                if cut is None:
                    continue
                seconds = self.compute * least_stretch(cut)
                for stage in stages_of_zero(cut) if "stage" in self.free else [stage_in(cut, cut.stage)]:
                    if takes_offload(made := replace(cut, stage=stage), cut.offload_optimizer, cut.offload_param):
                        yield _Candidate(made, seconds, (0, 0))

    def _next(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """Yields the settings with their price, if they fit, else those that need less memory and more time."""
        settings, seconds = candidate.settings, candidate.seconds
        layout = (settings.stages, settings.tensor_parallel, settings.schedule, settings.chunks_per_rank)
        # With one micro batch an update, nothing has to be summed up, which takes memory where states are elsewhere.
        sums_up = settings.accumulation_steps > 1
        alike = (*layout, settings.partition, settings.stage, candidate.steps, sums_up)
        smaller = settings.micro_batch < self.too_large.get(alike, settings.micro_batch + 1)
        if smaller and self._may_fit(settings):
            prediction = predict(self.model, settings, self.machine, exact=False)
            # By its floor alone, an update in host memory beside the backward would be faster than one on the GPU.
            seconds = max(seconds, prediction.step.seconds or 0.0)
            if prediction.fits is not False:
                if settings.can_run:
                    yield replace(candidate, seconds=seconds, prediction=prediction)
                return
            self.too_large[alike] = settings.micro_batch  # a larger one holds no less
        offloaded, recomputed = candidate.steps
        if recomputed + 1 < len(self.recomputations):
            changed = with_recomputation(settings, self.recomputations[recomputed + 1])
            yield _Candidate(changed, seconds, (offloaded, recomputed + 1))
        for more in range(offloaded + 1, len(self.offloads)) if recomputed == 0 else ():
            if takes_offload(settings, *self.offloads[more]):
                yield _Candidate(with_offload(settings, *self.offloads[more]), seconds, (more, 0))
                return

    def _simulated(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """Yields the settings with what a simulation of their pipeline says: its formula takes chunks for even."""
        prediction = predict(self.model, candidate.settings, self.machine)
        if prediction.fits is not False:
            seconds = prediction.step.seconds or candidate.seconds
            yield replace(candidate, seconds=seconds, prediction=prediction, is_exact=True)

    def _may_fit(self, settings: RunSettings) -> bool:
        limit = self.machine.gpu_memory_bytes
        return limit is None or least_bytes(self.model, settings, self.machine) <= limit
