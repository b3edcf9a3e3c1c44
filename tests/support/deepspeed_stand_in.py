"""A module named `deepspeed` made of dsrun's functions, for libraries that import it by that name; in a child process.

It has what transformers calls where a model is built and loaded at stage 3, and no more.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

import dsrun
import dsrun.comm
import dsrun.zero


class HfConfig:
    """What `transformers.integrations.HfDeepSpeedConfig` is to transformers, which keeps a weak reference to it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        """Whether models are to be built in slices."""
        return self.config["zero_optimization"]["stage"] == 3


def install() -> None:
    """Lets `import deepspeed` find dsrun, until this process ends."""
    partitioning: Any = _module("deepspeed.runtime.zero.partition_parameters")
    # DeepSpeed casts what is built in `zero.Init`, and transformers takes `arange` out of that. Nothing is cast here.
    partitioning.zero_wrapper_for_fp_tensor_constructor = lambda fn, *args, **kwargs: fn
    partitioning._orig_torch_arange = torch.arange
    accelerator: Any = _module("deepspeed.accelerator")
    accelerator.get_accelerator = _Accelerator
    root: Any = _module("deepspeed")
    root.zero, root.comm, root.initialize = dsrun.zero, dsrun.comm, dsrun.initialize
    root.accelerator = accelerator
    runtime: Any = _module("deepspeed.runtime")
    runtime.zero = _module("deepspeed.runtime.zero")
    runtime.zero.partition_parameters = partitioning


class _Accelerator:
    """The processor."""

    def current_device_name(self) -> str:
        return "cpu"


def _module(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name))
