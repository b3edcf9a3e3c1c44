"""What scripts ask an engine, by DeepSpeed's names: batch sizes, counters, rates, stage, dtypes. Nothing is done here.

What scripts written for DeepSpeed may ask for in vain stands in `missing.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from dsrun.config.batch import BatchSizes
from dsrun.config.config import Config
from dsrun.errors import InputError

from ..model.sharded import ShardedModel
from ..progress import Progress
from ..update import Update


class Getters:
    """What an engine says about itself."""

    _progress: Progress
    _settings: Config
    _sharded: ShardedModel
    _update: Update
    dp_world_size: int

    def train_batch_size(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self._progress.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one rank in one forward."""
        return self._progress.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro steps in one optimizer step."""
        return self._progress.batch.accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the accumulation steps so that the global batch has this many samples.

        Raises:
            InputError: it is no multiple of micro batch x ranks.
        """
        micro_batch = self._progress.batch.micro_batch
        round_size = micro_batch * self.dp_world_size
        if train_batch_size < round_size or train_batch_size % round_size:
            raise InputError(
                f"train_batch_size {train_batch_size} is no multiple of micro batch {micro_batch} x "
                f"data-parallel size {self.dp_world_size}",
                hint=f"use a multiple of {round_size}",
            )
        self._progress.batch = BatchSizes(train_batch_size, micro_batch, train_batch_size // round_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro batch; accumulation steps stay, so the global batch changes with it.

        It is a count for samples and loaders made from now on: batches of a loader that exists keep their size.

        Raises:
            InputError: it is not positive.
        """
        if micro_batch_size < 1:
            raise InputError(
                f"set_train_micro_batch_size: micro_batch_size is {micro_batch_size}", hint="use 1 or more"
            )
        steps = self._progress.batch.accumulation_steps
        self._progress.batch = BatchSizes(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; None before the first step."""
        return None if self._progress.last is None else self._progress.last.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return self._update.learning_rates()

    def get_mom(self) -> list[Any]:
        """Momentum of each group, or its betas where the optimizer has those; None for a group that has neither."""
        optimizer = self._update.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    @property
    def micro_steps(self) -> int:
        """Calls of `step`."""
        return self._progress.counters.micro_steps

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones included."""
        return self._progress.counters.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all ranks in all optimizer steps."""
        return self._progress.counters.global_samples

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps whose update was left out."""
        return self._progress.counters.skipped_steps

    @property
    def cur_scale(self) -> float:
        """By which the next loss is multiplied before its backward: 1 without fp16."""
        return self._update.loss_scale.value

    @property
    def overflow(self) -> bool:
        """Whether the last optimizer step was left out because a gradient was inf or nan."""
        return self._progress.last is not None and not self._progress.last.applied

    def dynamic_loss_scale(self) -> bool:
        """Whether there is a loss scale that follows overflows."""
        return self._update.loss_scale.is_dynamic

    def zero_optimization_stage(self) -> int:
        """ZeRO stage."""
        return self._settings.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._sharded.plan.shard_optimizer

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self._sharded.plan.shard_gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self._sharded.plan.shard_parameters

    def load_universal_checkpoint(self) -> bool:
        """Whether `load_checkpoint` without a tag loads the checkpoint that `latest_universal` names."""
        return self._settings.checkpoint.load_universal

    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 for none."""
        return self._update.clipping

    def steps_per_print(self) -> int | None:
        """Optimizer steps between printed lines; None for none."""
        return self._settings.steps_per_print

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self._sharded.precision.compute == torch.bfloat16

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._sharded.precision.compute == torch.float16
