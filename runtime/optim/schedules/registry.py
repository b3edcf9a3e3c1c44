"""Schedules by their name in the config: DeepSpeed's five, and torch's that a config can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import lr_scheduler

from .cycle import LRRangeTest, OneCycle
from .warm_up import WarmupCosineLR, WarmupDecayLR, WarmupLR

#: Names of those that DeepSpeed has; clients look whether a scheduler's class is one of them.
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
#: Each takes the optimizer and the section's `params`; all have `step`, `state_dict` and `load_state_dict`.
SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
    "StepLR": lr_scheduler.StepLR,
    "MultiStepLR": lr_scheduler.MultiStepLR,
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lr_scheduler.ExponentialLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "CosineAnnealingWarmRestarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "OneCycleLR": lr_scheduler.OneCycleLR,
}
