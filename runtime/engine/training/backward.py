"""One backward of the engine's model, whoever runs it: what comes before and after it, and what a loss must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.errors import ModelError

from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.step_position import at_step
from ...observe.memory_watch import MemoryWatch
from ...observe.steps.tokens import named_input
from ...trace_labels import labelled
from ...zero.hooks.modules import UnitHooks
from ...zero.hooks.unit_calls import engines_own_backward
from ..memory_queries import MemoryQueries
from ..model.guard import ModelGuard
from ..progress import Progress
from ..report import StepReport
from ..step import StepParts
from ..update import Update
from .first_loss import never_gathered_reads


class Backwards:
    """Runs backwards, and counts those that a script runs.

    Args:
        mesh: Ranks, with the place in training that they tell each other.
        step: Units, reducer and update that a backward works on.
        hooks: Hooks of the units.
        update: The loss scale, and whether nan leaves an update out.
        progress: Place in the global batch of this rank.
        guard: Guard of the model, which finds parameters that have been moved.
        memory: Bytes that this rank holds, by owner.
        memory_watch: Sampler of memory during a step.
        report: Sum of the losses of a step.
        heartbeat: Writer of what this rank does, for the launcher that watches it.

    Attributes:
        phase: Name of what this rank does in a backward, for the launcher; under stages with its micro batch.
    """

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        step: StepParts,
        hooks: UnitHooks,
        update: Update,
        progress: Progress,
        *,
        guard: ModelGuard,
        memory: MemoryQueries,
        memory_watch: MemoryWatch,
        report: StepReport,
        heartbeat: HeartbeatWriter,
    ) -> None:
        self._mesh = mesh
        self._step = step
        self._hooks = hooks
        self._update = update
        self._progress = progress
        self._guard = guard
        self._memory = memory
        self._memory_watch = memory_watch
        self._report = report
        self._heartbeat = heartbeat
        self.phase = "backward"
        self._forwards = 0  # that train, since the last backward
        self._usual_forwards = 0  # before the first one

    @property
    def needs_scaler(self) -> bool:
        """Whether losses have to be multiplied by a loss scale."""
        return self._update.loss_scale.is_dynamic or self._update.loss_scale.value != 1.0

    @property
    def loss_scale(self) -> float:
        """Factor of a loss before its backward."""
        return self._update.loss_scale.value

    def stray_factor(self) -> float | None:
        """Returns the factor that makes a gradient of the script's own like one of the engine's; None: unknown."""
        return None if self.needs_scaler else 1.0 / self._progress.answers.gradient_accumulation_steps()

    def with_loss_scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale: in fp32, for fp16 has no room for the product."""
        scale = self.loss_scale
        return loss if scale == 1.0 else loss.float() * scale

    def begin_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Counts a forward that trains, and its tokens."""
        self._forwards += 1
        self._report.add_tokens(args, kwargs)
        self._report.add_labels(named_input("labels", args, kwargs))
        self._memory_watch.begin_forward(self._progress.counters.global_steps + 1, self._memory.kinds)

    def forget_forwards(self) -> None:
        """Forgets forwards whose backward will not come, as their global batch is given up."""
        self._forwards = 0

    def begin(self, *, is_part: bool = False) -> None:
        """Prepares a backward that counts, whoever runs it.

        Args:
            is_part: Whether others of the same micro batch follow, through other parts of the model on this rank.
        """
        self._heartbeat.beat(phase=self.phase)
        self._compare_forwards()
        self._memory_watch.begin_backward(self._memory.kinds)
        writes, away = self._step.writes, self._step.away
        if away is not None:
            # What a script has written may be put back before the step, so masters that lack it are left alone here.
            lacks = writes.are_due()
            away.settle()  # gradients go where the last update has taken them from
            begins = self._progress.answers.is_gradient_accumulation_boundary() and not lacks and not is_part
            away.expect(1.0 / self.loss_scale if begins else None)

    def run(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Runs a backward and reduces its gradients over the ranks.

        Args:
            loss: Scalar with a graph, before the loss scale.
            retain_graph: Whether the graph is kept for another backward.
        """
        self.run_from([self.with_loss_scale(loss)], [None], retain_graph=retain_graph)

    def run_from(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        *,
        retain_graph: bool = False,
        units: Collection[int] | None = None,
        is_part: bool = False,
    ) -> None:
        """Runs the backward of a part of the model, and takes its gradients.

        Args:
            outputs: Tensors with a graph that it begins at; none: the units get zeros.
            grads: Gradient of each, times the loss scale; None for a scalar that the loss scale has been taken into.
            retain_graph: Whether the graph is kept for another backward.
            units: Numbers of the units that the backward can come to; None: all.
            is_part: Whether gradients of the same micro batch follow.
        """

        def compute() -> None:
            if outputs:
                torch.autograd.backward(outputs, grads, retain_graph=retain_graph)

        self._run(compute, retain_graph=retain_graph, units=units, is_part=is_part or units is not None)

    def run_put_off(self, compute: Callable[[], None], *, units: Collection[int] | None) -> None:
        """Takes gradients that an earlier backward has put off.

        Args:
            compute: Function that adds them to `grad` of the parameters.
            units: Numbers of the units that they can be of; None: all.
        """
        self._run(compute, retain_graph=False, units=units, is_part=True, opens_all=True)

    def _run(
        self,
        compute: Callable[[], None],
        *,
        retain_graph: bool,
        units: Collection[int] | None,
        is_part: bool,
        opens_all: bool = False,
    ) -> None:
        self.begin(is_part=is_part)
        with self._guard.explaining():
            self._hooks.before_backward(
                retain_graph=retain_graph,
                reduce=not self._progress.open_no_sync,
                strays=self.stray_factor(),
                units=units,
                opens_all=opens_all,
            )
            try:
                # The order of nodes is what the hooks rest on, see [Note: one ready queue] in zero/hooks/unit_calls.py.
                with (
                    labelled("backward"),
                    engines_own_backward(),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    compute()
            except BaseException:
                self._hooks.abandon_backward()
                raise
            self._hooks.after_backward()
        self.end()

    def end(self) -> None:
        """Counts a backward that is over."""
        self._memory_watch.end_backward(self._memory.kinds)
        progress = self._progress
        progress.backward_done = True
        progress.backwards += 1
        if not progress.counts_micro_steps:
            progress.micro_steps_done += 1
            self._mesh.where.at(*progress.present_step)

    def check_first_loss(self, loss: Tensor, *, stage: int) -> None:
        """Catches parameters used outside their unit's forward: at first, what is not gathered holds NaN.

        No infinity comes of that. Where a loss that is nan leaves its step out, as an overflow of fp16 does at every
        stage, it is an error only if such a use is certain.

        Args:
            loss: Loss of a micro batch.
            stage: ZeRO stage.

        Raises:
            ModelError: the first loss is nan because of such a use.
        """
        if self._progress.counters.micro_steps or stage < 3 or not math.isnan(float(loss.detach())):
            return
        self._guard.check_memory()
        unused = self._hooks.unused_units()
        reads = never_gathered_reads(loss, unused)
        if not reads and self._update.skip_non_finite:
            return
        names = ", ".join(f"`{name}`" for name in (reads[:8] or [unit.name for unit in unused]))
        verb = f"it reads {names}, and their forward" if reads else f"the forward of {names}"
        cause = f"{verb} never ran, so" if names else "its own numbers give that, or"
        raise ModelError(
            f"model: the first loss is {float(loss.detach())}; {cause} weights are used outside of their module's "
            "forward, where stage 3 has not gathered them",
            hint="call the module itself and not its weight; `zero_optimization.stage` 2 shows which of the two it is",
        )

    def _compare_forwards(self) -> None:
        """Notes a backward that more forwards came before than before the first one.

        A rank that leaves a batch out after its forward does not hang at stages 0 to 2, where forwards enter no
        collective: it is ahead of the others from then on, and they wait for it at the end.
        """
        forwards, self._forwards = self._forwards, 0
        if not self._usual_forwards:
            self._usual_forwards = forwards
        elif forwards > self._usual_forwards:
            place = at_step(*self._progress.present_step)
            self._mesh.where.oddity = f"{forwards} forwards before its backward{place}, {self._usual_forwards} before"
