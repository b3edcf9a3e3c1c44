"""Optimizers by their name in the config, and which classes may run on flat shards.

[Note: elementwise]
On a flat shard an optimizer sees slices of several tensors as one vector. That is exact for elementwise optimizers
only, whose update of an element reads that element alone. Others (LBFGS, Adafactor, Muon) need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim

from dsrun.errors import ModelError

_ELEMENTWISE = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.Rprop,
)

#: Takes parameters or group dicts, returns the optimizer.
OptimizerFactory = Callable[[Any], optim.Optimizer]


def factory_of(name: str, params: Mapping[str, Any], *, device: torch.device) -> OptimizerFactory:
    """Returns the factory of a config's `optimizer` section, already checked by the config.

    Args:
        name: `Adam`, `AdamW` or `SGD`, in any case. `Adam` with `adam_w_mode` (the default) is AdamW, as in DeepSpeed.
        params: the section's `params`.
        device: of the shards; torch's fused kernels run on the CPU and on CUDA.
    """
    options = dict(params)
    if name.lower() == "sgd":
        return lambda shards: optim.SGD(shards, **options, fused=True)
    decoupled = options.pop("adam_w_mode", True) or name.lower() == "adamw"
    # One kernel either way: torch's fused step is what `torch_adam` asks for.
    options.pop("torch_adam", None)
    options.pop("bias_correction", None)
    options["betas"] = tuple(options.get("betas", (0.9, 0.999)))
    kind = optim.AdamW if decoupled else optim.Adam
    options.setdefault("weight_decay", 0.0)
    return lambda shards: kind(shards, **options, fused=True)


def check_elementwise(optimizer: optim.Optimizer, *, allow_untested: bool) -> None:
    """Refuses an optimizer that may need whole tensors, see [Note: elementwise].

    Raises:
        ModelError: the class is not known to be elementwise and the config does not allow it.
    """
    if type(optimizer) not in _ELEMENTWISE and not allow_untested:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} is not known to be elementwise, and it would see flat shards",
            hint="use AdamW or SGD, or set `zero_allow_untested_optimizer` if each element's update reads it alone",
        )


def adopt(optimizer: optim.Optimizer, shards_by_group: list[list[nn.Parameter]]) -> None:
    """Puts shards in the place of the model's parameters in an optimizer that has not stepped yet.

    The optimizer object and its group dicts stay, so schedulers and references to it stay valid.

    Raises:
        ModelError: the optimizer has state already.
    """
    if optimizer.state:
        raise ModelError(
            "optimizer: it has taken a step before dsrun.initialize, and its state belongs to whole tensors",
            hint="pass a fresh optimizer, and load earlier state with engine.load_checkpoint",
        )
    for group, shards in zip(optimizer.param_groups, shards_by_group, strict=True):
        group["params"] = shards
        group.pop("param_names", None)
