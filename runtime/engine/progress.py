"""How far training has come: what was counted, and where in the global batch a rank is. Runs nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from weakref import ref

from dsrun.config.batch import BatchSizes

from .step import StepResult


@dataclass(slots=True)
class Counters:
    """How far training has come.

    Attributes:
        micro_steps: calls of `step`.
        global_steps: optimizer steps, skipped ones included.
        global_samples: samples of all ranks in those steps.
        skipped_steps: steps whose update was left out because a gradient was not finite.
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    def to_json(self) -> dict[str, int]:
        """Returns the counters by name."""
        return asdict(self)

    def load(self, values: dict[str, Any]) -> None:
        """Takes over what `to_json` returned."""
        for name in self.to_json():
            setattr(self, name, int(values[name]))


class BatchAnswers(Protocol):
    """What an engine answers of its batch; a script may have put functions of its own in the place of these."""

    def gradient_accumulation_steps(self) -> int:
        """Returns the micro steps in one optimizer step."""
        ...

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the next `step` updates the parameters."""
        ...

    def train_batch_size(self) -> int:
        """Returns the samples of all ranks in one optimizer step."""
        ...

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the samples of one rank in one forward."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Progress:
    """Place in training of a rank, which the components of an engine that count share.

    Attributes:
        engine: Engine whose answers count, see `BatchAnswers`; it is not kept alive.
        batch: Micro batch, accumulation steps and their product with the ranks.
        counts_micro_steps: Whether the engine finds the end of a global batch itself; the config's
            `managed_gradient_accumulation`.
        counters: Totals since the first step, which a checkpoint keeps.
        micro_steps_done: Micro steps of the present global batch. A count of all of them would not survive a change of
            the accumulation steps.
        boundary: Answer that the script has given to whether the next step updates; None: the count of micro steps.
        open_no_sync: Number of `no_sync` contexts that are open.
        in_step: Whether `step` is running.
        backward_done: Whether there was a backward since the last `step`.
        backwards: Number of backwards since the last update.
        last: Result of the last optimizer step; None before the first one.
        step_applied: Whether the last `step` changed the parameters.
    """

    engine: ref[BatchAnswers]
    batch: BatchSizes
    counts_micro_steps: bool = True
    counters: Counters = field(default_factory=Counters)
    micro_steps_done: int = 0
    boundary: bool | None = None
    open_no_sync: int = 0
    in_step: bool = False
    backward_done: bool = False
    backwards: int = 0
    last: StepResult | None = None
    step_applied: bool = False

    @property
    def answers(self) -> BatchAnswers:
        """The engine, as scripts ask it of its batch."""
        engine = self.engine()
        assert engine is not None, "components work for an engine that is there"
        return engine

    def is_boundary(self) -> bool:
        """Whether the next `step` updates the parameters, by what was counted."""
        if self.open_no_sync:
            return False
        if not self.counts_micro_steps:
            return self.in_step
        if self.boundary is not None:
            return self.boundary
        return self.micro_steps_done + 1 >= self.answers.gradient_accumulation_steps()

    @property
    def present_step(self) -> tuple[int, int]:
        """The optimizer step and the micro step that come next, from 1."""
        return self.counters.global_steps + 1, self.micro_steps_done + 1

    def restart_batch(self) -> None:
        """Begins the global batch again, as after a checkpoint was loaded."""
        self.micro_steps_done = 0
        self.backward_done = False
        self.backwards = 0
