"""`linear_cross_entropy`: a linear layer and its cross entropy in one, so that logits never exist whole.

Checks arguments, chooses code (`loss_kernels.py`) and calls it: our own (`chunked_loss.py`) or a library's
(`loss_libraries.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ..parallel.tensor.operators import gather_last
from ..parallel.tensor.vocabulary.part import VocabularyPart, vocabulary_of
from ..zero.hooks.outside import source_of
from .chunked_loss import LossOptions, chunked_loss
from .loss_kernels import LossCall, LossKernel, Reduction, choose_kernel, tokens_at_a_time
from .loss_libraries import installed, loss_by_library
from .uncompiled import uncompiled

_CALL = "linear_cross_entropy"


@uncompiled
def linear_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    kernel: LossKernel = "auto",
) -> Tensor:
    """Returns `F.cross_entropy(F.linear(hidden, weight_VD, bias).float(), targets, ...)` without whole logits.

    Gradients of hidden states and weight are made in the forward, chunk by chunk, and multiplied in backward; with
    `reduction="none"` backward makes the logits again. A backward through this backward is refused. Targets do not move
    by one position here. At ZeRO stage 3 read the weight as any module's, `self.head.weight`.

    A weight that tensor parallelism has cut over the vocabulary is recognised: targets are tokens of the whole, and the
    loss is that of the whole, on every rank. Only then are there collectives, of a few numbers a token, and in backward
    the sum of the hidden states' gradient; every rank of the tensor axis must call, with the same values.

    Args:
        hidden: shape [..., D], floating point.
        weight_VD: weight of the output layer, shape [V, D], dtype of `hidden` or, under autocast, any; where it is cut,
            the parameter itself and no copy of it.
        targets: int64, shape [...], in 0..V-1 or `ignore_index`.
        bias: shape [V]; cut as the weight is.
        ignore_index: target of tokens that do not count.
        reduction: `mean` over the tokens that count, `sum`, or `none`.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        softcap: logits become softcap * tanh(logits / softcap), in fp32.
        chunk_size: tokens at a time; None: about as many as make logits as large as the hidden states.
        kernel: `auto`, or by name `chunks` (plain torch), `torch` (from 2.13 on) or `liger` (CUDA).

    Returns:
        fp32, or fp64 for such hidden states: a scalar, or shape [...] with `reduction="none"`.

    Raises:
        ModelError: shapes, dtypes or values that do not fit; a kernel by name that is not there or cannot do this.
    Source: Liger Kernel (Hsu et al., 2024), section 3.2: gradients in the forward, by chunks of tokens.
    """
    _check(hidden, weight_VD, targets, bias)
    _check_values(reduction, label_smoothing, softcap, chunk_size)
    compute = _compute_dtype(hidden)
    if compute is None and any(given is not None and given.dtype != hidden.dtype for given in (weight_VD, bias)):
        raise ModelError(
            f"{_CALL}: hidden is {hidden.dtype}, weight {weight_VD.dtype}"
            + ("" if bias is None else f" and bias {bias.dtype}"),
            hint="convert one of them, or call inside torch.autocast",
        )
    compute = compute or hidden.dtype
    hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    tokens, width = hidden_ND.shape
    part = _part_of(weight_VD, bias)
    if part is not None and part.exact:
        weight_VD, bias = _whole(weight_VD, part), None if bias is None else _whole(bias, part)
        part = None
    vocab = weight_VD.shape[0] if part is None else part.whole
    options = LossOptions(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk=min(chunk_size or tokens_at_a_time(tokens, width, vocab), max(1, tokens)),
        compute=compute,
        part=part,
    )
    call = LossCall(
        device_type=hidden.device.type,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        is_cut=part is not None,
    )
    chosen = choose_kernel(kernel, call, installed=installed())
    if chosen == "chunks":
        loss = chunked_loss(hidden_ND, weight_VD, bias, targets_N, options)
    else:
        loss = loss_by_library(chosen, hidden_ND, weight_VD, bias, targets_N, options)
    return loss.view(targets.shape) if reduction == "none" else loss


def _compute_dtype(hidden: Tensor) -> torch.dtype | None:
    """Returns what autocast computes a linear layer in; None where it is off, or leaves fp64 alone."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


def _part_of(weight_VD: Tensor, bias_V: Tensor | None) -> VocabularyPart | None:
    """Returns this rank's part of a vocabulary that is cut; None where it is whole, on one rank too.

    Raises:
        ModelError: the weight is cut and the bias is not, or the other way round.
    """
    part = vocabulary_of(source_of(weight_VD))
    of_bias = part if bias_V is None else vocabulary_of(source_of(bias_V))
    if part != of_bias:
        raise ModelError(
            f"{_CALL}: of weight and bias, tensor parallelism has cut one over the vocabulary and not the other",
            hint="give both as the output layer has them: `head.weight` and `head.bias`",
        )
    return None if part is None or part.axis.size == 1 else part


def _whole(param: Tensor, part: VocabularyPart) -> Tensor:
    """Returns the whole weight or bias, of which each rank has some rows; enters an all-gather."""
    # Contiguous, for a product with a weight of other strides may add up in another order.
    return gather_last(param.movedim(0, -1), part.axis, whole=part.whole).movedim(-1, 0).contiguous()


def _check(hidden: Tensor, weight_VD: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raises ModelError unless shapes and dtypes fit each other."""
    shapes = f"hidden {_shape(hidden)}, weight {_shape(weight_VD)}, targets {_shape(targets)}"
    hint = "expected hidden [..., D], weight [V, D] and targets [...]"
    if hidden.dim() == 0 or weight_VD.dim() != 2 or hidden.shape[-1] != weight_VD.shape[1]:
        raise ModelError(f"{_CALL}: {shapes} do not fit", hint=hint)
    if targets.shape != hidden.shape[:-1]:
        raise ModelError(f"{_CALL}: {shapes} do not fit", hint=hint)
    if bias is not None and bias.shape != weight_VD.shape[:1]:
        raise ModelError(f"{_CALL}: bias is {_shape(bias)}; expected [{weight_VD.shape[0]}]")
    if targets.dtype != torch.int64:
        raise ModelError(f"{_CALL}: targets are {targets.dtype}; expected torch.int64", hint="call targets.long()")
    if not hidden.is_floating_point():
        raise ModelError(f"{_CALL}: hidden is {hidden.dtype}; expected floating point")


def _check_values(reduction: str, label_smoothing: float, softcap: float | None, chunk_size: int | None) -> None:
    """Raises ModelError unless each value is one that is allowed."""
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"{_CALL}: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ModelError(f"{_CALL}: label_smoothing is {label_smoothing}; expected 0 to 1")
    if softcap is not None and not softcap > 0.0:
        raise ModelError(f"{_CALL}: softcap is {softcap}; expected a number above 0")
    if chunk_size is not None and chunk_size < 1:
        raise ModelError(f"{_CALL}: chunk_size is {chunk_size}; expected a number of tokens above 0")


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"
