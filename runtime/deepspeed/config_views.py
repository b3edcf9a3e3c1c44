"""A config under the names of DeepSpeed's config classes: `DeepSpeedConfig(source)` and the sections in it.

Values are those that dsrun trains with: read, checked and completed by `dsrun.config`, so a default that differs from
DeepSpeed's differs here too: `overlap_comm`, `stage3_prefetch_bucket_size` and their like are None where the config
leaves them out, for dsrun then decides by itself. Nothing can be set: an engine reads the config that it was given, and
not such a view.
What DeepSpeed's classes have and dsrun has no meaning for is an AttributeError that says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from dsrun.config.axes import axes_of
from dsrun.config.batch import solve
from dsrun.config.config import Config
from dsrun.config.knob import Section
from dsrun.config.load import load
from dsrun.config.sections.training import REMOVED_SECTIONS, Training
from dsrun.config.text.source import ConfigSource
from dsrun.contract.environment import stands_for_deepspeed
from dsrun.errors import InputError
from dsrun.log_on_ranks import logger

from ..engine.deepspeed.config_getters import (
    OWN_OPTIMIZERS,
    compares_tags,
    config_optimizer_name,
    dynamic_scale_args,
    fails_by_tags,
)
from ..precision.policy import DTYPES

_SET = "it is a view of a config that was read: change the dict or file, and read that"
#: Keys that a lone section needs beside it to be a config.
_AROUND: Mapping[str, Any] = {"train_micro_batch_size_per_gpu": 1}


class SectionView:
    """A section of a config, read only; `SectionView(key=value, ...)` checks a section by itself.

    Args:
        **values: The section, as in a config.

    Raises:
        ConfigError: A key or value is wrong.
    """

    #: Where a section of this class stands in a config, which may have other keys beside it.
    _path: ClassVar[tuple[str, ...]] = ()
    _beside: ClassVar[Mapping[str, Any]] = {}
    _section: Section

    def __init__(self, **values: Any) -> None:
        if not self._path:
            raise TypeError(f"{type(self).__name__} is a section of a config that was read: use DeepSpeedConfig(...)")
        document: dict[str, Any] = {**self._beside, self._path[-1]: values}
        for key in reversed(self._path[:-1]):
            document = {key: document}
        settings = load({**_AROUND, **document}, as_deepspeed=stands_for_deepspeed())
        vars(self)["_section"] = _look_up(settings, ".".join(self._path))

    @classmethod
    def of(cls, section: Section) -> SectionView:
        """Returns the view of a section that was checked."""
        view = cls.__new__(cls)
        vars(view)["_section"] = section
        return view

    def model_dump(self) -> dict[str, Any]:
        """Returns the section as a dict, by the names of today's keys."""
        return self._section.model_dump()

    def __getattr__(self, name: str) -> Any:
        section: Section | None = vars(self).get("_section")
        if section is None or name.startswith("__"):
            raise AttributeError(name)
        kind = type(section)
        key = kind.renamed.get(name, name)
        if key not in kind.model_fields:
            reason = kind.removed.get(name) or kind.dropped.get(name)
            raise AttributeError(f"{type(self).__name__} has no `{name}`{f': {reason}' if reason else ''}")
        value = getattr(section, key)
        if isinstance(value, Section):
            return _VIEWS.get(type(value).__name__, SectionView).of(value)
        return value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {_SET}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *type(self._section).model_fields, *type(self._section).renamed})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SectionView) and self._section == other._section

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as of other values that are compared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.model_dump().items())})"


class _OffloadView(SectionView):
    @property
    def nvme_path(self) -> Path | tuple[Path, ...] | None:
        """The folder, or folders that are striped over."""
        names: Any = self._section.nvme_path  # pyright: ignore[reportAttributeAccessIssue]  # both sections have it
        paths = tuple(map(Path, names or ()))
        return paths[0] if len(paths) == 1 else paths or None


class DeepSpeedZeroOffloadParamConfig(_OffloadView):
    """`zero_optimization.offload_param`."""

    _path = ("zero_optimization", "offload_param")
    _beside: ClassVar = {"stage": 3}


class DeepSpeedZeroOffloadOptimizerConfig(_OffloadView):
    """`zero_optimization.offload_optimizer`."""

    _path = ("zero_optimization", "offload_optimizer")
    _beside: ClassVar = {"stage": 3}

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing goes on beside the step."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(SectionView):
    """`zero_optimization`; `prefetch_bucket_size` and its like are also known by their keys, `stage3_...`."""

    _path = ("zero_optimization",)

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """The section; None where the config has none."""
        return self._if_given("offload_param")

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """The section; None where the config has none."""
        return self._if_given("offload_optimizer")

    def _if_given(self, key: str) -> Any:
        section: Section = getattr(self._section, key)
        return _VIEWS[type(section).__name__].of(section) if key in self._section.model_fields_set else None


