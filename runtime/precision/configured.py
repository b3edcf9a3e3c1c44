"""From the config's sections to dtypes and a loss scale. What the sections may hold is checked by the config."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsrun.config.config import Config

from .loss_scale import LossScale, ScaleRules
from .policy import BF16, BF16_MASTERS, DTYPES, FP16, FP16_MASTERS, FP32, PURE_BF16, PrecisionPolicy

#: Of autocast in float16 over a model in fp32, which has no keys for them: the numbers of `torch.amp.GradScaler`.
_AUTOCAST_RULES = ScaleRules(initial=2.0**16, window=2000, hysteresis=1, consecutive=False, minimum=1.0)


def policy_of(config: Config) -> PrecisionPolicy:
    """Returns the dtypes that the config asks for."""
    sums, buffers = config.data_types.grad_accum_dtype, config.data_types.buffer_dtype
    policy = _policy_of_mode(config)
    policy = policy if sums is None else replace(policy, sums=DTYPES[sums])
    return policy if buffers is None else replace(policy, buffers=DTYPES[buffers])


def _policy_of_mode(config: Config) -> PrecisionPolicy:
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled:
        return FP16_MASTERS if fp16.fp16_master_weights_and_grads else FP16
    if not bf16.enabled:
        return FP32
    if not bf16.bf16_master_weights_and_grads:
        return BF16
    return PURE_BF16 if bf16.bf16_optimizer_states else BF16_MASTERS


def autocast_of(config: Config) -> torch.dtype | None:
    """Returns the dtype that `torch.autocast` uses around forward; None where there is none."""
    section = config.torch_autocast
    if not section.enabled:
        return None
    return torch.float16 if section.dtype in ("float16", "torch.float16") else torch.bfloat16


def product_dtype_of(config: Config) -> torch.dtype:
    """Returns the dtype of the operands of most products in forward and backward: autocast's, or the parameters'."""
    return autocast_of(config) or policy_of(config).compute


def skips_non_finite(config: Config) -> bool:
    """Whether a step whose gradients hold inf or nan leaves its update out."""
    is_fp16 = config.fp16.enabled or autocast_of(config) == torch.float16
    return is_fp16 or (config.bf16.enabled and config.bf16.check_grad_overflow)


def loss_scale_of(config: Config) -> LossScale:
    """Returns the loss scale at the first step: 1 without fp16."""
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScale(rules=_AUTOCAST_RULES if autocast_of(config) == torch.float16 else None)
    if fp16.loss_scale > 0:
        return LossScale(fp16.loss_scale)
    rules = ScaleRules(
        initial=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )
    return LossScale(rules=rules)
