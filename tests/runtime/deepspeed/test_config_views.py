"""A config under DeepSpeed's names: values are DeepSpeed's where the config gives them, else dsrun's.

Expected values were recorded from DeepSpeed 0.19.8: `DeepSpeedConfig(GIVEN, mpu=Ranks(4))` in a job of one rank.
"""

from __future__ import annotations

import copy
import json
import logging
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import dsrun
from dsrun.errors import ConfigError, InputError
from dsrun.runtime.deepspeed.config_views import (
    DeepSpeedBF16Config,
    DeepSpeedConfig,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    SectionView,
    get_zero_config,
)
from dsrun.runtime.deepspeed.offload_names import OffloadDeviceEnum, ZeroStageEnum
from support.ranks import run_ranks

GIVEN: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "prescale_gradients": True,
    "communication_data_type": "bf16",
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "fp16": {"enabled": True, "loss_scale_window": 500, "hysteresis": 3, "initial_scale_power": 12},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "nvme", "nvme_path": "/tmp/x", "max_in_cpu": 5},
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 77,
        "stage3_max_live_parameters": 9000,
        "reduce_bucket_size": 12345,
        "sub_group_size": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
    "checkpoint": {"tag_validation": "Fail"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "dataloader_drop_last": True,
}
RECORDED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "world_size": 4,
    "global_rank": 0,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "prescale_gradients": True,
    "communication_data_type": torch.bfloat16,
    "seq_parallel_communication_data_type": torch.float32,
    "zero_allow_untested_optimizer": True,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.001, "betas": [0.8, 0.9]},
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 10},
    "float16_config.enabled": True,
    "float16_config.loss_scale_window": 500,
    "float16_config.hysteresis": 3,
    "float16_config.loss_scale": 0.0,
    "bfloat16_config.enabled": False,
    "zero_enabled": True,
    "zero_optimization_stage": 3,
    "zero_config.stage": 3,
    "zero_config.offload_optimizer.device": "cpu",
    "zero_config.offload_optimizer.pin_memory": False,
    "zero_config.offload_optimizer.buffer_count": 4,
    "zero_config.offload_param.device": "nvme",
    "zero_config.offload_param.nvme_path": Path("/tmp/x"),
    "zero_config.offload_param.max_in_cpu": 5,
    "zero_config.prefetch_bucket_size": 1000,
    "zero_config.param_persistence_threshold": 77,
    "zero_config.max_live_parameters": 9000,
    "zero_config.reduce_bucket_size": 12345,
    "zero_config.sub_group_size": 1000,
    "zero_config.gather_16bit_weights_on_model_save": True,
    "zero_config.zenflow": None,
    "activation_checkpointing_config.cpu_checkpointing": True,
    "activation_checkpointing_config.number_checkpoints": 4,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "grad_accum_dtype": "fp32",
    "dataloader_drop_last": True,
    "wall_clock_breakdown": False,
    "torch_autocast_enabled": False,
    "torch_autocast_dtype": None,
    "monitor_config.enabled": False,
    "monitor_config.wandb.project": "deepspeed",
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "load_universal_checkpoint": False,
    "hybrid_engine.enabled": False,
    "compile_config.deepcompile": False,
    "flops_profiler_config.enabled": False,
    "managed_gradient_accumulation": True,
}
MICRO = {"train_micro_batch_size_per_gpu": 2}


class Ranks:
    """What says how many ranks see different samples."""

    def __init__(self, count: int) -> None:
        self.get_data_parallel_world_size = lambda: count


class Sharing:
    """What says how many ranks share a sequence."""

    def __init__(self, count: int) -> None:
        self.get_sequence_parallel_world_size = lambda: count


@pytest.fixture(scope="module")
def given() -> DeepSpeedConfig:
    return DeepSpeedConfig(GIVEN, mpu=Ranks(4))


@pytest.mark.parametrize("path", RECORDED)
def test_a_value_is_what_deepspeed_reads(given: DeepSpeedConfig, path: str) -> None:
    assert attrgetter(path)(given) == RECORDED[path]