class DeepSpeedFP16Config(SectionView):
    """`fp16`."""

    _path = ("fp16",)

    def initial_dynamic_scale(self) -> int:
        """Returns the first loss scale, where it follows overflows."""
        return 2**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Returns the arguments of `DynamicLossScaler`."""
        fp16: Any = self._section
        return dynamic_scale_args(fp16)


class DeepSpeedBF16Config(SectionView):
    """`bf16`."""

    _path = ("bf16",)


class DeepSpeedActivationCheckpointingConfig(SectionView):
    """`activation_checkpointing`."""

    _path = ("activation_checkpointing",)


class DeepSpeedMonitorConfig:
    """The sections of what shows numbers of a run.

    Args:
        settings: Config.

    Attributes:
        tensorboard: Section `tensorboard`.
        csv_monitor: Section `csv_monitor`.
        wandb: Section `wandb`.
        comet: Section `comet`.
        enabled: Whether one of them is switched on.
    """

    def __init__(self, settings: Config) -> None:
        self.tensorboard = SectionView.of(settings.tensorboard)
        self.csv_monitor = SectionView.of(settings.csv_monitor)
        self.wandb = SectionView.of(settings.wandb)
        self.comet = SectionView.of(settings.comet)
        self.enabled = any(view.enabled for view in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


#: Views by the class of the section that they show; others are plain ones.
_VIEWS: Mapping[str, type[SectionView]] = {
    "ActivationCheckpointing": DeepSpeedActivationCheckpointingConfig,
    "Bf16": DeepSpeedBF16Config,
    "Fp16": DeepSpeedFP16Config,
    "OffloadOptimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "OffloadParam": DeepSpeedZeroOffloadParamConfig,
    "ZeroOptimization": DeepSpeedZeroConfig,
}

#: Attributes of a config that are called otherwise than their keys, by the key.
_KEYS: Mapping[str, str] = {
    "activation_checkpointing_config": "activation_checkpointing",
    "autotuning_config": "autotuning",
    "bfloat16_config": "bf16",
    "bfloat16_enabled": "bf16.enabled",
    "buffer_dtype": "data_types.buffer_dtype",
    "checkpoint_config": "checkpoint",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "comms_config": "comms_logger",
    "compile_config": "compile",
    "data_efficiency_config": "data_efficiency",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "expert_parallel_config": "expert_parallel",
    "float16_config": "fp16",
    "flops_profiler_config": "flops_profiler",
    "fp16_config": "fp16",
    "fp16_enabled": "fp16.enabled",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "keep_in_fp32_modules": "data_types.keep_in_fp32_modules",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "param_dtype": "data_types.param_dtype",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
}
#: Attributes that are their keys.
_SAME = (
    *("disable_allgather", "disable_python_gc", "dataloader_drop_last", "dump_state", "gradient_allreduce_op"),
    *("gradient_clipping", "gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation"),
    *("memory_breakdown", "prescale_gradients", "steps_per_print", "wall_clock_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
#: What DeepSpeed's class has, or had, and dsrun has no meaning for.
_REASONS: Mapping[str, str] = {
    "amp_enabled": REMOVED_SECTIONS["amp"],
    "amp_params": REMOVED_SECTIONS["amp"],
    "compression_config": REMOVED_SECTIONS["compression_training"],
    "curriculum_enabled_legacy": REMOVED_SECTIONS["curriculum_learning"],
    "curriculum_params_legacy": REMOVED_SECTIONS["curriculum_learning"],
    "datastates_config": Training.why_of("datastates_ckpt"),
    "eigenvalue_enabled": REMOVED_SECTIONS["eigenvalue"],
    "elasticity_enabled": REMOVED_SECTIONS["elasticity"],
    "graph_harvesting": REMOVED_SECTIONS["graph_harvesting"],
    "mics_shard_size": "use `zero_hpz_partition_size` for shards inside a node",
    "nebula_config": REMOVED_SECTIONS["nebula"],
    "optimizer_legacy_fusion": "there is one implementation of each optimizer",
    "pld_enabled": REMOVED_SECTIONS["progressive_layer_drop"],
    "pld_params": REMOVED_SECTIONS["progressive_layer_drop"],
    "sparse_attention": REMOVED_SECTIONS["sparse_attention"],
    "sparse_gradients_enabled": REMOVED_SECTIONS["sparse_gradients"],
    "weight_quantization_config": Training.why_of("weight_quantization"),
}
#: Names of optimizers, which DeepSpeed writes in lower case.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUON_OPTIMIZER = "muon"
MUSGD_OPTIMIZER = "musgd"
DEEPSPEED_OPTIMIZERS = list(OWN_OPTIMIZERS)


class DeepSpeedConfig:
    """A training config, read, with its batch sizes for the ranks that there are.

    Args:
        config: Path of a file, base64 of JSON, or a dict.
        mpu: Object that says how many ranks see different samples, by `get_data_parallel_world_size`, or of all ranks
            how many share a sequence, by `get_sequence_parallel_world_size`.
        mesh_device: Device mesh with a dim `data_parallel`.

    Attributes:
        world_size: Ranks that see different samples.
        global_rank: This rank; 0 outside of a job.
        train_batch_size: Samples of all ranks in one optimizer step.
        train_micro_batch_size_per_gpu: Samples of one rank in one forward.
        gradient_accumulation_steps: Micro steps in one optimizer step.

    Raises:
        ConfigError: Everything that is wrong with the config.
        InputError: The ranks of `mpu` do not divide.
    """

    world_size: int
    global_rank: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    _settings: Config

    def __init__(self, config: ConfigSource, mpu: Any = None, mesh_device: Any = None) -> None:
        has_ranks = dist.is_available() and dist.is_initialized()
        ranks = dist.get_world_size() if has_ranks else 1
        settings = load(config, as_deepspeed=stands_for_deepspeed())
        if mpu is None and mesh_device is None:
            size = axes_of(settings, ranks).role_size("batch")
        else:
            size = _batch_ranks(mpu, mesh_device, ranks)
        batch = solve(
            settings.train_batch_size,
            settings.train_micro_batch_size_per_gpu,
            settings.gradient_accumulation_steps,
            data_parallel_size=size,
            place=f"{settings.batch_place()}: ",
        )
        vars(self).update(
            world_size=size,
            global_rank=dist.get_rank() if has_ranks else 0,
            train_batch_size=batch.train_batch_size,
            train_micro_batch_size_per_gpu=batch.micro_batch,
            gradient_accumulation_steps=batch.accumulation_steps,
            _settings=settings,
        )

    def __getattr__(self, name: str) -> Any:
        settings: Config | None = vars(self).get("_settings")
        if settings is None or name.startswith("__"):
            raise AttributeError(name)
        if name in _COMPUTED:
            return _COMPUTED[name](settings)
        if name in _KEYS or name in _SAME:
            value = _look_up(settings, _KEYS.get(name, name))
            return _VIEWS.get(type(value).__name__, SectionView).of(value) if isinstance(value, Section) else value
        reason = f": {_REASONS[name]}" if name in _REASONS else ""
        raise AttributeError(f"{type(self).__name__} has no `{name}`{reason}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {_SET}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_COMPUTED, *_KEYS, *_SAME})

    def print_user_config(self) -> None:
        """Logs the config as it was given."""
        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=str))

    def print(self, name: str) -> None:
        """Logs all there is, a line each, and the config as it was given.

        Args:
            name: Heading.
        """
        logger.info("%s:", name)
        for attribute, value in self._lines():
            logger.info("  %s %s %s", attribute, "." * max(1, 29 - len(attribute)), value)
        self.print_user_config()

    def _lines(self) -> Iterator[tuple[str, Any]]:
        own = {*vars(self), *_COMPUTED, *_KEYS, *_SAME} - {"_settings", "_param_dict"}
        return ((attribute, getattr(self, attribute)) for attribute in sorted(own))


def _batch_ranks(mpu: Any, mesh_device: Any, ranks: int) -> int:
    if mpu is None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    if hasattr(mpu, "get_data_parallel_world_size"):
        return mpu.get_data_parallel_world_size()
    shared = mpu.get_sequence_parallel_world_size()
    if ranks % shared:
        raise InputError(
            f"DeepSpeedConfig: {ranks} ranks are no multiple of the {shared} that share a sequence, as mpu says",
            hint="use a number of ranks that divides",
        )
    return ranks // shared


def _look_up(settings: Section, path: str) -> Any:
    found: Any = settings
    for key in path.split("."):
        found = getattr(found, key)
    return found


def _given_params(section: Any) -> dict[str, Any] | None:
    """Returns what a config says about an optimizer or scheduler; None where it says nothing."""
    return None if section is None else section.params.model_dump(mode="json", exclude_unset=True) or None


def _autocast_dtype(settings: Config) -> Any:
    name = settings.torch_autocast.dtype
    return None if name is None else DTYPES[{"bfloat16": "bf16", "float16": "fp16"}[name.removeprefix("torch.")]]


def _dtype(name: str | None) -> Any:
    return None if name is None else DTYPES[name]


#: Attributes that are worked out of a config.
_COMPUTED: Mapping[str, Callable[[Config], Any]] = {
    "_param_dict": lambda settings: settings.given,
    "aio_config": lambda settings: settings.aio.model_dump(),
    "checkpoint_tag_validation_enabled": compares_tags,
    "checkpoint_tag_validation_fail": fails_by_tags,
    "communication_data_type": lambda settings: _dtype(settings.communication_data_type),
    "monitor_config": DeepSpeedMonitorConfig,
    "optimizer_name": config_optimizer_name,
    "optimizer_params": lambda settings: _given_params(settings.optimizer),
    "pipeline": lambda settings: settings.pipeline.model_dump(),
    "scheduler_name": lambda settings: None if settings.scheduler is None else settings.scheduler.type,
    "scheduler_params": lambda settings: _given_params(settings.scheduler),
    "seq_parallel_communication_data_type": lambda settings: _dtype(settings.seq_parallel_communication_data_type),
    "torch_autocast_dtype": _autocast_dtype,
    "zero_enabled": lambda settings: settings.zero_optimization.stage > 0,
}


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Returns the section `zero_optimization` of a config, checked by itself.

    Args:
        param_dict: Config.

    Raises:
        ConfigError: A key or value of the section is wrong.
    """
    return DeepSpeedZeroConfig(**param_dict.get("zero_optimization", {}))
