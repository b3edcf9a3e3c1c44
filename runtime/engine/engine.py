"""The engine a training script holds: forward, backward, step, and the end. What else it offers, it inherits.

It orders its parts and counts; it does not know how any of them works. `initialize` puts the parts together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import InputError, ModelError

from ..memory.bus import BusCounts
from ..mesh.collectives import Traffic
from ..mesh.join.groups import leave
from ..mesh.step_position import at_step
from ..observe.allocation_history import wanted_history
from ..observe.memory_watch import MemoryWatch
from ..observe.peaks import PeakSummary
from ..observe.tokens import count_tokens
from ..precision.casting import cast_floating
from ..precision.mismatch import mismatch_of
from ..zero.hooks.timeline import engines_own_backward
from .counters import EngineCounters
from .deepspeed.calls import DeepSpeedCalls
from .deepspeed.getters import Answers
from .deepspeed.offload_states import PutAway
from .first_loss import never_gathered_reads
from .memory_queries import HeldMemory
from .model_guard import Taken
from .ownership import let_go, note_outcome, take_over
from .parts import SCRIPT_PHASE, EngineParts
from .report import StepReport
from .saving.checkpoints import Checkpoints
from .saving.export import WholeWeights
from .saving.memory_copies import CopiesInMemory
from .saving.stopping import Departure, Stopping
from .script_backward import ScriptBackwards, check_loss
from .state import Counters
from .step import StepResult, take_step


class Engine(
    Answers, WholeWeights, Checkpoints, CopiesInMemory, Stopping, HeldMemory, PutAway, DeepSpeedCalls, ScriptBackwards
):
    """Trains one model; every rank calls the same methods in the same order.

    Attributes that an engine does not have are looked up in the module, as DeepSpeed's engine does.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.module = parts.module
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.scheduler
        self.training_dataloader = parts.loader
        self.device = parts.mesh.device
        self.config = parts.config
        self.mpu: object = None
        self.global_rank = parts.mesh.info.rank
        self.local_rank = parts.mesh.info.local_rank
        self.world_size = parts.mesh.info.world_size
        self.dp_world_size = parts.collectives.size
        self._batch = parts.batch
        self._counters = Counters()
        self._boundary: bool | None = None
        self._without_sync = 0  # `no_sync` contexts that are open
        self._counts_micro_steps = bool(parts.config.get("managed_gradient_accumulation", True))
        self._in_step = False
        self._backwards = 0  # since the last update
        self._forwards = 0  # that train, since the last backward
        self._usual_forwards = 0  # before the first one
        self._scaled_losses: list[Tensor] = []
        self._micro_steps_done = 0  # of the present global batch; a count of all of them would not survive a change
        self._last: StepResult | None = None
        self._step_applied = False
        self._backward_done = False
        self._is_compiled = False
        self._heartbeat = parts.heartbeat
        self._stop = None
        self._at_stop = Departure()
        self._copies_told = False
        self._copy_client_state = None
        self._say_where()
        self._note_moment()
        parts.hooks.follow(parts.module)
        if parts.optimizer is not None:
            self._follow_script()
        # Not the engine's own method: what a model keeps must not keep the engine.
        self._take_off = partial(
            let_go, parts.module, parts.hooks, parts.activations, stays_sharded=parts.step.plan.shard_parameters
        )
        take_over(
            parts.module,
            parts.optimizer,
            loss_scale=parts.loss_scale.value,
            engine=self,
            release=self._take_off,
        )
        self._taken = Taken(parts.module)
        self._report = StepReport(
            parts.collectives,
            parts.records,
            steps_per_print=parts.steps_per_print,
            device=self.device,
            model_numel=sum(extent.numel for unit in parts.step.units for extent in unit.layout.extents),
            total_steps=getattr(parts.scheduler, "total_num_steps", None),
            wear=parts.wear,
        )
        self._peaks = PeakSummary(
            parts.records,
            rank=self.global_rank,
            device=self.device,
            predicted_state_bytes=parts.predicted_state_bytes,
        )
        self._memory_watch = MemoryWatch(
            parts.records,
            rank=self.global_rank,
            device=self.device,
            history=wanted_history(device=self.device, rank=self.global_rank),
        )
        # Few scripts call `destroy`: the summary then comes when the engine or the interpreter ends.
        self._at_end = weakref.finalize(self, self._peaks.report)
        self._wear_at_end = None if parts.wear is None else weakref.finalize(self, parts.wear.report)
        # An update may be under way when the engine goes: the model would read its parameters half written.
        self._settled_at_end = None if parts.step.away is None else weakref.finalize(self, parts.step.away.close)
        if self._settled_at_end is not None:
            self._settled_at_end.atexit = False  # nobody reads it then, and threads it needs have ended
        # Units may have been fetched ahead and never used: their copies must not outlive the memory they read.
        self._quiet_at_end = weakref.finalize(self, parts.bus.finish)

    # Training ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Inputs are not moved; `fp16.auto_cast` alone casts them.

        At stage 3, enters all-gathers. Runs under autocast where the config says so.

        Raises:
            ModelError: an input has a dtype or a device that the model cannot take, from torch's own error; or a
                parameter has been converted or moved.
        """
        self._parts.torn.check("engine(...)")
        self._heartbeat.beat(phase="forward" if torch.is_grad_enabled() else "evaluate")
        if torch.is_grad_enabled():
            self._prepare_script_backward()
            self._forwards += 1
            self._report.add_tokens(count_tokens(args, kwargs))
            self._memory_watch.begin_forward(self._counters.global_steps + 1, self._memory_kinds)
        if self._parts.cast_inputs is not None:
            args, kwargs = cast_floating((args, kwargs), self._parts.cast_inputs)
        self._parts.hooks.before_forward()
        try:
            with self._taken.explaining(), self._autocast():
                return self.module(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            mismatch = self._mismatch(error, args, kwargs)
            if mismatch is None:
                raise
            raise mismatch from error
        finally:
            if not torch.is_grad_enabled():
                self._parts.hooks.release_rest()

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs backward on one micro batch's loss and reduces its gradients over the ranks.

        Args:
            loss: scalar, this rank's mean over its micro batch.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide by the number of accumulation steps first.

        Returns:
            the loss divided by the accumulation steps, or itself where there is one; backward runs on it times the loss
            scale.

        Raises:
            ModelError: the loss is no tensor, no scalar, has no graph, or comes from parameters that were not gathered;
                or the engine has no optimizer.
        """
        self._check_trains("engine.backward")
        self._check_states_here("engine.backward")
        check_loss(loss, "engine.backward", hint="reduce it with .mean(), and compute it outside of torch.no_grad()")
        self._check_not_scaled(loss, "engine.backward")
        self._parts.hooks.find_failed()
        self._check_first_loss(loss)
        self._report.add_loss(loss.detach().reshape(1))
        steps = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        scaled = loss if steps == 1 else loss / steps  # a division by 1 is an operation here and one in the backward
        self._begin_backward()
        with self._taken.explaining():
            self._run_backward(scaled, retain_graph=retain_graph)
        self._end_backward()
        return scaled

    def _begin_backward(self) -> None:
        """What comes before a backward that counts, whoever runs it."""
        self._heartbeat.beat(phase="backward")
        self._compare_forwards()
        self._memory_watch.begin_backward(self._memory_kinds)
        writes, away = self._parts.step.writes, self._parts.step.away
        if away is not None:
            # What a script has written may be put back before the step, so masters that lack it are left alone here.
            lacks = writes is not None and writes.are_due()
            away.settle()  # gradients go where the last update has taken them from
            begins = self.is_gradient_accumulation_boundary() and not lacks
            away.expect(1.0 / self._parts.loss_scale.value if begins else None)

    def _compare_forwards(self) -> None:
        """Notes a backward that more forwards came before than before the first one.

        A rank that leaves a batch out after its forward does not hang at stages 0 to 2, where forwards enter no
        collective: it is ahead of the others from then on, and they wait for it at the end.
        """
        forwards, self._forwards = self._forwards, 0
        if not self._usual_forwards:
            self._usual_forwards = forwards
        elif forwards > self._usual_forwards:
            place = at_step(self._counters.global_steps + 1, self._micro_steps_done + 1)
            self._parts.mesh.where.oddity = (
                f"{forwards} forwards before its backward{place}, {self._usual_forwards} before"
            )

    def _end_backward(self) -> None:
        """What comes after a backward that counts."""
        self._memory_watch.end_backward(self._memory_kinds)
        self._backward_done = True
        self._backwards += 1
        if not self._counts_micro_steps:
            self._micro_steps_done += 1
            self._say_where()

    def _take_over_writes(self) -> None:
        """Lets masters have what the script has written to parameters since they were last looked at."""
        self._taken.check()
        if self._parts.step.writes is not None:
            self._parts.step.writes.take_over()

    def _run_backward(self, scaled: Tensor, *, retain_graph: bool) -> None:
        self._parts.hooks.before_backward(
            retain_graph=retain_graph, reduce=not self._without_sync, strays=self._stray_factor()
        )
        try:
            # The order of nodes is what the hooks rest on, see [Note: one ready queue] in zero/hooks/timeline.py.
            with engines_own_backward(), torch.autograd.set_multithreading_enabled(False):
                self._with_loss_scale(scaled).backward(retain_graph=retain_graph)
        except BaseException:
            self._parts.hooks.abandon_backward()
            raise
        self._parts.hooks.after_backward()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro step; on the last one of a global batch, updates the parameters.

        Args:
            lr_kwargs: for the schedule's `step`, of a schedule of the script's that takes any.

        Raises:
            ModelError: there was no backward since the last step, `no_sync` is open, or the engine has no optimizer.
            CheckpointError: a checkpoint could not be saved, which was written meanwhile; the step has been taken.
        """
        self._check_trains("engine.step")
        self._check_states_here("engine.step")
        self._parts.hooks.find_failed()
        if self._without_sync:
            raise ModelError(
                "engine.step: called inside engine.no_sync, where gradients may stay on their rank",
                hint="leave the `with` first; in it, call engine.backward alone",
            )
        if not self._backward_done:
            raise ModelError(
                "engine.step: there was no backward through the engine's model since the last step",
                hint="call engine.backward(loss) once before each engine.step()",
            )
        self._in_step = True
        try:
            self._end_micro_step(lr_kwargs or {})
        finally:
            self._in_step = False

    def _end_micro_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        self._backward_done = False
        self._step_applied = False
        boundary = self.is_gradient_accumulation_boundary()
        self._micro_steps_done = 0 if boundary else self._micro_steps_done + 1
        if boundary:
            self._heartbeat.beat(phase="step")
            self._parts.hooks.before_step()
            if self._parts.step.reducer.has_unreduced or self._parts.step.reducer.has_strays:
                self._parts.step.reducer.reduce_what_stayed(strays=self._stray_factor())
            self._take_step(lr_kwargs)
            self._heartbeat.beat(step=self._counters.global_steps, phase=SCRIPT_PHASE)
        self._counters.micro_steps += 1
        self._say_where()
        if boundary:
            self._note_moment()
            self._parts.saver.check()
            self._copy_to_memory()
            self._end_if_asked()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the parameters.

        With `managed_gradient_accumulation` false every `step` does; then this is true inside of `step` alone, as in
        DeepSpeed.
        """
        if self._without_sync:
            return False
        if not self._counts_micro_steps:
            return self._in_step
        if self._boundary is not None:
            return self._boundary
        return self._micro_steps_done + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count of micro steps, until called again.

        Raises:
            InputError: the config's `managed_gradient_accumulation` is false, so there is no count.
        """
        if not self._counts_micro_steps:
            raise InputError(
                "engine.set_gradient_accumulation_boundary: `managed_gradient_accumulation` is false, so every "
                "engine.step() updates the parameters",
                hint="call engine.step() where the boundary is, or leave the key out of the config",
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards in here need not exchange gradients between ranks, and `step` is refused; every rank must enter it.

        At stages 0 and 1 gradients stay on their rank, added up in the parameters' dtype, until the next backward or
        step outside. That saves their traffic and sums them in another order, so the last bits differ from those of
        the other stages. At stages 2 and 3, which keep no whole gradients, they are reduced all the same.
        """
        self._without_sync += 1
        try:
            yield
        finally:
            self._without_sync -= 1

    def zero_grad(self) -> None:
        """Forgets the gradients accumulated so far; after a backward that failed, the global batch begins again."""
        self._parts.hooks.find_failed()
        if self._parts.step.reducer.is_torn or not self._counts_micro_steps:
            self._micro_steps_done = 0
        self._backwards = 0
        self._scaled_losses.clear()
        self._parts.step.reducer.drop_strays()
        self._parts.step.reducer.zero()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters."""
        return self._step_applied

    def _say_where(self) -> None:
        """Says which step begins, by what was finished: ranks that called `step` equally often say the same."""
        self._parts.mesh.where.at(self._counters.global_steps + 1, self._micro_steps_done + 1)

    def _check_trains(self, who: str) -> None:
        self._parts.torn.check(who)
        if self.optimizer is None:
            raise ModelError(
                f"{who}: the engine has no optimizer, so it evaluates only",
                hint="give dsrun.initialize an optimizer, or the config an `optimizer` section",
            )

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        parts = self._parts
        self._take_over_writes()
        if wish := self._wish():
            self._report.wish(wish)
        result = take_step(
            parts.step,
            at=str(parts.mesh.where),
            told_2=self._report.told_2,
            clipping=parts.clipping,
            skip_non_finite=parts.skip_non_finite,
            loss_scale=parts.loss_scale.value,
        )
        # Between steps nothing is under way: buffers that have come and gone leave no holes.
        parts.memory.compact()
        self._last = result
        self._step_applied = result.applied
        parts.loss_scale.follow(overflow=not result.applied, at=str(parts.mesh.where), what=result.trouble)
        note_outcome(parts.optimizer, overflow=not result.applied, loss_scale=parts.loss_scale.value)
        lr = self.get_lr()
        if result.applied:
            if self.lr_scheduler is not None:
                advance: Any = self.lr_scheduler.step
                advance(**lr_kwargs)
        else:
            self._counters.skipped_steps += 1
        self._counters.global_steps += 1
        samples = self.train_batch_size()
        if not self._counts_micro_steps:
            samples = self.train_micro_batch_size_per_gpu() * self.dp_world_size * self._backwards
        self._backwards = 0
        self._counters.global_samples += samples
        self._report.step(result, self._counters, lr=lr, samples=samples, next_scale=parts.loss_scale.value)
        if result.applied and self._peaks.wants_state:
            self._peaks.take_state(self.model_state_bytes())
        self._memory_watch.end_step(self._counters.global_steps, self._memory_kinds)

    def _autocast(self) -> AbstractContextManager[object]:
        """Returns what forward runs under: the config's autocast, or else whatever the script has opened."""
        dtype = self._parts.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _mismatch(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelError | None:
        parts = self._parts
        return mismatch_of(
            error,
            self.module.forward,
            args,
            kwargs,
            device=self.device,
            compute=parts.compute,
            autocast=parts.autocast,
            casts=parts.cast_inputs is not None,
        )

    def _with_loss_scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale: in fp32, for fp16 has no room for the product."""
        scale = self._parts.loss_scale.value
        return loss if scale == 1.0 else loss.float() * scale

    def _check_first_loss(self, loss: Tensor) -> None:
        """Catches parameters used outside their unit's forward: at first, what is not gathered holds NaN.

        No infinity comes of that. Where a loss that is nan leaves its step out, as an overflow of fp16 does at every
        stage, it is an error only if such a use is certain.
        """
        if self._counters.micro_steps or self._parts.stage < 3 or not math.isnan(float(loss.detach())):
            return
        self._taken.check_memory()
        unused = self._parts.hooks.unused_units()
        reads = never_gathered_reads(loss, unused)
        if not reads and self._parts.skip_non_finite:
            return
        names = ", ".join(f"`{name}`" for name in (reads[:8] or [unit.name for unit in unused]))
        verb = f"it reads {names}, and their forward" if reads else f"the forward of {names}"
        cause = f"{verb} never ran, so" if names else "its own numbers give that, or"
        raise ModelError(
            f"model: the first loss is {float(loss.detach())}; {cause} weights are used outside of their module's "
            "forward, where stage 3 has not gathered them",
            hint="call the module itself and not its weight; `zero_optimization.stage` 2 shows which of the two it is",
        )

    def counters(self) -> EngineCounters:
        """Returns what this rank has moved since the engine was made; enters no collective.

        The numbers stand still; `engine.counters().since(earlier)` is what was moved in between.
        """
        parts = self._parts
        return EngineCounters(
            parts.collectives.traffic.since(Traffic()), parts.bus.counts.since(BusCounts()), parts.drives()
        )

    # The module and its end -------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Switches the module to training."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Switches the module to evaluation."""
        return self.train(False)

    def destroy(self) -> None:
        """Reports the peaks of memory, takes the hooks off the module and leaves its process groups.

        The job's group ends with the last engine, unless the script has made it, or joined it by
        `dsrun.init_distributed()`: then it is the script's to destroy.

        At stages 0 to 2 the module is an ordinary one afterwards, with its present parameters and without gradients;
        the rest is freed with the engine. At stage 3 its parameters stay slices, which the next `dsrun.initialize`
        takes over. Without this call an engine goes when nothing refers to it, and its module works on as before.

        Waits for a checkpoint that is being written.

        Raises:
            CheckpointError: the last checkpoint could not be saved, and the script was not told so far.
        """
        self._at_end()
        self._forget_signals()
        try:
            if self._settled_at_end is not None:
                self._settled_at_end()
            if self._wear_at_end is not None:
                self._wear_at_end()
            self._parts.saver.close(self._heartbeat.beat)
        finally:
            if self._parts.copies is not None:
                self._parts.copies.close()
            self._quiet_at_end()
            self._drop_copies()
            self._let_go()

    def _let_go(self) -> None:
        self._take_off()
        leave(self._parts.mesh)
