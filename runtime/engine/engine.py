"""The engine a training script holds: forward, backward, step, save and load.

It orders its parts and counts; it does not know how any of them works. `initialize` puts the parts together.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsrun.errors import InputError, ModelError

from ..data.loader import TrainingLoader
from ..memory.arenas import ArenaReport, OutsideUse
from ..mesh.groups import leave
from ..observe.allocation_history import wanted_history
from ..observe.memory import measure
from ..observe.memory_report import MemoryReport
from ..observe.memory_watch import MemoryWatch
from ..observe.peaks import PeakSummary
from ..observe.tokens import count_tokens
from ..precision.casting import cast_floating
from ..zero.partition_parameters import unsettle
from .answers import Answers
from .export import WholeWeights
from .parts import EngineParts
from .persist import load_engine, save_engine
from .report import StepReport
from .resume import choose_checkpoint
from .state import Counters
from .step import StepResult, take_step
from .taken import Taken
from .wrapping import let_go, note_outcome, take_over

#: Phase between calls of the engine: the script loads data, computes its loss or does what the engine does not see.
SCRIPT_PHASE = "script"


class Engine(Answers, WholeWeights):
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
        self._micro_steps_done = 0  # of the present global batch; a count of all of them would not survive a change
        self._last: StepResult | None = None
        self._step_applied = False
        self._backward_done = False
        self._is_compiled = False
        self._heartbeat = parts.heartbeat
        self._say_where()
        parts.hooks.follow(parts.module)
        take_over(parts.module, parts.optimizer, loss_scale=parts.loss_scale.value)
        self._taken = Taken(parts.module)
        self._report = StepReport(
            parts.collectives,
            parts.records,
            steps_per_print=parts.steps_per_print,
            device=self.device,
            model_numel=sum(extent.numel for unit in parts.step.units for extent in unit.layout.extents),
            total_steps=getattr(parts.scheduler, "total_num_steps", None),
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

    # Training ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Inputs are not moved; `fp16.auto_cast` alone casts them.

        At stage 3, enters all-gathers. Runs under autocast where the config says so.
        """
        self._heartbeat.beat(phase="forward" if torch.is_grad_enabled() else "evaluate")
        if torch.is_grad_enabled():
            self._report.add_tokens(count_tokens(args, kwargs))
            self._memory_watch.begin_forward(self._counters.global_steps + 1, self._memory_kinds)
        if self._parts.cast_inputs is not None:
            args, kwargs = cast_floating((args, kwargs), self._parts.cast_inputs)
        self._parts.hooks.before_forward()
        try:
            with self._taken.explaining(), self._autocast():
                return self.module(*args, **kwargs)
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
            the loss divided by the accumulation steps; backward itself runs on that times the loss scale.

        Raises:
            ModelError: the loss is no scalar, has no graph, or comes from parameters that were not gathered; or the
                engine has no optimizer.
        """
        self._check_trains("engine.backward")
        if loss.numel() != 1 or not loss.requires_grad:
            raise ModelError(
                f"engine.backward: the loss has shape {tuple(loss.shape)} and requires_grad={loss.requires_grad}; "
                "expected a scalar computed from the model's output",
                hint="reduce it with .mean(), and compute it outside of torch.no_grad()",
            )
        self._heartbeat.beat(phase="backward")
        self._check_first_loss(loss)
        self._report.add_loss(loss.detach().reshape(1))
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._memory_watch.begin_backward(self._memory_kinds)
        with self._taken.explaining():
            self._run_backward(scaled, retain_graph=retain_graph)
        self._memory_watch.end_backward(self._memory_kinds)
        self._backward_done = True
        return scaled

    def _run_backward(self, scaled: Tensor, *, retain_graph: bool) -> None:
        self._parts.hooks.before_backward(retain_graph=retain_graph, reduce=not self._without_sync)
        try:
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
            ModelError: there was no backward since the last step, or the engine has no optimizer.
        """
        self._check_trains("engine.step")
        if not self._backward_done:
            raise ModelError(
                "engine.step: there was no engine.backward since the last step",
                hint="call engine.backward(loss) once before each engine.step()",
            )
        self._backward_done = False
        self._step_applied = False
        boundary = self.is_gradient_accumulation_boundary()
        self._micro_steps_done = 0 if boundary else self._micro_steps_done + 1
        if boundary:
            self._heartbeat.beat(phase="step")
            self._parts.hooks.before_step()
            if self._parts.step.reducer.has_unreduced:
                self._parts.step.reducer.reduce_what_stayed()
            self._take_step(lr_kwargs or {})
            self._heartbeat.beat(step=self._counters.global_steps, phase=SCRIPT_PHASE)
        self._counters.micro_steps += 1
        self._say_where()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the parameters."""
        if self._without_sync:
            return False
        if self._boundary is not None:
            return self._boundary
        return self._micro_steps_done + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count of micro steps, until called again."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Micro steps in here update nothing, and ranks need not exchange their gradients; every rank must enter it.

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
        """Forgets the gradients accumulated so far."""
        self._parts.step.reducer.zero()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters."""
        return self._step_applied

    def _say_where(self) -> None:
        """Says which step begins, by what was finished: ranks that called `step` equally often say the same."""
        self._parts.mesh.where.at(self._counters.global_steps + 1, self._micro_steps_done + 1)

    def _check_trains(self, who: str) -> None:
        if self.optimizer is None:
            raise ModelError(
                f"{who}: the engine has no optimizer, so it evaluates only",
                hint="give dsrun.initialize an optimizer, or the config an `optimizer` section",
            )

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        parts = self._parts
        self._taken.check()
        result = take_step(
            parts.step,
            at=str(parts.mesh.where),
            loss_sum=self._report.loss_sum,
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
        self._counters.global_samples += self.train_batch_size()
        self._report.step(
            result, self._counters, lr=lr, samples=self.train_batch_size(), next_scale=parts.loss_scale.value
        )
        if result.applied and self._peaks.wants_state:
            self._peaks.take_state(self.model_state_bytes())
        self._memory_watch.end_step(self._counters.global_steps, self._memory_kinds)

    def _autocast(self) -> AbstractContextManager[object]:
        """Returns what forward runs under: the config's autocast, or else whatever the script has opened."""
        dtype = self._parts.autocast
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _with_loss_scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale: in fp32, for fp16 has no room for the product."""
        scale = self._parts.loss_scale.value
        return loss if scale == 1.0 else loss.float() * scale

    def _check_first_loss(self, loss: Tensor) -> None:
        """Catches parameters used outside their unit's forward: at first, what is not gathered holds NaN."""
        if self._counters.micro_steps or self._parts.stage < 3 or math.isfinite(float(loss.detach())):
            return
        self._taken.check_memory()
        names = ", ".join(f"`{unit.name}`" for unit in self._parts.hooks.unused_units())
        cause = f"the forward of {names} never ran, so" if names else "its own numbers give that, or"
        raise ModelError(
            f"model: the first loss is {float(loss.detach())}; {cause} weights are used outside of their module's "
            "forward, where stage 3 has not gathered them",
            hint="call the module itself and not its weight; `zero_optimization.stage` 2 shows which of the two it is",
        )

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves everything needed to go on, on any number of ranks and at any stage; every rank must call.

        Args:
            save_dir: checkpoint folder, shared by all ranks.
            tag: name inside it; `global_step<N>` by default.
            client_state: JSON values that `load_checkpoint` returns.
            save_latest: let `latest` name this tag.
            exclude_frozen_parameters: leave parameters out that are not trained.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is empty.
            CheckpointError: on every rank, if one rank could not save; nothing was published.
        """
        if not str(save_dir):
            raise InputError("save_checkpoint: save_dir is empty", hint="pass the folder to save checkpoints in")
        self._heartbeat.beat(phase="save checkpoint")
        save_engine(
            self._parts,
            self._counters,
            Path(save_dir),
            tag=f"global_step{self.global_steps}" if tag is None else str(tag),
            client_state=client_state or {},
            save_latest=save_latest,
            frozen=not exclude_frozen_parameters,
        )
        self._heartbeat.beat(phase=SCRIPT_PHASE)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path | None = None,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        *,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint that any number of ranks saved at any stage; every rank must call.

        Args:
            load_dir: checkpoint folder; may be left out in a job that was started again.
            tag: name inside it. By default the one that a job which was started again goes on from, if it lies in
                `load_dir`, else the one that `latest` names.
            load_module_strict: tensors of the checkpoint that the model does not have are an error.
            load_optimizer_states: take over optimizer states and hyperparameters.
            load_lr_scheduler_states: take over the schedule.
            load_module_only: take over parameters and buffers alone.
            custom_load_fn: not taken, for it would see a rank's slices.
            missing_ok: return (None, None) where there is no checkpoint yet, instead of an error.

        Returns:
            the tag's folder, and the client state it was saved with.

        Raises:
            InputError: there is nothing to choose by: no `load_dir`, and the job was not started again.
            CheckpointError: there is none, it is damaged, or it is of another model; nothing was changed then, unless
                a file turns out damaged while it is read.
        """
        if custom_load_fn is not None:
            raise InputError(
                "load_checkpoint: custom_load_fn is given, and parameters may lie in slices",
                hint="read the weights yourself and pass them to engine.load_module_state_dict",
            )
        folder = None if load_dir is None else Path(load_dir)
        target = choose_checkpoint(folder, tag, resume=self._parts.resume, missing_ok=missing_ok)
        if target is None:
            return None, None
        self._heartbeat.beat(phase="load checkpoint")
        # A forward without a backward may still hold parameters, and gradients of before would be added to those after.
        self._parts.hooks.before_step()
        self._parts.step.reducer.zero()
        self._micro_steps_done = 0
        client_state = load_engine(
            self._parts,
            self._counters,
            target,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
        )
        note_outcome(self.optimizer, overflow=False, loss_scale=self._parts.loss_scale.value)
        self._heartbeat.beat(step=self._counters.global_steps, phase=SCRIPT_PHASE)
        self._say_where()
        return str(target), client_state

    # The module and its end -------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients, masters and optimizer states that this rank holds now."""
        units = [*self._parts.step.units, *self._parts.frozen_units]
        buffers = [t for u in units for t in (u.flat_param, u.flat_grad, u.shard, u.master, u.grad_sum)]
        buffers += [param.data for param in self.module.parameters() if not param.requires_grad]
        states = [] if self.optimizer is None else self._parts.step.optimizer.tensors()
        return measure([*buffers, *states])

    def memory_arenas(self) -> ArenaReport:
        """Returns the arenas of this rank's long-lived buffers with their high-water marks; its `str` is a table.

        What lies outside of them comes with it: frozen parameters and the module's buffers, which are the model's own,
        and optimizer states that nobody could foresee.
        """
        memory = self._parts.memory
        held = {
            "frozen parameters": [param for param in self.module.parameters() if not param.requires_grad],
            "module buffers": list(self.module.buffers()),
            "other optimizer states": [] if self.optimizer is None else self._parts.step.optimizer.tensors(),
        }
        outside = {name: measure(t for t in tensors if not memory.holds(t)) for name, tensors in held.items()}
        return memory.report([OutsideUse(name, nbytes) for name, nbytes in outside.items() if nbytes])

    def memory_report(self) -> MemoryReport:
        """Returns what this rank held over the last step that was sampled, its peaks and their owners.

        Steps 1, 2, 3, 10, 100 and so on are sampled, and growth is watched over 50 steps; enters no collective. Its
        `str` is for a terminal; `save_plot` draws it.
        """
        return MemoryReport(
            samples=self._memory_watch.samples,
            growths=self._memory_watch.growths,
            state_predicted_bytes=self._parts.predicted_state_bytes,
            state_bytes=self.model_state_bytes(),
        )

    def _memory_kinds(self) -> tuple[tuple[str, int], ...]:
        """Returns names and bytes of what is held for long."""
        report = self.memory_arenas()
        inside = [(use.name, use.reserved_bytes) for use in report.arenas]
        return (*inside, *((use.name, use.used_bytes) for use in report.outside))

    def train(self, mode: bool = True) -> Engine:
        """Switches the module to training."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Switches the module to evaluation."""
        return self.train(False)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module's forward, as its own `compile` does. Blocks compiled one by one give fewer graph breaks.

        Args:
            backend: of torch.compile.
            compile_kwargs: further arguments of torch.compile.
            schedule: not taken: there are no passes of DeepSpeed's here.
            compiled_autograd_enabled: not taken: hooks follow the backward.

        Raises:
            InputError: an argument that is not taken.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise InputError(
                f"engine.compile: schedule is {schedule} and compiled_autograd_enabled is {compiled_autograd_enabled}",
                hint="leave both out",
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str | None = None,
        pin_memory: bool = True,
        data_sampler: None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader:
        """Makes a loader of a map-style dataset, as `initialize` does of training_data; the engine does not save it.

        Args:
            dataset: the same on every rank.
            batch_size: samples of a rank in a batch; the micro batch by default.
            route: without effect, for DeepSpeed's calls.
            pin_memory: without effect.
            data_sampler: not taken: the loader shares samples out itself.
            collate_fn: makes a batch of samples.
            num_local_io_workers: without effect: batches are made in this process.

        Raises:
            InputError: an argument that is not taken.
            ModelError: the dataset has no length, or too few samples.
        """
        del route, pin_memory, num_local_io_workers
        if data_sampler is not None:
            raise InputError(
                "engine.deepspeed_io: data_sampler is given; the loader shares samples out over the ranks itself",
                hint="leave it out, or iterate your own DataLoader",
            )
        return TrainingLoader(
            dataset,
            micro_batch=batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self._parts.collectives.rank,
            size=self._parts.collectives.size,
            collate_fn=collate_fn,
        )

    def empty_partition_cache(self) -> None:
        """Does nothing: what is gathered lies in slots of a fixed size, and none of it is kept for later."""

    def destroy(self) -> None:
        """Reports the peaks of memory, takes the hooks off the module and leaves its process groups.

        The job's group ends with the last engine, unless the script has made it: then it is the script's to destroy.

        At stages 0 to 2 the module is an ordinary one afterwards, with its present parameters and without gradients;
        the rest is freed with the engine. At stage 3 its parameters stay slices, which the next `dsrun.initialize`
        takes over. Without this call an engine goes when nothing refers to it, and its module works on as before.
        """
        self._at_end()
        if self._parts.activations is not None:
            self._parts.activations.remove()
        self._parts.hooks.remove()
        let_go(self.module)
        if not self._parts.step.plan.shard_parameters:
            for param in self.module.parameters():
                unsettle(param)
                param.grad = None
        leave(self._parts.mesh)
