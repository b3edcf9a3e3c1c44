"""Shapes of configs that are out there, rewritten, each with the verdict it must keep getting."""

from __future__ import annotations

from typing import Any

import pytest

from dsrun.config.findings import Code, Severity
from dsrun.config.load import inspect

#: What is worth a line in a log, by key; notes are left out.
Verdict = dict[str, tuple[Severity, Code]]

ERROR, WARNING = Severity.ERROR, Severity.WARNING

TUNED_STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}

CORPUS: dict[str, tuple[dict[str, Any], Verdict]] = {
    "vision-language stage 3, everything auto": (
        {
            "fp16": {"enabled": "auto", **SCALE},
            "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": TUNED_STAGE_3,
        },
        {
            "fp16.enabled": (ERROR, Code.AUTO),
            "bf16.enabled": (ERROR, Code.AUTO),
            "": (WARNING, Code.BATCH),
        },
    ),
    "the same with bf16 decided and a batch": (
        {
            "fp16": {"enabled": "auto", "auto_cast": True, **SCALE},
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": "auto",
            "zero_optimization": TUNED_STAGE_3,
        },
        {},
    ),
    "language model pre-training with a second switch": (
        {
            "train_batch_size": 1440,
            "train_micro_batch_size_per_gpu": 30,
            "gradient_accumulation_steps": 6,
            "optimizer": {"type": "Adam", "params": {"lr": 9.7e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
            "fp16": {"fp16": True, "enabled": False, "loss_scale": 0},
            "zero_optimization": {"stage": 1, "allgather_partitions": True, "cpu_offload": False},
        },
        {
            "fp16.fp16": (WARNING, Code.OLD_SPELLING),
            "zero_optimization.cpu_offload": (WARNING, Code.OLD_SPELLING),
        },
    ),
    "the tutorial's first config": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "wall_clock_breakdown": False,
        },
        {},
    ),
    "bf16 with the loss scale of fp16": (
        {"train_batch_size": 8, "bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}},
        {
            "bf16.loss_scale": (WARNING, Code.OLD_SPELLING),
            "bf16.hysteresis": (WARNING, Code.OLD_SPELLING),
        },
    ),
    "research code with Apex beside": (
        {
            "train_micro_batch_size_per_gpu": 32,
            "gradient_accumulation_steps": None,
            "amp": {"enabled": False, "opt_level": "O2"},
            "flops_profiler": {"enabled": False, "profile_step": -1},
            "optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-4}},
        },
        {"amp": (WARNING, Code.REMOVED), "optimizer.adam_w_mode": (ERROR, Code.UNKNOWN_KEY)},
    ),
    "what a trainer builds in code": (
        {
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": float("inf"),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
            },
        },
        {},
    ),
    "parameters offloaded at stage 2": (
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}},
        },
        {"zero_optimization.offload_param.device": (WARNING, Code.NO_EFFECT)},
    ),
    "stage 3 keys without their prefix": (
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 3, "gather_16bit_weights_on_model_save": True, "max_live_parameters": 1e9},
        },
        {
            "zero_optimization.gather_16bit_weights_on_model_save": (WARNING, Code.OLD_SPELLING),
            "zero_optimization.max_live_parameters": (WARNING, Code.OLD_SPELLING),
        },
    ),
    "keys in the wrong place": (
        {
            "train_batch_size": 8,
            "log": {"steps_per_print": 10},
            "offload_optimizer": {"device": "cpu"},
            "loss_scale": 0,
            "monitor_config": {},
        },
        {
            "log": (ERROR, Code.UNKNOWN_KEY),
            "offload_optimizer": (ERROR, Code.UNKNOWN_KEY),
            "loss_scale": (ERROR, Code.UNKNOWN_KEY),
            "monitor_config": (ERROR, Code.UNKNOWN_KEY),
        },
    ),
    "sizes computed from the hidden size by hand": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 943718.4}},
        {"zero_optimization.stage3_prefetch_bucket_size": (ERROR, Code.BAD_VALUE)},
    ),
    "compression after training": (
        {"train_batch_size": 8, "compression_training": {"weight_quantization": {"shared_parameters": {}}}},
        {"compression_training": (ERROR, Code.REMOVED)},
    ),
    "curriculum by sequence length": (
        {
            "train_batch_size": 8,
            "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "num_workers": 0}},
        },
        {"data_efficiency.enabled": (ERROR, Code.PLANNED)},
    ),
    "tensor parallel size at the wrong level": (
        {"train_batch_size": 8, "tensor_parallel": {"tp_size": 4}},
        {"tensor_parallel.tp_size": (WARNING, Code.OLD_SPELLING)},
    ),
    "compile as it was": (
        {"train_batch_size": 8, "compile": {"disable": False, "backend": "inductor"}},
        {
            "compile.disable": (WARNING, Code.OLD_SPELLING),
            "compile.backend": (WARNING, Code.OLD_SPELLING),
        },
    ),
    "an SSD tuned by the documented, dead key": (
        {"train_batch_size": 8, "aio": {"thread_count": 1, "block_size": 1048576, "queue_depth": 8}},
        {"aio.thread_count": (WARNING, Code.OLD_SPELLING), "aio": (WARNING, Code.NO_EFFECT)},
    ),
}


@pytest.mark.parametrize(("config", "verdict"), CORPUS.values(), ids=CORPUS)
def test_a_known_shape_keeps_its_verdict(config: dict[str, Any], verdict: Verdict) -> None:
    findings = inspect(config, world_size=8).findings
    assert {f.key: (f.severity, f.code) for f in findings if f.severity is not Severity.NOTE} == verdict
