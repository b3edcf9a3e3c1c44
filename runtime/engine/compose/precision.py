"""The dtypes that a model computes in: what the config asks, applied to the model's layers around its parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dsrun.config.config import Config

from ...precision.built import changed_dtypes
from ...precision.configured import policy_of
from ...precision.fp8 import use_fp8
from ...precision.fp32_modules import cast_at_borders
from ...precision.linear import use_memory_efficient_linear
from ...precision.policy import PrecisionPolicy
from ..model.sharded import ShardedModel


def apply_precision(
    model: nn.Module, settings: Config, device: torch.device, say: Callable[[str], None]
) -> PrecisionPolicy:
    """Returns the dtypes of parameters and masters; layers that compute in fp8 are put in, and changes are told.

    Args:
        model: the model, before it is sharded.
        settings: the config.
        device: device that the model computes on.
        say: callback that prints a message once for the whole job, on rank 0.
    """
    if settings.fp8.enabled:
        use_fp8(model, settings.fp8, device)
    precision = policy_of(settings)
    for change in changed_dtypes(model, settings, precision):
        say(change)
    return precision


def cast_around_modules(sharded: ShardedModel) -> None:
    """Casts what passes between parts of a sharded model that compute in different dtypes."""
    settings = sharded.settings
    autocast = settings.torch_autocast.enabled and settings.zero_optimization.memory_efficient_linear
    if sharded.plan.shard_parameters and autocast:
        use_memory_efficient_linear(sharded.module)
    cast_at_borders(sharded.module, sharded.kept, sharded.precision.compute)