@pytest.mark.parametrize(
    ("batch", "triple"),
    # As 0.19.8 completes them on four ranks.
    [
        ({"train_batch_size": 32}, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (32, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, (60, 3, 5)),
    ],
)
def test_batch_sizes_are_completed_for_the_ranks(batch: dict[str, int], triple: tuple[int, int, int]) -> None:
    found = DeepSpeedConfig(batch, mpu=Ranks(4))
    sizes = (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)
    assert sizes == triple


def test_a_batch_that_does_not_divide_or_is_not_said_is_an_error() -> None:
    with pytest.raises(ConfigError, match="data-parallel size 4"):
        DeepSpeedConfig({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}, mpu=Ranks(4))
    with pytest.raises(ConfigError, match="how large a batch is"):
        DeepSpeedConfig({"zero_optimization": {"stage": 1}})


def _in_a_job() -> None:
    dsrun.init_distributed()
    found = DeepSpeedConfig(MICRO)
    assert (found.world_size, found.train_batch_size) == (2, 4)
    assert found.global_rank == torch.distributed.get_rank()
    assert DeepSpeedConfig(MICRO, mpu=Sharing(2)).world_size == 1
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "sequence_parallel"))
    assert DeepSpeedConfig(MICRO, mesh_device=mesh).world_size == 1
    with pytest.raises(InputError, match="2 ranks are no multiple of the 3 that share a sequence"):
        DeepSpeedConfig(MICRO, mpu=Sharing(3))


def test_the_ranks_are_those_of_the_job() -> None:
    run_ranks(2, _in_a_job)


def test_a_file_is_read_as_a_dict_is(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GIVEN))
    found = DeepSpeedConfig(str(path), mpu=Ranks(4))
    assert found.zero_config == DeepSpeedConfig(GIVEN, mpu=Ranks(4)).zero_config
    assert found._param_dict == GIVEN


def test_sections_are_of_the_classes_that_scripts_ask_for(given: DeepSpeedConfig) -> None:
    assert isinstance(given.zero_config, DeepSpeedZeroConfig)
    assert isinstance(given.zero_config.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(given.zero_config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(given.fp16_config, DeepSpeedFP16Config)
    assert isinstance(given.bfloat16_config, DeepSpeedBF16Config)
    assert given.zero_config.stage == ZeroStageEnum.weights
    assert given.zero_config.offload_optimizer.device == OffloadDeviceEnum.cpu
    assert given.zero_config.offload_optimizer.pipeline
    assert given.zero_config.model_dump()["stage3_prefetch_bucket_size"] == 1000
    # Recorded from 0.19.8, too.
    assert given.float16_config.dynamic_loss_scale_args() == {
        "init_scale": 4096,
        "scale_window": 500,
        "delayed_shift": 3,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    }


def test_an_offload_section_that_is_not_given_is_none_and_one_without_a_device_is_not() -> None:
    assert DeepSpeedConfig(MICRO).zero_config.offload_optimizer is None
    zero = get_zero_config({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})
    assert zero.offload_optimizer is not None
    assert zero.offload_optimizer.device == "none"
    assert zero.offload_param is None


def test_a_section_is_checked_by_itself() -> None:
    zero = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=10)
    assert (zero.stage, zero.prefetch_bucket_size) == (3, 10)
    assert DeepSpeedZeroOffloadOptimizerConfig(device="cpu", pin_memory=False).pin_memory is False
    assert DeepSpeedFP16Config(enabled=True).initial_dynamic_scale() == 1 << 16
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage` is 4"):
        DeepSpeedZeroConfig(stage=4)
    with pytest.raises(ConfigError, match=r"offload_param\.devise"):
        DeepSpeedZeroOffloadParamConfig(devise="cpu")
    with pytest.raises(TypeError, match="DeepSpeedConfig"):
        SectionView(enabled=True)


def test_what_has_no_meaning_here_says_so_and_hasattr_tells_the_truth(given: DeepSpeedConfig) -> None:
    assert not hasattr(given, "pld_enabled")
    with pytest.raises(AttributeError, match="no `pld_enabled`: drop layers in the model itself"):
        _ = given.pld_enabled
    with pytest.raises(AttributeError, match="DeepSpeedZeroConfig has no `mics_shard_size`: use `zero_hpz_partition"):
        _ = given.zero_config.mics_shard_size
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig has no `no_such`$"):
        _ = given.no_such
    assert all(hasattr(given, name) for name in dir(given))
    assert all(hasattr(given.zero_config, name) for name in dir(given.zero_config))


def test_nothing_can_be_set_for_nobody_would_read_it(given: DeepSpeedConfig) -> None:
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig\.train_batch_size cannot be set: it is a view"):
        given.train_batch_size = 1
    with pytest.raises(AttributeError, match=r"DeepSpeedZeroConfig\.stage cannot be set"):
        given.zero_config.stage = 1


def test_a_view_can_be_copied(given: DeepSpeedConfig) -> None:
    assert copy.deepcopy(given).zero_config == given.zero_config
    assert copy.copy(given.fp16_config) == given.fp16_config


def test_all_values_are_printed(given: DeepSpeedConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dsrun"):
        given.print("the config")
    lines = [record.message for record in caplog.records]
    assert lines[0] == "the config:"
    assert "  world_size ................... 4" in lines
    assert json.loads(lines[-1].partition("json = ")[2]) == GIVEN
