"""Optimizers by their name in the config, and which classes may run on flat shards.

[Note: elementwise]
On a flat shard an optimizer sees slices of several tensors as one vector. That is exact for elementwise optimizers
only, whose update of an element reads that element alone. Others (LBFGS, Adafactor, Muon) need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, optim

from dsrun.errors import ModelError

#: With the number of states each keeps for an element, besides those of `_MORE_STATES`.
_ELEMENTWISE: dict[type[optim.Optimizer], int] = {
    optim.Adam: 2,
    optim.AdamW: 2,
    optim.SGD: 0,
    optim.Adagrad: 1,
    optim.RMSprop: 1,
    optim.Adadelta: 2,
    optim.Adamax: 2,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.ASGD: 1,
    optim.Rprop: 2,
}
#: Options that cost one state more, where an optimizer has them.
_MORE_STATES = ("momentum", "amsgrad", "centered")

#: Takes parameters or group dicts, returns the optimizer.
OptimizerFactory = Callable[[Any], optim.Optimizer]


def factory_of(name: str, params: Mapping[str, Any]) -> OptimizerFactory:
    """Returns the factory of a config's `optimizer` section, already checked by the config.

    torch's fused kernels run on the CPU and on CUDA, one launch for all shards of a group.

    Args:
        name: `Adam`, `AdamW` or `SGD`, in any case. `Adam` means AdamW unless `adam_w_mode` is false, as in DeepSpeed.
        params: the section's `params`, defaults filled in.
    """
    common: dict[str, Any] = {"lr": params["lr"], "weight_decay": params["weight_decay"], "fused": True}
    if name.lower() == "sgd":
        sgd = {**common, **{key: params[key] for key in ("momentum", "dampening", "nesterov")}}
        return lambda shards: optim.SGD(shards, **sgd)
    options: dict[str, Any] = {**common, "betas": tuple(params["betas"]), "eps": params["eps"]}
    kind = optim.AdamW if params["adam_w_mode"] or name.lower() == "adamw" else optim.Adam
    return lambda shards: kind(shards, **options)


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


def states_of_group(optimizer: optim.Optimizer, options: Mapping[str, Any]) -> int:
    """Returns how many states an optimizer keeps for each element of a group, 0 where that is not known.

    Args:
        optimizer: the optimizer.
        options: of the group.
    """
    known = _ELEMENTWISE.get(type(optimizer))
    return 0 if known is None else known + sum(bool(options.get(option)) for option in _MORE_STATES)


def states_per_element(optimizer: optim.Optimizer | None) -> int:
    """Returns how many states an optimizer keeps for each element, 0 where that is not known; the most of any group."""
    if optimizer is None:
        return 0
    return max((states_of_group(optimizer, group) for group in optimizer.param_groups), default=0)


def adopt(optimizer: optim.Optimizer, shards_by_group: list[list[nn.Parameter]]) -> None:
    """Puts shards in the place of the model's parameters in an optimizer that has not stepped yet.

    The optimizer object and its group dicts stay, so schedulers and references to it stay valid.

    Raises:
        ModelError: the optimizer has state already: it has stepped, or makes state when it is made (Adagrad).
    """
    if optimizer.state:
        raise ModelError(
            f"optimizer: this {type(optimizer).__name__} holds state already, which belongs to whole tensors",
            hint="pass a fresh one, or a function that makes it (optimizer=lambda groups: ...); "
            "load earlier state with engine.load_checkpoint",
        )
    for group, shards in zip(optimizer.param_groups, shards_by_group, strict=True):
        group["params"] = shards
        group.pop("param_names", None)
