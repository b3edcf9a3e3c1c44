"""The engine a training script holds: forward, backward, step, and the end.

It makes its components from the values of `initialize` and orders them; it does not know how any of them works. What
scripts written for DeepSpeed ask it stands in `deepspeed/`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from dsrun.config.config import Config
from dsrun.contract.environment import note_axes, note_engine, stands_for_deepspeed
from dsrun.contract.heartbeats import SCRIPT_PHASE
from dsrun.errors import DsrunError, ModelError

from ..memory.arenas import ArenaReport
from ..memory.bus import BusCounts
from ..mesh.join.groups import ProcessGroupMesh, leave
from ..observe.memory_report import MemoryReport
from ..precision.casting import cast_floating
from ..precision.configured import autocast_of
from ..precision.mismatch import mismatch_of
from ..protocols import Scheduler
from ..trace_labels import labelled
from .components import make_components
from .compose.data import Data
from .compose.hooks import Hooks
from .compose.job import Job
from .compose.saving import Saving
from .counters import EngineCounters
from .deepspeed.axes import AxisGetters
from .deepspeed.batch_calls import BatchCalls, BatchSource
from .deepspeed.calls import Calls
from .deepspeed.config_getters import ConfigGetters, EpochCount
from .deepspeed.getters import Getters
from .deepspeed.monitor import MonitorAccess
from .deepspeed.optimizer_calls import ScheduleNote, give_calls, give_step, name_class
from .deepspeed.torch_module import TorchModule
from .generation import Generation
from .host.migration import MigratingUpdate
from .host.tiers import Tiers
from .memory_queries import prediction_follower
from .model.ownership import let_go, take_over
from .model.sharded import ShardedModel
from .observation import Observation
from .progress import Progress
from .saving.run_state import ClientState
from .training.script_backward import check_loss, check_not_scaled
from .update import Update


class Engine(Getters, ConfigGetters, AxisGetters, Calls, BatchCalls, MonitorAccess, TorchModule):
    """Trains one model; every rank calls the same methods in the same order.

    It is a torch module whose only part is the model, under the name `module`: see `deepspeed/torch_module.py`.
    Attributes that an engine does not have are looked up in the model, as DeepSpeed's engine does.

    Args:
        settings: the config.
        job: this process's place in the job.
        mesh: ranks and device.
        observation: records, and the bytes that were predicted.
        saving: writer of checkpoints and of copies in memory.
        tiers: memory that state lives in.
        sharded: the model.
        update: the optimizer, the schedule and the loss scale.
        data: batches of this rank.
        hooks: hooks on the model.
    """

    def __init__(
        self,
        settings: Config,
        job: Job,
        mesh: ProcessGroupMesh,
        observation: Observation,
        saving: Saving,
        *,
        tiers: Tiers,
        sharded: ShardedModel,
        update: Update,
        data: Data,
        hooks: Hooks,
    ) -> None:
        super().__init__()
        self.module = sharded.module
        self.training = sharded.module.training
        self.training_dataloader = data.loader
        self.device = mesh.device
        self.config = settings.given
        self.mpu: object = None
        self.global_rank = mesh.info.rank
        self.local_rank = mesh.info.local_rank
        self.world_size = mesh.info.world_size
        self.dp_world_size = mesh.batch.size
        self._settings = settings
        self._mesh = mesh
        self._tiers = tiers
        self._sharded = sharded
        self._update = update
        self._data = data
        self._hooks = hooks
        self._observation = observation
        self._heartbeat = job.heartbeat
        self._is_compiled = False
        self._batch_source = BatchSource()
        self._epochs = EpochCount()
        self._schedule_note = ScheduleNote(settings, job.say)
        self._autocast = autocast_of(settings)
        self._cast_inputs = sharded.precision.compute if settings.fp16.enabled and settings.fp16.auto_cast else None
        self._progress = Progress(
            batch=data.batch, counts_micro_steps=settings.managed_gradient_accumulation, engine=weakref.ref(self)
        )
        self._mesh.where.at(*self._progress.present_step)
        self._components = make_components(
            settings,
            job,
            mesh,
            observation,
            saving,
            progress=self._progress,
            tiers=tiers,
            sharded=sharded,
            update=update,
            data=data,
            hooks=hooks,
        )
        self._components.moment.note()
        hooks.units.follow(sharded.module)
        if update.optimizer is not None:
            self._components.script.follow(self)
        # Not the engine's own method: what a model keeps must not keep the engine.
        self._take_off = partial(
            let_go, sharded.module, hooks.units, hooks.activations, stays_sharded=sharded.plan.shard_parameters
        )
        take_over(
            sharded.module,
            update.optimizer,
            loss_scale=update.loss_scale.value,
            engine=self,
            release=self._take_off,
        )
        if update.optimizer is not None:
            give_calls(update.optimizer, self._components.states, shards_parameters=sharded.plan.shard_parameters)
            name_class(update.optimizer, settings, compute=sharded.precision.compute)
            if stands_for_deepspeed():
                give_step(update.optimizer, update.shards, weakref.WeakMethod(self._step_without_schedule))
        self._end_with_engine()
        note_engine(trains=update.optimizer is not None)
        note_axes({axis.name: axis.size for axis in mesh.spec.axes})

    @property
    def optimizer(self) -> optim.Optimizer | None:
        """The optimizer over this rank's shards; None for an engine that only evaluates."""
        return self._update.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: optim.Optimizer | None) -> None:
        """Takes the optimizer away, so that the engine evaluates only from now on.

        Raises:
            ModelError: it is another optimizer, which would never be stepped.
        """
        if optimizer is not None and optimizer is not self._update.optimizer:
            raise ModelError(
                f"engine.optimizer: set to a {type(optimizer).__name__}; the engine steps the one it was made with",
                hint="give the optimizer to dsrun.initialize; None takes it away",
            )
        self._update.optimizer = optimizer

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The schedule that is stepped after each applied update, saved and loaded; a script may set another."""
        return self._update.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Scheduler | None) -> None:
        """Takes a schedule that is stepped from the next update on."""
        self._update.scheduler = scheduler

    def _end_with_engine(self) -> None:
        """Has what an engine began end with it, also where no script calls `destroy`."""
        away, wear = self._update.away, self._observation.wear
        if isinstance(away, MigratingUpdate):
            away.moved = prediction_follower(self._components.memory, self.optimizer)
        # Few scripts call `destroy`: the summary then comes when the engine or the interpreter ends.
        self._at_end = weakref.finalize(self, self._components.peaks.report)
        self._wear_at_end = None if wear is None else weakref.finalize(self, wear.report)
        # An update may be under way when the engine goes: the model would read its parameters half written.
        self._settled_at_end = None if away is None else weakref.finalize(self, away.close)
        if self._settled_at_end is not None:
            self._settled_at_end.atexit = False  # nobody reads it then, and threads it needs have ended
        # Units may have been fetched ahead and never used: their copies must not outlive the memory they read.
        self._quiet_at_end = weakref.finalize(self, self._tiers.bus.finish)
        self._watched_to_end = [weakref.finalize(self, watcher.close) for watcher in self._components.watchers]

    # Training ---------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward. A call of the engine runs this, and hooks that a script has given the engine.

        Inputs are not moved; `fp16.auto_cast` alone casts them. At stage 3, enters all-gathers. Runs under autocast
        where the config says so.

        Raises:
            ModelError: an input has a dtype or a device that the model cannot take, from torch's own error; or a
                parameter has been converted or moved.
        """
        self._refuse_parts("engine(...)")
        if self._sharded.plan.shard_parameters:
            self._components.check_trains.check_there("engine(...)")
        self._hooks.access.torn.check("engine(...)")
        trains = torch.is_grad_enabled()
        self._heartbeat.beat(phase="forward" if trains else "evaluate")
        if trains:
            self._components.script.prepare()
            self._components.backwards.begin_forward(args, kwargs)
        if self._cast_inputs is not None:
            args, kwargs = cast_floating((args, kwargs), self._cast_inputs)
        self._hooks.units.before_forward()
        try:
            with (
                labelled("forward"),
                self._components.guard.explaining(),
                self._under_autocast(),
                self._counting(trains, args, kwargs),
            ):
                return self.module(*args, **kwargs)
        except DsrunError:
            raise
        except (RuntimeError, ValueError) as error:
            mismatch = self._mismatch(error, args, kwargs)
            if mismatch is None:
                raise
            raise mismatch from error
        finally:
            if not torch.is_grad_enabled():
                self._hooks.units.release_rest()

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs backward on one micro batch's loss and reduces its gradients over the ranks.

        Args:
            loss: scalar, this rank's mean over its micro batch.
            retain_graph: whether the graph is kept for another backward.
            scale_wrt_gas: whether the loss is first divided by the number of accumulation steps.

        Returns:
            the loss divided by the accumulation steps, or itself where there is one; backward runs on it times the loss
            scale.

        Raises:
            ModelError: the loss is no tensor, no scalar, has no graph, or comes from parameters that were not gathered;
                or the engine has no optimizer.
        """
        self._refuse_parts("engine.backward")
        self._components.check_trains("engine.backward")
        check_loss(loss, "engine.backward", hint="reduce it with .mean(), and compute it outside of torch.no_grad()")
        check_not_scaled(loss, "engine.backward")
        self._hooks.units.find_failed()
        self._components.backwards.check_first_loss(loss, stage=self._settings.zero_optimization.stage)
        self._components.report.add_loss(loss.detach().reshape(1))
        steps = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        scaled = loss if steps == 1 else loss / steps  # a division by 1 is an operation here and one in the backward
        self._components.backwards.run(scaled, retain_graph=retain_graph)
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro step; on the last one of a global batch, updates the parameters.

        Args:
            lr_kwargs: keyword arguments for the schedule's `step`, where the script's own schedule takes any; None for
                none.

        Raises:
            ModelError: there was no backward since the last step, `no_sync` is open, or the engine has no optimizer.
            CheckpointError: a checkpoint could not be saved, which was written meanwhile; the step has been taken.
        """
        self._refuse_parts("engine.step")
        self._take_step(lr_kwargs or {})

    def _step_without_schedule(self) -> None:
        """Updates the parameters as `optimizer.step()` of DeepSpeed's does, which leaves the schedule to the script."""
        self._refuse_parts("optimizer.step")
        if self._progress.counts_micro_steps and not self.is_gradient_accumulation_boundary():
            number, steps = self._progress.micro_steps_done + 1, self.gradient_accumulation_steps()
            raise ModelError(
                f"optimizer.step: called after micro step {number} of {steps}, before the gradients of a global batch "
                "are there",
                hint="call engine.step() after each micro step; it updates the parameters on the last one",
            )
        self._schedule_note.note_step(self._update.scheduler)
        self._take_step(None)

    def _take_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Ends a micro step.

        Args:
            lr_kwargs: arguments of the schedule's `step`; None: the schedule stays where it is.
        """
        self._components.check_trains("engine.step")
        self._hooks.units.find_failed()
        if self._progress.open_no_sync:
            raise ModelError(
                "engine.step: called inside engine.no_sync, where gradients may stay on their rank",
                hint="leave the `with` first; in it, call engine.backward alone",
            )
        if not self._progress.backward_done:
            raise ModelError(
                "engine.step: there was no backward through the engine's model since the last step",
                hint="call engine.backward(loss) once before each engine.step()",
            )
        self._progress.in_step = True
        try:
            self._end_micro_step(lr_kwargs)
        finally:
            self._progress.in_step = False

    def _end_micro_step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        progress = self._progress
        progress.backward_done = False
        progress.step_applied = False
        boundary = self.is_gradient_accumulation_boundary()
        progress.micro_steps_done = 0 if boundary else progress.micro_steps_done + 1
        if boundary:
            self._heartbeat.beat(phase="step")
            self._hooks.units.before_step()
            reducer = self._sharded.reducer
            if reducer.has_unreduced or reducer.has_strays:
                reducer.reduce_unreduced(strays=self._components.backwards.stray_factor())
            self._components.steps.take(lr_kwargs, stop_request=self._components.on_signal.request)
            self._heartbeat.beat(step=progress.counters.global_steps, phase=SCRIPT_PHASE)
        progress.counters.micro_steps += 1
        self._mesh.where.at(*progress.present_step)
        if boundary:
            self._components.moment.note()
            self._components.checkpoints.check()
            self._components.copies.copy_if_due()
            self._components.on_signal.end_if_asked(self.save_checkpoint, self.wait_for_checkpoint)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the parameters.

        With `managed_gradient_accumulation` false every `step` does; then this is true inside of `step` alone, as in
        DeepSpeed.
        """
        return self._progress.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count of micro steps, until called again.

        Raises:
            ModelError: the config's `managed_gradient_accumulation` is false, so there is no count.
        """
        if not self._progress.counts_micro_steps:
            raise ModelError(
                "engine.set_gradient_accumulation_boundary: `managed_gradient_accumulation` is false, so every "
                "engine.step() updates the parameters",
                hint="call engine.step() where the boundary is, or leave the key out of the config",
            )
        self._progress.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backwards in here need not exchange gradients between ranks, and `step` is refused; every rank must enter it.

        At stages 0 and 1 gradients stay on their rank, added up in the parameters' dtype, until the next backward or
        step outside. That saves their traffic and sums them in another order, so the last bits differ from those of
        the other stages. At stages 2 and 3, which keep no whole gradients, they are reduced all the same.
        """
        self._progress.open_no_sync += 1
        try:
            yield
        finally:
            self._progress.open_no_sync -= 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients accumulated so far; after a backward that failed, the global batch begins again.

        Args:
            set_to_none: torch's argument, without effect: parameters have no `grad` outside of backward.
        """
        del set_to_none
        self._hooks.units.find_failed()
        reducer = self._sharded.reducer
        if reducer.is_torn or not self._progress.counts_micro_steps:
            self._progress.micro_steps_done = 0
        if self._progress.backwards:
            # Their losses and tokens count no more; a forward that only waits for its backward has no gradients yet.
            self._components.forget_batch()
        else:
            self._components.script.forget()
        self._progress.backwards = 0
        reducer.drop_strays()
        reducer.zero()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the parameters."""
        return self._progress.step_applied

    def _counting(
        self, trains: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        """Returns what counts the operations of a forward that trains, for the records and for a profile."""
        if not trains:
            return nullcontext()
        flops, counting = self._components.flops, ExitStack()
        if flops is not None:
            counting.enter_context(flops.counting(0, args, kwargs))
        counting.enter_context(self._components.profile.counting(self._progress.counters.global_steps))
        return counting

    def _under_autocast(self) -> AbstractContextManager[object]:
        """Returns what forward runs under: the config's autocast, or else whatever the script has opened."""
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, dtype=self._autocast)

    def _mismatch(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelError | None:
        return mismatch_of(
            error,
            self.module.forward,
            args,
            kwargs,
            device=self.device,
            compute=self._sharded.precision.compute,
            autocast=self._autocast,
            casts=self._cast_inputs is not None,
        )

    @property
    def generate(self) -> Callable[..., Any]:
        """The model's own `generate`, where it has one: at stage 3 with weights that are gathered once.

        Every rank must call, and may generate as long as it wants; see [Note: who waits for whom] in `generation.py`.
        """
        own = getattr(self.module, "generate", None)
        if own is None:
            raise AttributeError("generate")  # and then torch_module.py says who has none
        if self._mesh.pipe.size > 1:
            return partial(self._refuse_parts, "engine.generate")
        return partial(_call_generate, self._components.generation, own)

    # What a run says, and what is asked of it -------------------------------------------------------------------------

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Records figures of the script, such as `{"eval/loss": 2.3}`, beside those of the steps.

        Every rank may call; rank 0's figures are recorded, at the steps that were taken before, and monitors, reports
        and the dashboard show them by their names. A tensor on a GPU is copied behind the work that computes it, and
        nothing waits for it; enters no collective.

        Args:
            values: numbers by name; tensors of one element, on any device. What is not finite is recorded as missing.

        Raises:
            ModelError: a name or a value is none; all of them are named.
        """
        counters = self._progress.counters
        self._components.script_figures.log(values, step=counters.global_steps, samples=counters.global_samples)

    def counters(self) -> EngineCounters:
        """Returns what this rank has moved since the engine was made; enters no collective.

        The numbers stand still; `engine.counters().since(earlier)` is what was moved in between.
        """
        return EngineCounters(
            self._mesh.traffic(),
            self._tiers.bus.counts.since(BusCounts()),
            self._observation.drives(),
        )

    def model_state_bytes(self) -> int:
        """Bytes of parameters, gradients, masters and optimizer states that this rank holds in memory now."""
        return self._components.memory.state_bytes()

    def memory_arenas(self) -> ArenaReport:
        """Returns the arenas of this rank's long-lived buffers with their high-water marks; its `str` is a table.

        What lies outside of them comes with it: frozen parameters and the module's buffers, which are the model's own,
        optimizer states that nobody could foresee, the copy of state that the last asynchronous save has written, and
        host memory that `offload_states` keeps for its next call.
        """
        return self._components.memory.arenas()

    def memory_report(self) -> MemoryReport:
        """Returns what this rank held over the last step that was sampled, its peaks and their owners.

        Steps 1, 2, 3, 10, 100 and so on are sampled, and growth is watched over 50 steps; enters no collective. Its
        `str` is for a terminal; `save_plot` draws it.
        """
        return MemoryReport(
            samples=self._components.memory_watch.samples,
            growths=self._components.memory_watch.growths,
            state_predicted_bytes=self._components.memory.predicted_bytes,
            state_bytes=self._components.memory.state_bytes(),
        )

    def wait_for_checkpoint(self) -> None:
        """Returns when no checkpoint is being written any more, nor a copy in memory; enters no collective.

        Raises:
            CheckpointError: the last one could not be saved, and the script was not told so far.
        """
        self._components.checkpoints.wait()

    def set_memory_copy_client_state(self, client_state: ClientState | None) -> None:
        """Says what `load_checkpoint` returns as client state where a run goes on from a copy in memory.

        Args:
            client_state: plain values, arrays and tensors; or a function that returns them when a copy is made. None:
                nothing.
        """
        self._components.copies.client_state = client_state

    def save_on_signal(
        self,
        save_dir: str | os.PathLike[str],
        signals: Sequence[str] = ("SIGTERM",),
        *,
        client_state: ClientState | None = None,
    ) -> None:
        """Has the run save a checkpoint and end where one of its ranks gets a signal; goes before the config's.

        The optimizer step that is under way is finished on all ranks, and `engine.step()` then saves in `save_dir`,
        with the tag `global_step<N>`, and raises SystemExit with 128 + the signal's number: 143 for SIGTERM. So a
        launcher's grace (`dsrun run --grace`) has to cover a step and a checkpoint. A signal that comes 3 s after the
        first one, or later, does what it did before this call: SIGTERM ends the process at once.

        Args:
            save_dir: checkpoint folder, shared by all ranks, or an address such as `s3://bucket/run`.
            signals: names of the signals: SIGTERM, SIGUSR1, SIGUSR2, or some of them.
            client_state: plain values that `load_checkpoint` returns; or a function that returns them when it is time.

        Raises:
            InputError: `save_dir` is None, empty, no address, or no folder that this rank could write to; a signal is
                none of the three, or this is not the main thread.
        """
        self._components.on_signal.follow(save_dir, signals, client_state)

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked this rank to save and end, say to leave a long evaluation; others may not know."""
        return self._components.on_signal.is_requested

    # The end -------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Reports the peaks of memory, takes the hooks off the module and leaves its process groups.

        The job's group ends with the last engine, unless the script has made it, or joined it by
        `dsrun.init_distributed()`: then it is the script's to destroy.

        At stages 0 to 2 the module is an ordinary one afterwards, with its present parameters and without gradients;
        the rest is freed with the engine. At stage 3 its parameters stay slices, which the next `dsrun.initialize`
        takes over. Without this call an engine goes when nothing refers to it, and its module works on as before.

        Waits for a checkpoint that is being written. A second call does nothing.

        Raises:
            CheckpointError: the last checkpoint could not be saved, and the script was not told so far.
        """
        if self._components.check_trains.has_ended:
            return
        self._at_end()
        for end_watch in self._watched_to_end:
            end_watch()
        self._components.on_signal.forget()
        try:
            if self._settled_at_end is not None:
                self._settled_at_end()
            if self._wear_at_end is not None:
                self._wear_at_end()
            self._components.checkpoints.close()
        finally:
            self._components.copies.close()
            self._quiet_at_end()
            self._components.states.close()
            self._take_off()
            self._components.check_trains.has_ended = True
            self._observation.records.flush()
            leave(self._mesh)


def _call_generate(generation: Generation, generate: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return generation.run(generate, args, kwargs)
