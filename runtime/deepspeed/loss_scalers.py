"""What lies pickled in DeepSpeed's checkpoints beside tensors: loss scalers, and places of parameters in flat buffers.

An engine of dsrun has its own loss scale (`runtime/precision/loss_scale.py`) and writes none of these. Scripts read
them from checkpoints of DeepSpeed, name them as safe for `torch.load`, or scale a loss by them themselves.

[Note: pickled names] A pickle has the path of a class, and `torch.serialization.add_safe_globals` compares that path
with the `__module__` of the class that it was given. So these classes bear the module that DeepSpeed has them in, which
is where the face gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.errors import InputError, ModelError
from dsrun.log_on_ranks import logger

from .gradients import a_gradient_overflows

_FACTOR = 2.0
#: Keys of `dynamic_loss_args`.
INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScalerBase:
    """A loss scale.

    Args:
        cur_scale: Scale.

    Attributes:
        dynamic: Whether the scale follows overflows.
    """

    __module__ = "deepspeed.runtime.fp16.loss_scaler"

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def scale_gradient(self, module: object, grad_in: Iterable[Tensor], grad_out: object) -> tuple[Tensor, ...]:
        """Returns the gradients of a backward hook, scaled.

        Args:
            module: Module that the hook is on; not read.
            grad_in: Gradients.
            grad_out: Gradients of the module's output; not read.
        """
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns a loss, scaled."""
        return loss * self.loss_scale

    def update_scale(self, overflow: bool) -> None:
        """Takes note of a step; a fixed scale stays.

        Args:
            overflow: Whether a gradient was inf or nan.
        """
        if overflow:
            logger.warning("a gradient is inf or nan: the step is left out")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward of a loss, scaled.

        Args:
            loss: Loss.
            retain_graph: Whether another backward follows.
        """
        scaled: Any = self.scale_loss(loss)
        scaled.backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A fixed scale.

    Args:
        scale: Scale.
    """

    __module__ = "deepspeed.runtime.fp16.loss_scaler"

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Returns False: a fixed scale asks for no step to be left out.

        Args:
            params: Parameters; not read.
        """
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that doubles after steps without overflow, and halves after overflows.

    Args:
        init_scale: First scale.
        scale_window: Steps without overflow after which the scale doubles.
        min_scale: Lowest scale.
        delayed_shift: Overflows before the scale halves.
        consecutive_hysteresis: Whether each step without overflow restores that number of overflows.
        raise_error_at_min_scale: Whether an overflow at the lowest scale is an error.
        dtype: Dtype of what is trained.
    """

    __module__ = "deepspeed.runtime.fp16.loss_scaler"

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = _FACTOR
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dynamic = True
        self.dtype = dtype

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Returns whether a gradient of this process is inf or nan; of an engine's parameters every rank must call.

        Args:
            params: Parameters whose gradients are looked at.
        """
        return a_gradient_overflows(params)

    def update_scale(self, overflow: bool) -> None:
        """Changes the scale after a step.

        Args:
            overflow: Whether a gradient was inf or nan.

        Raises:
            ModelError: The scale is at its lowest already.
        """
        if overflow:
            self._overflowed()
        else:
            self._passed()
        self.cur_iter += 1

    def _overflowed(self) -> None:
        self.last_overflow_iter = self.cur_iter
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            logger.info("overflow at loss scale %g: the step is left out", self.cur_scale)
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise ModelError(
                f"loss scale: gradients overflow at {self.cur_scale:g}, the lowest scale",
                hint="lower the learning rate, or train in bf16",
            )
        scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        logger.info("overflow at loss scale %g: the step is left out, the next scale is %g", self.cur_scale, scale)
        self.cur_scale = scale

    def _passed(self) -> None:
        since = self.cur_iter - self.last_overflow_iter - 1
        doubles = since > 0 and since % self.scale_window == 0
        if self.consecutive_hysteresis or doubles:
            self.cur_hysteresis = self.delayed_shift
        if doubles:
            self.cur_scale *= self.scale_factor


def create_loss_scaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerBase:
    """Makes a loss scaler; what is not fp16 has a scale of 1.

    Args:
        dtype: Dtype of what is trained.
        static_loss_scale: Scale, where it is fixed.
        dynamic_scaling: Whether the scale follows overflows.
        dynamic_loss_args: Arguments of `DynamicLossScaler`.

    Raises:
        InputError: A scale that follows overflows has no arguments.
    """
    if dtype != torch.float16:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise InputError(
            "CreateLossScaler: dynamic_loss_args is None",
            hint=f"give {INITIAL_LOSS_SCALE}, {SCALE_WINDOW}, {MIN_LOSS_SCALE}, {DELAYED_SHIFT} and "
            f"{CONSECUTIVE_HYSTERESIS}",
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


@dataclass
class fragment_address:
    """Place of a parameter in a flat buffer.

    Attributes:
        numel: Elements.
        start: Index of the first one.
    """

    numel: int
    start: int


# Not in its body: `dataclass` looks the module up, and it is there in drop-in mode alone.
fragment_address.__module__ = "deepspeed.utils.tensor_fragment"
