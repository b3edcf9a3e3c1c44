"""Linear layers that keep no 16-bit copy of their weight for backward, with torch's own bits.

Under `torch.autocast` a linear layer computes with a 16-bit copy of its fp32 weight. torch keeps that copy twice: for
backward, and in autocast's cache until forward has ended, evaluation included. At stage 3 that is the whole model in 16
bits on every rank, where its parameters are cut. Here the copy is made again in backward, of the weight as it is
gathered then. Without autocast torch saves the parameter itself, and nothing is done differently.

Which modules a model has is not looked at here but for `use_memory_efficient_linear`, and no copy of an input is saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import in_transform


def memory_efficient_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns what `torch.nn.functional.linear` does, and so do its gradients, bit for bit.

    Args:
        x: [..., in], of any number of dimensions above 0.
        weight: [out, in]; must hold its values in backward too, and may be frozen.
        bias: [out], or None.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    # Autocast leaves those alone; and transforms of torch.func take no function of our own.
    if weight.dtype == dtype or weight.dtype == torch.float64 or in_transform():
        return F.linear(x, weight, bias)
    # Autocast's own casts, made where autograd sees them: only the weight's is to be forgotten.
    x = x if x.dtype == torch.float64 else x.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    made = _Linear.apply(x, weight, bias, dtype)
    assert isinstance(made, Tensor), "an autograd function of one output"
    return made


class MemoryEfficientLinear(nn.Linear):
    """`nn.Linear` by `memory_efficient_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        return memory_efficient_linear(input, self.weight, self.bias)


def use_memory_efficient_linear(model: nn.Module) -> int:
    """Gives the model's linear layers the class above; parameters, hooks and names stay. Returns how many there were.

    Subclasses of `nn.Linear` compute in their own ways and are left alone, compiled layers too.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = MemoryEfficientLinear
    return len(layers)


class _Linear(torch.autograd.Function):
    """y = x w^T + b in `dtype`, in which x and b are already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.dtype = dtype
        ctx.x_shape, ctx.weight_dtype = x.shape, weight.dtype
        # torch takes another kernel for some inputs where a weight is trained: that is told by the copy's own flag.
        cast = weight.detach().to(dtype).requires_grad_(weight.requires_grad)
        with torch.enable_grad():
            return F.linear(x.detach(), cast, bias.detach() if bias is not None else None).detach()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """The products that torch's own backward makes, in its order."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        is_vector = len(ctx.x_shape) == 1
        grad_NO = grad if is_vector else grad.reshape(-1, grad.shape[-1])
        x_grad = weight_grad = bias_grad = None
        if needs_x:
            cast = weight.to(ctx.dtype)
            x_grad = cast.t().mv(grad_NO) if is_vector else grad_NO.mm(cast).view(ctx.x_shape)
        if needs_weight:
            product = grad_NO.outer(x) if is_vector else grad_NO.t().mm(x.reshape(-1, x.shape[-1]))
            weight_grad = product.to(ctx.weight_dtype)
        if needs_bias:
            bias_grad = grad_NO if is_vector else grad_NO.sum(0)
        return x_grad, weight_grad, bias_grad, None
