"""Optimizers by their name in the config, and which classes may run on flat shards.

[Note: elementwise]
On a flat shard an optimizer sees slices of several tensors as one vector. That is exact for elementwise optimizers,
whose update of an element reads that element alone, and for those that know what their leaves are made of
(`StructuredOptimizer`). Others (LBFGS, torch's Adafactor and Muon) need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, optim

from dsrun.errors import ModelError

from .algorithms.adafactor import Adafactor
from .algorithms.adam_mini import AdamMini
from .algorithms.deepspeed_classes import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, FusedAdam
from .algorithms.eight_bit import Adam8bit, Lion8bit
from .algorithms.lamb import Lamb
from .algorithms.lion import Lion
from .algorithms.muon import Muon
from .algorithms.uncorrected_adam import UncorrectedAdam
from .structure.base import StructuredOptimizer

#: With the number of states each keeps for an element, besides those of `_MORE_STATES`.
_ELEMENTWISE: dict[type[optim.Optimizer], int] = {
    optim.Adam: 2,
    optim.AdamW: 2,
    FusedAdam: 2,
    DeepSpeedCPUAdam: 2,
    optim.SGD: 0,
    optim.Adagrad: 1,
    DeepSpeedCPUAdagrad: 1,
    optim.RMSprop: 1,
    optim.Adadelta: 2,
    optim.Adamax: 2,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.ASGD: 1,
    optim.Rprop: 2,
    Lion: 1,
    UncorrectedAdam: 2,
}
#: Whose states are means that decay, so that rounding them once a step is forgotten too.
_ROUNDED = (optim.Adam, optim.AdamW, FusedAdam, DeepSpeedCPUAdam, UncorrectedAdam, optim.SGD, Lion)
#: Options that cost one state more, where an optimizer has them.
_MORE_STATES = ("momentum", "amsgrad", "centered")

#: Takes parameters or group dicts, returns the optimizer.
OptimizerFactory = Callable[[Any], optim.Optimizer]

#: Keys of the config that say which class to make, or that the config has refused or given no meaning.
_NOT_ARGUMENTS = ("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states", "per_head_muon")


def factory_of(name: str, params: Mapping[str, Any]) -> OptimizerFactory:
    """Returns the factory of a config's `optimizer` section, already checked by the config.

    torch's fused kernels run on the CPU and on CUDA, one launch for all shards of a group.

    Args:
        name: of a row of the table, in any case. `Adam` means AdamW unless `adam_w_mode` is false, as in DeepSpeed.
        params: the section's `params`, defaults filled in.
    """
    kind, fixed = _TABLE[name.lower()](params)
    dropped = _NOT_ARGUMENTS if kind is not Lamb else ("amsgrad",)
    given = {key: value for key, value in params.items() if key not in dropped}
    options: dict[str, Any] = {**given, **fixed}
    return lambda shards: kind(shards, **options)


_FUSED: Mapping[str, Any] = {"fused": True}
_Row = tuple[Callable[..., optim.Optimizer], Mapping[str, Any]]


def _row(kind: Callable[..., optim.Optimizer], fixed: Mapping[str, Any] | None = None) -> Callable[[Any], _Row]:
    return lambda _: (kind, fixed or {})


def _adam(params: Mapping[str, Any]) -> _Row:
    decoupled = bool(params["adam_w_mode"])
    if not params.get("bias_correction", True):
        return UncorrectedAdam, {"decoupled_weight_decay": decoupled}
    return (optim.AdamW if decoupled else optim.Adam), _FUSED


def _adamw(params: Mapping[str, Any]) -> _Row:
    return _adam({**params, "adam_w_mode": True})


def _adagrad(shards: Any, **options: Any) -> optim.Optimizer:
    """torch's fused Adagrad runs on the CPU only."""
    optimizer = optim.Adagrad(shards, **options)
    for group in optimizer.param_groups:
        group["fused"] = all(param.device.type == "cpu" for param in group["params"]) or None
    return optimizer


