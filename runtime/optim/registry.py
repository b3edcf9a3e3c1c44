"""How optimizers are made, by their name in the config, and which classes may run on flat shards.

What is known of one without torch stands in `dsrun.config.sections.optimizer_table`, by the same names.

[Note: elementwise]
On a flat shard an optimizer sees slices of several tensors as one vector. That is exact for elementwise optimizers,
whose update of an element reads that element alone, and for those that know what their leaves are made of
(`StructuredOptimizer`). Others (LBFGS, torch's Adafactor and Muon) need whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn, optim

from dsrun.config.knob import Section, Status
from dsrun.config.sections.optimizer_table import OPTIMIZER_ROWS, OptimizerRow, row_of
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

#: Takes parameters or group dicts, returns the optimizer.
OptimizerFactory = Callable[[Any], optim.Optimizer]
#: What makes it, and its arguments besides those of the config.
_Maker = tuple[Callable[..., optim.Optimizer], Mapping[str, Any]]
_Choice = Callable[[str, Mapping[str, Any]], _Maker]


@dataclass(frozen=True, slots=True)
class Factory:
    """How an optimizer is made.

    Attributes:
        kind: Class that is made.
        others: Further classes of the same arithmetic: made for some parameters, or by scripts.
        choose: Choice of what makes it, from the type and the parameters; None: `kind` does.
        choosers: Parameters that are for `choose` and no arguments.
    """

    kind: type[optim.Optimizer]
    others: tuple[type[optim.Optimizer], ...] = ()
    choose: _Choice | None = field(default=None, kw_only=True)
    choosers: tuple[str, ...] = field(default=(), kw_only=True)


def factory_of(name: str, params: Mapping[str, Any]) -> OptimizerFactory:
    """Returns the factory of a config's `optimizer` section, already checked by the config.

    torch's fused kernels run on the CPU and on CUDA, one launch for all shards of a group.

    Args:
        name: Type of the section, in upper or lower case. `Adam` means AdamW unless `adam_w_mode` is false, as in
            DeepSpeed.
        params: The section's `params`, defaults filled in.
    """
    row = row_of(name)
    assert row.params is not None, f"the config does not build {name}"
    factory = FACTORIES[row.name]
    make, fixed = (factory.kind, {}) if factory.choose is None else factory.choose(name, params)
    options = {key: value for key, value in params.items() if _is_argument(key, row.params, factory)}
    return lambda shards: make(shards, **options, **fixed)


def _is_argument(key: str, model: type[Section], factory: Factory) -> bool:
    """Whether a parameter reaches the class: it chooses none, and the config gives it a meaning."""
    return key not in factory.choosers and model.status_of(key) is Status.WORKS


def _always(make: Callable[..., optim.Optimizer]) -> _Choice:
    return lambda _name, _params: (make, {})


def _adam(name: str, params: Mapping[str, Any]) -> _Maker:
    decoupled = name.lower() == "adamw" or bool(params["adam_w_mode"])
    if not params.get("bias_correction", True):
        return UncorrectedAdam, {"decoupled_weight_decay": decoupled}
    return (optim.AdamW if decoupled else optim.Adam), {"fused": True}


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


#: One row an optimizer, by its own name.
FACTORIES: Mapping[str, Factory] = {
    "Adam": Factory(
        optim.AdamW,
        (optim.Adam, FusedAdam, DeepSpeedCPUAdam, UncorrectedAdam),
        choose=_adam,
        choosers=("adam_w_mode", "bias_correction"),
    ),
    "SGD": Factory(optim.SGD, choose=_always(_sgd)),
    "Adagrad": Factory(optim.Adagrad, (DeepSpeedCPUAdagrad,), choose=_always(_adagrad)),
    "Lamb": Factory(Lamb),
    "Lion": Factory(Lion),
    "Muon": Factory(Muon),
    "Adafactor": Factory(Adafactor),
    "AdamMini": Factory(AdamMini),
    "Adam8bit": Factory(Adam8bit),
    "AdamW8bit": Factory(Adam8bit),
    "Lion8bit": Factory(Lion8bit),
    "RMSprop": Factory(optim.RMSprop),
    "Adadelta": Factory(optim.Adadelta),
    "Adamax": Factory(optim.Adamax),
    "NAdam": Factory(optim.NAdam),
    "RAdam": Factory(optim.RAdam),
    "ASGD": Factory(optim.ASGD),
    "Rprop": Factory(optim.Rprop),
}

#: What is known of a class whose leaves step one by one. A class that inherits from one of these may do anything.
_ELEMENTWISE: Mapping[type[optim.Optimizer], OptimizerRow] = {
    kind: row
    for row in OPTIMIZER_ROWS
    if row.is_elementwise
    for kind in (FACTORIES[row.name].kind, *FACTORIES[row.name].others)
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
    known = _ELEMENTWISE.get(type(optimizer))
    if known is None or not known.states_decay:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} is not known to do with states in {form} "
            "(`zero_optimization.offload_optimizer.state_format`)",
            hint="use AdamW, Adam, Lion or SGD, whose states decay, or leave `state_format` out",
        )


def states_of_group(optimizer: optim.Optimizer, options: Mapping[str, Any]) -> int:
    """Returns how many states an optimizer keeps for each element of a group, 0 where that is not known.

    Args:
        optimizer: the optimizer.
        options: options of the optimizer group.
    """
    known = _ELEMENTWISE.get(type(optimizer))
    return 0 if known is None else round(known.states_with(options))


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
