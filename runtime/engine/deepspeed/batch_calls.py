"""Whole global batches in one call, on every engine: `train_batch`, `eval_batch`, and where their data comes from.

DeepSpeed has these on its pipeline engine alone. What a batch consists of is in `training/scheduled.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import InputError, ModelError

from ...data.drawing import draw
from ...data.repeating import RepeatingLoader
from ...mesh.join.groups import ProcessGroupMesh
from ...parallel.pipeline.engine_class import PipelineError
from ...parallel.pipeline.grid import PipelineParallelGrid
from ...parallel.pipeline.module import PipelineModule
from ...parallel.pipeline.ranks import JobRank
from ...parallel.pipeline.topology import topology_of
from ..components import Components
from ..compose.data import Data
from ..progress import Progress
from ..training.micro_batch import LossFunction, digest_of


@dataclass(slots=True)
class BatchSource:
    """Where `train_batch` takes its micro batches from, if the call does not say.

    Attributes:
        iterator: Iterator that was set, or made of the engine's loader; None before the first use.
        batch_fn: Function of the script through which every item goes first; None for none.
    """

    iterator: Iterator[Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None


class BatchCalls:
    """Calls for whole global batches; the engine's components do what they ask."""

    _batch_source: BatchSource
    _grid: PipelineParallelGrid | None = None
    _components: Components
    _data: Data
    _mesh: ProcessGroupMesh
    _progress: Progress
    _take_step: Callable[[Mapping[str, Any] | None], None]
    gradient_accumulation_steps: Callable[[], int]
    module: nn.Module
    training_dataloader: Any

    def train_batch(self, data_iter: Iterator[Any] | None = None, *, loss_fn: LossFunction | None = None) -> Tensor:
        """Trains on one global batch: its micro batches, forward and backward, and one update; every rank must call.

        With several pipeline stages this is the way to train; with one it is the same as a loop over `forward`,
        `backward` and `step`. An item of the data is what the model is called with, or with a loss function a pair
        (inputs, labels); see [Note: items] in `training/micro_batch.py`.

        Args:
            data_iter: iterator that gives `gradient_accumulation_steps()` items, one a micro batch, the same on all
                ranks of a pipeline; not looked at by stages that need no data. None: that of `set_dataiterator`, or the
                engine's own loader over and over.
            loss_fn: function of the model's output and the labels; None: the PipelineModule's, or else the model
                returns its loss.

        Returns:
            the mean loss over all micro batches of all ranks, fp32, a scalar; the same on every rank.

        Raises:
            InputError: there is no data, or `data_iter` is no iterator.
            StopIteration: the data had ended before the first item, on every rank.
            ModelError: the data ends inside the global batch; a loss or an item is none; or the engine has no
                optimizer.
        """
        self._components.check_trains("engine.train_batch")
        if not torch.is_grad_enabled():
            raise ModelError(
                "engine.train_batch: called under torch.no_grad()", hint="call it outside, or engine.eval_batch in it"
            )
        if self._progress.open_no_sync:
            raise ModelError(
                "engine.train_batch: called inside engine.no_sync, which an update does not go with",
                hint='call it outside; `gradient_reduction: "update"` reduces gradients once an update',
            )
        if self._progress.micro_steps_done or self._progress.backward_done:
            raise ModelError(
                f"engine.train_batch: called after {max(1, self._progress.micro_steps_done)} micro steps of a global "
                "batch that engine.backward has begun",
                hint="end the global batch with engine.step(), or use engine.train_batch alone",
            )
        scheduled = self._components.scheduled
        if not self.module.training:
            self.module.train()
        micros = self.gradient_accumulation_steps()
        items = self._draw(data_iter, micros, "engine.train_batch")
        scheduled.train(items, micros, scheduled.loss_fn if loss_fn is None else loss_fn)
        self._progress.micro_steps_done = micros - 1
        self._progress.counters.micro_steps += micros - 1
        self._progress.backwards = micros
        self._progress.backward_done = True
        self._take_step({})
        last = self._progress.last
        assert last is not None, "the global batch has ended with a step"
        return torch.tensor(last.sums.losses / (micros * self._mesh.batch.size), device=self._mesh.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        *,
        loss_fn: LossFunction | None = None,
    ) -> Any:
        """Runs forwards of a global batch without a backward; every rank must call. Allowed between any two steps.

        Args:
            data_iter: iterator that gives an item a micro batch, as for `train_batch`.
            return_logits: whether the model's outputs are returned too.
            compute_loss: whether the loss is wanted.
            reduce_output: `avg` for the mean over all micro batches of all ranks; None for one loss a micro batch, the
                mean over the ranks with samples of their own.
            bcast_loss: whether every rank gets the loss; else those of the last stage do, and others get None.
            num_micro_batches: number of micro batches; None: the accumulation steps.
            loss_fn: function of the model's output and the labels, as for `train_batch`.

        Returns:
            the loss: a scalar, or a list of scalars. With `return_logits` (loss, outputs), where outputs are a list of
            the model's, one a micro batch, on ranks of the last stage, and None elsewhere. Without `compute_loss` the
            outputs take the place of the loss.

        Raises:
            InputError: an argument is none of these, or there is no data.
            StopIteration: the data had ended before the first item, on every rank.
            ModelError: the data ends inside the batch; a loss or an item is none.
        """
        if reduce_output not in ("avg", None):
            raise InputError(
                f"engine.eval_batch: reduce_output is {reduce_output!r}", hint='expected "avg" or None for all losses'
            )
        micros = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        if micros < 1:
            raise InputError(f"engine.eval_batch: num_micro_batches is {micros}", hint="expected at least 1")
        self._components.check_trains.check_there("engine.eval_batch")
        scheduled = self._components.scheduled
        items = self._draw(data_iter, micros, "engine.eval_batch")
        were_training = [module for module in self.module.modules() if module.training]
        self.module.eval()
        try:
            found = scheduled.evaluate(
                items, micros, scheduled.loss_fn if loss_fn is None else loss_fn, computes_loss=compute_loss
            )
        finally:
            for module in were_training:
                module.training = True
        outputs = [output for output, _ in found] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        losses = self._losses_of_all(found, micros)
        result: Any = losses.mean().float() if reduce_output else [loss.float() for loss in losses]
        if not (bcast_loss or self.is_last_stage()):
            result = None
        return (result, outputs) if return_logits else result

    def _refuse_parts(self, where: str, *_: Any, **__: Any) -> None:
        """Refuses a call that is for a model on one stage.

        Raises:
            PipelineError: there are several stages.
        """
        stages = self._mesh.pipe.size
        if stages > 1:
            raise PipelineError(
                f"{where}: the model is in {stages} pipeline stages, of which no rank has them all",
                hint="call engine.train_batch(data_iter), which runs all micro batches of a global batch and updates; "
                "engine.eval_batch(data_iter) to evaluate",
            )

    def _losses_of_all(self, found: list[Any], micros: int) -> Tensor:
        """Returns the loss of each micro batch, the mean over the ranks with samples of their own: fp64, [micros]."""
        losses = torch.zeros(micros, dtype=torch.float64, device=self._mesh.device)
        if found and self._mesh.counts_samples(self._components.scheduled.stages.rank_of[-1]):
            losses += torch.stack([loss for _, loss in found]).double()
        self._mesh.world.all_reduce(losses, label="losses of an evaluation").wait()
        return losses / self._mesh.batch.size

    def _draw(self, data_iter: Iterator[Any] | None, micros: int, where: str) -> list[Any]:
        """Returns the items of a global batch; ranks of a pipeline agree on whether there are enough, and on which.

        Enters an all-reduce of five numbers over the pipeline.
        """
        items: list[Any] = []
        if self._components.scheduled.draws:
            iterator = self._iterator(data_iter, where)
            for _ in range(micros):
                try:
                    item = draw(iterator, self._data.options.tell)
                except StopIteration:
                    break
                items.append(item if self._batch_source.batch_fn is None else self._batch_source.batch_fn(item))
        lacks = micros - len(items) if self._components.scheduled.draws else 0
        pipe = self._mesh.pipe
        if pipe.size > 1:
            digest = float(digest_of(items))
            told = [digest, -digest] if items else [-math.inf, -math.inf]
            mine = [float(lacks), float(micros), -float(micros), *told]
            most = torch.tensor(mine, dtype=torch.float64, device=self._mesh.device)
            pipe.all_reduce(most, op="max", label="items of a global batch").wait()
            with pipe.reading("items of a global batch"):
                found = most.tolist()
            if found[1] != -found[2]:
                raise ModelError(
                    f"{where}: the stages of a pipeline were called with {int(-found[2])} to {int(found[1])} micro "
                    "batches; expected the same number on all",
                    hint="give num_micro_batches and set_train_batch_size the same value on every rank",
                )
            lacks = int(found[0])
            if not lacks and found[3] != -found[4]:
                raise ModelError(
                    f"{where}: the stages of a pipeline have drawn different items, so activations of one batch would "
                    "meet labels of another",
                    hint="shard the data by engine.get_data_parallel_rank() of engine.dp_world_size, and shuffle it "
                    "alike on all stages; the loader that dsrun.initialize makes does",
                )
        if lacks == micros:
            raise StopIteration
        if lacks:
            raise ModelError(
                f"{where}: the data ends after {micros - lacks} of the {micros} micro batches of a global batch",
                hint="use dsrun.utils.RepeatingLoader, or a loader with a multiple of so many batches",
            )
        return items

    def _iterator(self, data_iter: Iterator[Any] | None, where: str) -> Iterator[Any]:
        if data_iter is not None:
            if not hasattr(data_iter, "__next__"):
                raise InputError(
                    f"{where}: data_iter is a {type(data_iter).__name__}, which is no iterator",
                    hint="pass iter(loader), made once: a new one would begin with the first batch again",
                )
            return data_iter
        source = self._batch_source
        if source.iterator is None:
            if self.training_dataloader is None:
                raise InputError(
                    f"{where}: there is no data", hint="pass data_iter=, or training_data= to dsrun.initialize"
                )
            source.iterator = iter(RepeatingLoader(self.training_dataloader))
        return source.iterator

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Says where `train_batch` and `eval_batch` take items from, where a call gives no iterator."""
        self._batch_source.iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Says which loader `train_batch` goes through, over and over."""
        self._batch_source.iterator = iter(RepeatingLoader(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Has every item go through a function first."""
        self._batch_source.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Accepts DeepSpeed's hint, which has no effect: tensors of any dtype go between stages."""

    def reset_activation_shape(self) -> None:
        """Accepts DeepSpeed's call, which has no effect: shapes go with every message."""

    def get_additional_losses(self) -> None:
        """Returns None: losses beside the model's own are not collected over stages."""

    @property
    def grid(self) -> PipelineParallelGrid:
        """This rank's place among stages and their copies; DeepSpeed's engines have it where there are stages."""
        module = self._components.scheduled.stages.module
        if isinstance(module, PipelineModule):
            return module.mpu()
        if self._grid is None:
            info, mesh = self._mesh.info, self._mesh
            topology = topology_of(stages=mesh.pipe.size, tensor=mesh.tensor.size, ranks=info.world_size)
            self._grid = PipelineParallelGrid(topology, job=JobRank(info.rank, info.world_size))
        return self._grid

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self._mesh.pipe.size

    @property
    def stage_id(self) -> int:
        """This rank's pipeline stage, from the inputs on."""
        return self._mesh.pipe.rank

    @property
    def micro_batches(self) -> int:
        """Micro batches of a global batch, on one pipeline."""
        return self.gradient_accumulation_steps()

    def get_pipeline_parallel_rank(self) -> int:
        """Returns this rank's pipeline stage."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Whether this rank has the first chunk of the model."""
        return 0 in self._components.scheduled.stages.own

    def is_last_stage(self) -> bool:
        """Whether this rank has the last chunk of the model, and so the loss."""
        stages = self._components.scheduled.stages
        return len(stages.rank_of) - 1 in stages.own