def _sgd(shards: Any, **options: Any) -> optim.Optimizer:
    """torch's fused SGD, but in bf16 and fp16 on the CPU, where torch 2.13 mixes up momentum and reads beyond it."""
    optimizer = optim.SGD(shards, **options)
    for group in optimizer.param_groups:
        is_wrong = any(param.device.type == "cpu" and param.dtype.itemsize == 2 for param in group["params"])
        group["fused"] = None if is_wrong else True
    return optimizer


#: One row a type of the config: parameters to (class, arguments besides the parameters).
_TABLE: Mapping[str, Callable[[Mapping[str, Any]], _Row]] = {
    "adam": _adam,
    "adamw": _adamw,
    "fusedadam": _adam,
    "deepspeedcpuadam": _adam,
    "sgd": _row(_sgd),
    "adagrad": _row(_adagrad),
    "deepspeedcpuadagrad": _row(_adagrad),
    "lamb": _row(Lamb),
    "fusedlamb": _row(Lamb),
    "lion": _row(Lion),
    "fusedlion": _row(Lion),
    "deepspeedcpulion": _row(Lion),
    "muon": _row(Muon),
    "muonwithauxadam": _row(Muon),
    "adafactor": _row(Adafactor),
    "adammini": _row(AdamMini),
    "adam8bit": _row(Adam8bit),
    "adamw8bit": _row(Adam8bit),
    "lion8bit": _row(Lion8bit),
    "rmsprop": _row(optim.RMSprop),
    "adadelta": _row(optim.Adadelta),
    "adamax": _row(optim.Adamax),
    "nadam": _row(optim.NAdam),
    "radam": _row(optim.RAdam),
}


def check_elementwise(optimizer: optim.Optimizer, *, allow_untested: bool) -> None:
    """Refuses an optimizer that may need whole tensors, see [Note: elementwise].

    Raises:
        ModelError: the class is not known to be elementwise and the config does not allow it.
    """
    is_known = type(optimizer) in _ELEMENTWISE or isinstance(optimizer, StructuredOptimizer)
    if not is_known and not allow_untested:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} is not known to be elementwise, and it would see flat shards",
            hint="use one of the config's (`dsrun config explain optimizer.type`), or set "
            "`zero_allow_untested_optimizer` if each element's update reads it alone",
        )


def check_range_by_range(optimizer: optim.Optimizer) -> None:
    """Refuses an optimizer that must see all leaves in one step, or of which that is not known; see `windowed.py`.

    Raises:
        ModelError: naming its class.
    """
    if type(optimizer) not in _ELEMENTWISE:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} is not known to step leaf by leaf, and masters or sums of "
            "gradients are in another number format than it computes in",
            hint="leave `data_types.grad_accum_dtype` and 16-bit master weights out, or use one of torch's elementwise "
            "optimizers, such as AdamW",
        )


def check_rounded_states(optimizer: optim.Optimizer, form: str) -> None:
    """Refuses an optimizer whose states are lost in fewer bits, or of which that is not known.

    Adagrad's sums only grow: what is added is below their last place soon.

    Raises:
        ModelError: naming its class.
    """
    if type(optimizer) not in _ROUNDED:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} is not known to do with states in {form} "
            "(`zero_optimization.offload_optimizer.state_format`)",
            hint="use AdamW, Adam, Lion or SGD, whose states decay, or leave `state_format` out",
        )


def states_of_group(optimizer: optim.Optimizer, options: Mapping[str, Any]) -> int:
    """Returns how many states an optimizer keeps for each element of a group, 0 where that is not known.

    Args:
        optimizer: the optimizer.
        options: of the group.
    """
    known = _ELEMENTWISE.get(type(optimizer))
    return 0 if known is None else known + sum(bool(options.get(option)) for option in _MORE_STATES)


def states_per_element(optimizer: optim.Optimizer | None) -> float:
    """Returns how many states an optimizer keeps for each element, counted in fp32; the most of any group.

    0 where that is not known. Of one that knows its tensors, the mean over those that it has.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, StructuredOptimizer):
        return optimizer.states_per_element()
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
