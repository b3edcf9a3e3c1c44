"""Global batches by a schedule: a rank's chunks, from micro batches to summed gradients.

One stage is a pipeline of one rank: it has the same actions, without messages. Which step of these each action is, is
in `chunk_work.py`; the optimizer step is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsrun.config.config import Config
from dsrun.contract.heartbeats import HeartbeatWriter
from dsrun.pipeline_schedules.actions import Schedule

from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.wait_times import of_micro
from ...observe.flops.step_flops import StepFlops
from ...observe.flops.step_profile import StepProfile
from ...observe.memory_watch import MemoryWatch
from ...parallel.pipeline.executor import Executor
from ...parallel.pipeline.module import PipelineModule
from ...parallel.pipeline.pieces import number_of, pieces_of
from ...parallel.pipeline.seeds import LayerSeeds
from ...parallel.pipeline.stages import Stages
from ...parallel.pipeline.weight_grads import DeferredWeightGrads
from ...precision.casting import cast_floating
from ...precision.configured import autocast_of
from ...precision.policy import DTYPES
from ...zero.hooks.modules import UnitHooks
from ...zero.units.unit import ParamUnit
from ..memory_queries import MemoryQueries
from ..model.first_values import seed_of_first_rank
from ..model.guard import ModelGuard
from ..model.schedules import evaluation_schedule, training_schedule
from ..model.sharded import ShardedModel
from ..progress import Progress
from ..report import StepReport
from .backward import Backwards
from .check import TrainingCheck
from .chunk_work import EvaluationWork, TrainingWork
from .micro_batch import LossFunction, MicroBatch, loss_of, read_item

#: Schedules in which gradients of weights wait.
_SPLIT = ("zero_bubble", "zbv")


class ScheduledBatches:
    """Runs the micro batches of a global batch, forward and backward, through this rank's chunks of the model.

    Args:
        sharded: The model's chunks on this rank, and their units.
        settings: The config.
        mesh: Ranks, and the messages between stages.
        backwards: Backwards of the engine.
        guard: Guard of the model, which explains what a forward finds wrong.
        progress: Place in the global batch of this rank.
        report: Sum of the losses of a step.
        profile: Table of one step's arithmetic.
        memory: Bytes that this rank holds, by owner.
        memory_watch: Sampler of memory during a step.
        heartbeat: Writer of what this rank does, for the launcher that watches it.
        hooks: Hooks of the units.
        check: Check that refuses calls once a batch has failed between stages.
        flops: Counter of the operations of forwards; None for none.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        settings: Config,
        mesh: ProcessGroupMesh,
        *,
        backwards: Backwards,
        guard: ModelGuard,
        progress: Progress,
        report: StepReport,
        profile: StepProfile,
        memory: MemoryQueries,
        memory_watch: MemoryWatch,
        heartbeat: HeartbeatWriter,
        hooks: UnitHooks,
        check: TrainingCheck,
        flops: StepFlops | None = None,
    ) -> None:
        chunks = sharded.chunks
        self.stages = stages = chunks.stages
        self.loss_fn: LossFunction | None = None
        if isinstance(stages.module, PipelineModule):
            self.loss_fn = stages.module.loss_fn
        self._seeds = _layer_seeds(stages, settings, mesh)
        splits = settings.pipeline.schedule_name in _SPLIT and stages.rank_of != (0,)
        self._later = DeferredWeightGrads(stages.module) if splits else None
        self._settings = settings
        self._mesh = mesh
        self._reducer = sharded.reducer
        self._store = sharded.store
        self._backwards = backwards
        self._guard = guard
        self._progress = progress
        self._report = report
        self._profile = profile
        self._memory = memory
        self._memory_watch = memory_watch
        self._heartbeat = heartbeat
        self._hooks = hooks
        self._check = check
        self._flops = flops
        self._kept: list[int] = []  # chunks with gathered parameters
        boundary = settings.pipeline.boundary_dtype
        self._executor = Executor(mesh.links, boundary_dtype=None if boundary is None else DTYPES[boundary])
        self._autocast = autocast_of(settings)
        self._cast_inputs = DTYPES["fp16"] if settings.fp16.enabled and settings.fp16.auto_cast else None
        self._units: dict[int, frozenset[int]] = {}  # that a backward of each chunk can come to; none: all
        self._reduced: dict[int, set[int]] = {}  # with a chunk; the others at the end, when all gradients are there
        self._gathered: dict[int, list[ParamUnit]] = {}  # with a chunk, where chunks take turns
        if len(stages.own) > 1:
            used_by = chunks.chunks_using(sharded.units)
            self._units = {c: frozenset(unit for unit, users in used_by.items() if c in users) for c in stages.own}
            self._reduced = {c: {unit.index for unit in chunks.units_of(c, sharded.units)} for c in stages.own}
        self._gather_sets = sharded.gathering.sets
        if self._gather_sets:
            self._gathered = {c: chunks.units_of(c, sharded.acquired) for c in stages.own}
        self._schedules: dict[tuple[str, int], Schedule] = {}

    @property
    def draws(self) -> bool:
        """Whether this rank needs the data: it has the first chunk, the last one, or the model needs it everywhere."""
        own = self.stages.own
        return self.stages.needs_batch or 0 in own or len(self.stages.rank_of) - 1 in own

    def train(self, items: Sequence[Any], micros: int, loss_fn: LossFunction | None) -> None:
        """Adds the gradients of a global batch to the sums; every rank of the pipeline must call.

        Args:
            items: one item of the data a micro batch, see [Note: items] in `micro_batch.py`; none where `draws` is
                false.
            micros: number of micro batches.
            loss_fn: function that computes the loss; None: the model returns it.

        Raises:
            ModelError: what is wrong with the data, the model or another rank.
        """
        schedule = self._schedule("train", micros)
        self._meet()
        try:
            self._executor.run(schedule, TrainingWork(self, items, micros, loss_fn))
        except BaseException:
            self._give_up()
            raise

    def evaluate(
        self, items: Sequence[Any], micros: int, loss_fn: LossFunction | None, *, computes_loss: bool
    ) -> list[Any]:
        """Runs forwards alone; every rank of the pipeline must call.

        Args:
            items: items of the data, as for `train`.
            micros: number of micro batches.
            loss_fn: function that computes the loss; None: the model returns it.
            computes_loss: whether losses are wanted; else the model's outputs are what there is.

        Returns:
            (output of the model, loss or None) of each micro batch; none on ranks without the last chunk.
        """
        work = EvaluationWork(self, items, loss_fn, computes_loss=computes_loss)
        self._meet()
        try:
            with torch.no_grad():
                self._executor.run(self._schedule("evaluate", micros), work)
        except BaseException:
            self._note_failure()
            raise
        finally:
            self._hooks.release_rest()
        return work.outputs

    def _meet(self) -> None:
        """Gathers what several stages use, as long as all of them are at one place: their chunks come to it apart."""
        self._hooks.before_forward()

    def read(self, item: Any, loss_fn: LossFunction | None, *, where: str) -> MicroBatch:
        """Returns what an item means, see [Note: items] in `micro_batch.py`."""
        micro = read_item(
            item,
            has_loss=loss_fn is not None,
            as_one=isinstance(self.stages.module, PipelineModule),
            device=self._mesh.device,
            where=where,
        )
        if self._cast_inputs is None:
            return micro
        args, kwargs = cast_floating((micro.args, dict(micro.kwargs)), self._cast_inputs)
        return MicroBatch(args, kwargs, micro.labels)

    def run_chunk(self, chunk: int, micro: MicroBatch, received: Any, *, number: int) -> Any:
        """Runs a chunk's forward on the micro batch of a number, with a model's own errors explained."""
        self._hooks.before_forward()
        with (
            self._guard.explaining(),
            self._under_autocast(),
            self._seeded(number),
            self._counted(chunk, micro, received),
        ):
            return self.stages.run(chunk, micro.args, micro.kwargs, received)

    def begin_forward(self, chunk: int, micro: MicroBatch, *, number: int) -> None:
        """Tells that a chunk's forward that trains begins, on the micro batch of a number."""
        self._heartbeat.beat(phase=self._phase("forward", chunk, number))
        if chunk == 0:
            self._report.add_tokens(micro.args, micro.kwargs)
        self._memory_watch.begin_forward(self._progress.counters.global_steps + 1, self._memory.kinds)

    def counting(self) -> AbstractContextManager[object]:
        """Returns the context of a chunk's forward that trains, for the profile of a step."""
        return self._profile.counting(self._progress.counters.global_steps)

    def loss(self, output: Any, micro: MicroBatch, loss_fn: LossFunction | None, *, where: str) -> Tensor:
        """Returns a micro batch's loss."""
        if torch.is_grad_enabled():
            self._report.add_labels(micro.kwargs.get("labels") if micro.labels is None else micro.labels)
        with self._under_autocast():
            return loss_of(output, micro.labels, loss_fn, where=where)

    def note_loss(self, loss: Tensor | None) -> None:
        """Counts a micro batch's loss; None where another rank has it."""
        if loss is None:
            self._report.pass_loss()
        else:
            self._report.add_loss(loss.detach().reshape(1))

    def scaled(self, loss: Tensor, micros: int) -> Tensor:
        """Returns what a micro batch's backward begins at."""
        return self._backwards.with_loss_scale(loss if micros == 1 else loss / micros)

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        """Runs the backward of a chunk as a micro step of its units; `split` puts off what `weight_grads` does."""
        self._progress.micro_steps_done = micro
        self._backwards.phase = self._phase("backward", chunk, micro)
        later = nullcontext() if self._later is None or not split else self._later.deferring(chunk, micro)
        with self._seeded(micro), later:
            self._backwards.run_from(outputs, grads, units=self._units.get(chunk), is_part=split)

    def weight_grads(self, chunk: int, micro: int) -> None:
        """Computes what a split backward has put off, as a micro step of its units."""
        assert self._later is not None, "a schedule that splits backwards has them split"
        self._progress.micro_steps_done = micro
        self._backwards.phase = self._phase("weight grads", chunk, micro)
        self._backwards.run_put_off(partial(self._later.run, chunk, micro), units=self._units.get(chunk))

    def gather(self, chunk: int) -> None:
        """Begins to gather the parameters that a chunk alone uses."""
        self._store.keep(self._gathered[chunk])
        self._kept.append(chunk)

    def drop(self, chunk: int) -> None:
        """Gives up these parameters."""
        self._kept.remove(chunk)
        self._store.let_go(self._gathered[chunk])

    def _phase(self, kind: str, chunk: int, micro: int) -> str:
        """Returns what the launcher is told of an action: 48 bytes, with a chunk and a micro batch of 4 digits each."""
        return f"{kind}{of_micro(micro)} of chunk {chunk}" if self._mesh.pipe.size > 1 else kind

    def _note_failure(self) -> None:
        """Lets go of all chunks; other stages may wait for messages that will not come."""
        self._check.are_stages_apart |= self._mesh.links.size > 1
        for chunk in tuple(self._kept):
            self.drop(chunk)

    def reduce(self, chunk: int) -> None:
        """Begins the reduction of a chunk's gradients, where they are reduced once an update."""
        self._reducer.reduce_local(self._reduced.get(chunk, ()))

    def _give_up(self) -> None:
        """Forgets a global batch that has failed: the next one begins anew."""
        self._note_failure()
        self._hooks.before_step()
        if self._later is not None:
            self._later.forget()
        self._reducer.drop_strays()
        self._reducer.zero()
        self._progress.restart_batch()
        self._report.forget_losses()
        if self._flops is not None:
            self._flops.take_step()

    def _counted(self, chunk: int, micro: MicroBatch, received: Any) -> AbstractContextManager[object]:
        if self._flops is None or not torch.is_grad_enabled():
            return nullcontext()
        return self._flops.counting(chunk, (*micro.args, received), micro.kwargs)

    def _under_autocast(self) -> AbstractContextManager[object]:
        device = self._mesh.device.type
        return nullcontext() if self._autocast is None else torch.autocast(device, dtype=self._autocast)

    def _seeded(self, micro: int) -> AbstractContextManager[object]:
        if self._seeds is None:
            return nullcontext()
        return self._seeds.running(self._progress.counters.global_steps, micro)

    def _schedule(self, purpose: str, micros: int) -> Schedule:
        known = self._schedules.get((purpose, micros))
        if known is None:
            rank_of = self.stages.rank_of
            if purpose == "train":
                name = self._settings.pipeline.schedule_name
                known = training_schedule(name, rank_of, micros, gather_sets=self._gather_sets)
            else:
                known = evaluation_schedule(rank_of, micros, gather_sets=self._gather_sets)
            self._schedules[purpose, micros] = known
        return known


def _layer_seeds(stages: Stages, settings: Config, mesh: ProcessGroupMesh) -> LayerSeeds | None:
    """Returns what seeds the layers, the same on all ranks; enters a broadcast over the world where any does.

    A layer's number is made of its name, which is that in the whole model.
    """
    if not settings.pipeline.seeds_layers:
        return None
    seed = seed_of_first_rank(mesh) >> 1
    pieces = {module: number_of(name) for name, module in pieces_of(stages.module)}
    return LayerSeeds(pieces, seed, data_rank=mesh.batch.rank, device=mesh.device)
