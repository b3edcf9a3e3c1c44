"""DeepSpeed's enumerations of places, states and stages. Scripts pass and compare them; dsrun itself uses the values.

Members are text or numbers, so they equal what a config says. `ZeroStageEnum` lies pickled in DeepSpeed's checkpoints:
see [Note: pickled names] in `loss_scalers.py`.
"""

from __future__ import annotations

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where parameters or optimizer states live."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What `engine.offload_states(include=...)` may name. lp: the dtype that forward reads; hp: that of masters."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, Enum):
    """What is sharded, by the number of the ZeRO stage."""

    __module__ = "deepspeed.runtime.zero.config"

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = weights
