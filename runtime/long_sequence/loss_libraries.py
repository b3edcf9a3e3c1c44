"""Calls of what others have for a linear layer with its cross entropy: torch from 2.13 on, and Liger on CUDA.

Nothing is imported before it is asked for; whether a call can go there is decided in `loss_kernels.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .chunked_loss import LossOptions
from .loss_kernels import LossKernel


def installed() -> dict[LossKernel, bool]:
    """Returns which of the libraries' kernels are there."""
    in_torch = hasattr(torch.nn.functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")
    return {"torch": in_torch, "liger": importlib.util.find_spec("liger_kernel") is not None}


def loss_by_library(
    kernel: LossKernel,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    options: LossOptions,
) -> Tensor:
    """Returns the loss, fp32 or wider: a scalar, or [N] with `reduction="none"`.

    Args:
        kernel: `torch` or `liger`.
        hidden_ND: hidden states, shape [N, D], of any dtype; converted, as are weight and bias, to the dtype of the
            matrix products.
        weight_VD: the weight.
        bias_V: bias of the linear layer, shape [V]; None for none.
        targets_N: int64.
        options: options of the loss; Liger chooses its own chunks.

    Raises:
        ModuleNotFoundError: Liger is not installed.
    """
    compute = options.compute
    run = _by_torch if kernel == "torch" else _by_liger
    bias = None if bias_V is None else bias_V.to(compute)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        loss = run(hidden_ND.to(compute), weight_VD.to(compute), bias, targets_N, options)
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def _by_torch(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, options: LossOptions
) -> Tensor:
    function: Any = getattr(torch.nn.functional, "linear_cross_entropy")  # noqa: B009  # not known to torch 2.10
    chunks: Any = getattr(torch.nn, "LinearCrossEntropyOptions")  # noqa: B009
    loss: Tensor = function(
        hidden_ND,
        weight_VD,
        targets_N,
        linear_bias=bias_V,
        reduction=options.reduction,
        ignore_index=options.ignore_index,
        options=chunks(batch_chunk_size=options.chunk, allow_retain_graph=True),
    )
    return loss


def _by_liger(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, options: LossOptions
) -> Tensor:
    functional: Any = importlib.import_module("liger_kernel.transformers.functional")
    loss: Tensor = functional.liger_fused_linear_cross_entropy(
        hidden_ND,
        weight_VD,
        targets_N,
        bias_V,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction=options.reduction,
        softcap=options.softcap,
    )
    return loss
