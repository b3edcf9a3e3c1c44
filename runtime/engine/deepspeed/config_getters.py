"""What an engine's config says, by the names under which DeepSpeed's engine is asked; what training has come to is in
`getters.py`.

Each answers with what holds here: a config that leaves a value out gets the answer that its default has.
"""

from __future__ import annotations

from typing import Any

import torch

from dsrun.config.config import Config
from dsrun.config.sections.offload import OffloadOptimizer, OffloadParam
from dsrun.config.sections.parallel import TensorParallel
from dsrun.config.sections.precision import Fp16

from ...precision.configured import autocast_of
from ...precision.policy import DTYPES
from ..model.sharded import ShardedModel
from ..update import Update

#: Optimizers whose names DeepSpeed gives in small letters, however the config writes them; in its order.
OWN_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")


def config_optimizer_name(settings: Config) -> str | None:
    """Returns the config's `optimizer.type`, DeepSpeed's own ones in small letters; None where there is none.

    Args:
        settings: the config.
    """
    if settings.optimizer is None:
        return None
    name = settings.optimizer.type
    return name.lower() if name.lower() in OWN_OPTIMIZERS else name


def dynamic_scale_args(fp16: Fp16) -> dict[str, Any]:
    """Returns how a dynamic loss scale is set, by DeepSpeed's words.

    Args:
        fp16: the config's section.
    """
    return {
        "init_scale": 2**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_scale": fp16.min_loss_scale,
    }


def compares_tags(settings: Config) -> bool:
    """Whether ranks compare the tags that they save under.

    Args:
        settings: the config.
    """
    return settings.checkpoint.tag_validation != "Ignore"


def fails_by_tags(settings: Config) -> bool:
    """Whether tags that differ are an error.

    Args:
        settings: the config.
    """
    return settings.checkpoint.tag_validation == "Fail"


class EpochCount:
    """What scripts tell of their epochs (DeepSpeed-Chat); seconds and samples are in the records.

    Attributes:
        epoch_count: Epochs that the script has told of.
    """

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1


class ConfigGetters:
    """What the config says."""

    _settings: Config
    _sharded: ShardedModel
    _update: Update
    _epochs: EpochCount
    global_rank: int

    def optimizer_name(self) -> str | None:
        """Class of the script's optimizer, or the config's `optimizer.type`; DeepSpeed's own ones in small letters."""
        if self._update.is_scripts:
            return type(self._update.optimizer).__name__
        return config_optimizer_name(self._settings)

    def optimizer_params(self) -> dict[str, Any] | None:
        """Parameters of the config's optimizer, as written; None where there are none."""
        return self._written("optimizer")

    def scheduler_name(self) -> str | None:
        """The config's `scheduler.type`; None where there is none."""
        section = self._settings.scheduler
        return None if section is None else section.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """Parameters of the config's schedule, as written; None where there are none."""
        return self._written("scheduler")

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro steps; else every `step` updates the parameters."""
        return self._settings.managed_gradient_accumulation

    def loss_scale(self) -> float:
        """The config's fixed loss scale; 0 for a dynamic one. The present one: `cur_scale`."""
        return self._settings.fp16.loss_scale

    def initial_dynamic_scale(self) -> int:
        """Loss scale that a dynamic one begins with."""
        return 2**self._settings.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How a dynamic loss scale is set, by DeepSpeed's words."""
        return dynamic_scale_args(self._settings.fp16)

    def fp16_auto_cast(self) -> bool:
        """Whether inputs are cast to fp16."""
        return self._settings.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        """Whether masters and sums of gradients are fp16."""
        return self._settings.fp16.fp16_master_weights_and_grads

    def bf16_master_weights_and_gradients(self) -> bool:
        """Whether masters and sums of gradients are bf16."""
        return self._settings.bf16.bf16_master_weights_and_grads

    def bf16_optimizer_states(self) -> bool:
        """Whether optimizer states are bf16."""
        return self._settings.bf16.bf16_optimizer_states

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under torch.autocast, as the config says."""
        return self._settings.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The autocast's dtype; None where there is none."""
        return autocast_of(self._settings)

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype that gradients travel in."""
        named = self._settings.communication_data_type
        return self._sharded.precision.compute if named is None else DTYPES[named]

    def gradient_predivide_factor(self) -> float:
        """Part of the division by the ranks that comes before the reduction."""
        return self._settings.gradient_predivide_factor

    def dataloader_drop_last(self) -> bool:
        """Whether the training loader leaves out a last batch that is not full."""
        return self._settings.dataloader_drop_last

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare the tags that they save under."""
        return compares_tags(self._settings)

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return fails_by_tags(self._settings)

    def zero_offload_optimizer(self) -> OffloadOptimizer | None:
        """Where the optimizer's state lies beside the device, as the config's section; None: nowhere."""
        section = self._settings.zero_optimization.offload_optimizer
        return None if section.device == "none" else section

    def zero_offload_param(self) -> OffloadParam | None:
        """Where slices of parameters lie beside the device, as the config's section; None: nowhere."""
        section = self._settings.zero_optimization.offload_param
        return None if section.device == "none" else section

    def zero_cpu_offload(self) -> bool:
        """Whether `offload_optimizer.device` is host memory."""
        return self._settings.zero_optimization.offload_optimizer.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer steps in host memory: its state lies there, or on a drive."""
        return self._settings.zero_optimization.offload_optimizer.device != "none"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's state lies on a drive."""
        return self._settings.zero_optimization.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> float | str:
        """Share of the optimizer's state that `offload_optimizer` takes off the device; "auto" where memory decides."""
        return self._settings.zero_optimization.offload_optimizer.ratio

    @property
    def tensor_parallel_config(self) -> TensorParallel:
        """How layers are cut over ranks, as the config's section."""
        return self._settings.tensor_parallel

    def autotp_size(self) -> int:
        """Ranks that share a layer; 0 or 1 where none is cut, as the config says it."""
        section = self._settings.tensor_parallel
        assert section.autotp_size != "auto", "a config with a size that nobody has said is not loaded"
        return section.autotp_size if section.size == 1 else section.size

    @property
    def tput_timer(self) -> EpochCount:
        """What counts the script's epochs."""
        return self._epochs

    def _written(self, section: str) -> dict[str, Any] | None:
        found: Any = self._settings.raw.get(section)
        return None if found is None else found.get("params")
