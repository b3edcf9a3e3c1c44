"""DeepSpeed's classes of optimizers, to ask by `isinstance` what an engine has made of an optimizer. They do nothing.

Scripts of DeepSpeed get a wrapper around the optimizer, and choose their way by its class. dsrun hands out torch's own
optimizer; the engine notes on it the class that DeepSpeed would have made, which `isinstance` reads.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import optim

from dsrun.errors import ModelError

from ..optim.registry import check_elementwise


def is_zero_supported_optimizer(optimizer: optim.Optimizer) -> bool:
    """Returns whether an optimizer is known to fit sharded states, without `zero_allow_untested_optimizer`.

    Args:
        optimizer: Optimizer of a script.
    """
    try:
        check_elementwise(optimizer, allow_untested=False)
    except ModelError:
        return False
    return True


class _ToldByEngine(type):
    """Classes whose instances are the optimizers of which an engine says so, of this class or one below it."""

    def __instancecheck__(cls, instance: object) -> bool:
        name: Any = vars(instance).get("deepspeed_class") if hasattr(instance, "__dict__") else None
        return name is not None and any(name == kind.__name__ for kind in _below(cls))

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelError(
            f"{cls.__name__}: it is for isinstance alone; an engine shards and casts by itself",
            hint="give the optimizer to `initialize`, with the stage and dtype in the config",
        )


def _below(kind: type) -> list[type]:
    return [kind, *(further for child in type.__subclasses__(kind) for further in _below(child))]


class DeepSpeedOptimizer(metaclass=_ToldByEngine):
    """Any optimizer of an engine but one of fp32 without ZeRO, which DeepSpeed hands out as it is."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Optimizer whose states are sharded."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Optimizer at stage 1 or 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Optimizer at stage 3."""


class BF16_Optimizer(ZeROOptimizer):
    """Optimizer in bf16 at stage 1 without offload, where the config has gradients summed in fp32."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """`FusedAdam` in fp16 or bf16 without ZeRO."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Any other optimizer in fp16 or bf16 without ZeRO."""
