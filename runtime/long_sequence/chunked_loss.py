"""Cross entropy of a linear layer, some tokens at a time, in plain torch: the code for every device and format.

Which arguments are right, and when a library's code runs in place of this one, is decided in `cross_entropy.py`.
Shapes: N tokens, C tokens of a chunk, D width, V vocabulary.

[Note: gradients in the forward]
A chunk's logits, their gradient, and the products of that with weight and hidden states are made one after the other in
the forward, and the logits are gone before the next chunk's begin. Backward multiplies by the gradient of the loss.
With `reduction="none"` each token's loss has a gradient of its own, which the forward cannot know: backward makes the
logits again.

[Note: scaling by powers of two]
The mean divides by the number of tokens, and 1 / N of a small probability is below what fp16 can hold. So the forward
divides by N over the largest power of two in it, a number between 1 and 2, and backward by the power of two. That is
exact, so with one chunk gradients have the bits of the plain computation.

[Note: sums over chunks]
The weight's gradient is a sum over all tokens. In 16 bits each chunk's product is rounded as the plain computation's
is, and the products are added up in fp32.

[Note: cut vocabularies]
Where ranks of the tensor axis have a part of the weight's rows each, V counts those of this rank. A chunk's losses are
agreed on by two small all-reduces (`parallel/tensor/cross_entropy.py`), and its gradients by none. Each rank's rows
give a part of the gradient of the hidden states, and the parts are added up over the axis in backward, once a call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..optim.structure.exact_sums import power_of_two
from ..parallel.tensor.operators import share_input
from ..parallel.tensor.vocabulary.cross_entropy import cut_cross_entropy
from ..parallel.tensor.vocabulary.part import VocabularyPart
from ..second_runs import SecondRun, running_again
from .loss_kernels import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """How a loss is computed.

    Attributes:
        reduction: reduction over the tokens: `mean`, `sum` or `none`.
        ignore_index: target of tokens that do not count.
        label_smoothing: share of the target that is spread over the vocabulary.
        softcap: logits become softcap * tanh(logits / softcap); None for as they are.
        chunk: tokens at a time.
        compute: dtype of the matrix products.
        part: this rank's part of a vocabulary that is cut, see [Note: cut vocabularies]; None where it is whole.
    """

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    chunk: int
    compute: torch.dtype
    part: VocabularyPart | None = None


def chunked_loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, options: LossOptions
) -> Tensor:
    """Returns the loss, fp32 or wider: a scalar, or [N] with `reduction="none"`; see [Note: gradients in the forward].

    Collectives only where the vocabulary is cut: two all-reduces a chunk, over the part's axis, and one of [N, D] in
    backward if the hidden states want a gradient. With `reduction="none"` backward repeats those of the chunks.

    Args:
        hidden_ND: hidden states, shape [N, D], of any dtype.
        weight_VD: weight of the linear layer, shape [V, D], of any dtype; its gradient is rounded to that dtype once.
        bias_V: bias of the linear layer, shape [V]; None for none.
        targets_N: int64, tokens of the whole vocabulary.
        options: options of the loss.
    """
    if options.part is not None:
        hidden_ND = share_input(hidden_ND, options.part.axis)
    given = (hidden_ND, weight_VD, bias_V)
    wanted = tuple(torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in given)
    function = _PerToken if options.reduction == "none" else _Reduced
    made: Any = function.apply(hidden_ND, weight_VD, bias_V, targets_N, options, wanted)
    return made


class _LossArguments(TypedDict):
    ignore_index: int
    reduction: Reduction
    label_smoothing: float


@dataclass(slots=True)
class _Layer:
    """The linear layer in the dtype of the products, and what is wanted of it."""

    weight_VD: Tensor
    bias_V: Tensor | None
    options: LossOptions

    def chunks(self, hidden_ND: Tensor, targets_N: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields (which tokens, their hidden states, their targets)."""
        for start in range(0, targets_N.numel(), self.options.chunk):
            which = slice(start, start + self.options.chunk)
            yield which, hidden_ND[which].to(self.options.compute), targets_N[which]

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Returns [C, V], a leaf that wants a gradient."""
        return F.linear(hidden_CD, self.weight_VD, self.bias_V).requires_grad_()

    def losses(self, logits_CV: Tensor, targets_C: Tensor, reduction: Reduction) -> Tensor:
        """Returns a chunk's losses, or their sum."""
        options = self.options
        wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if options.softcap is not None:
            wide_CV = torch.tanh(wide_CV / options.softcap) * options.softcap
        more: _LossArguments = {
            "ignore_index": options.ignore_index,
            "reduction": reduction,
            "label_smoothing": options.label_smoothing,
        }
        if options.part is not None:
            return cut_cross_entropy(wide_CV, targets_C, options.part, **more)
        return F.cross_entropy(wide_CV, targets_C, **more)


class _Sums:
    """Gradients of hidden states, weight and bias as chunks add to them; see [Note: sums over chunks]."""

    def __init__(self, hidden_ND: Tensor, layer: _Layer, wanted: tuple[bool, ...]) -> None:
        compute = layer.options.compute
        self._whole = hidden_ND.shape[0] <= layer.options.chunk
        self._layer = layer
        sums = compute if self._whole else torch.promote_types(compute, torch.float32)
        weight, bias = layer.weight_VD, layer.bias_V
        self.hidden = torch.empty_like(hidden_ND) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=sums) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=sums) if wanted[2] and bias is not None else None

    def add(self, which: slice, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        """Takes over what the gradient of a chunk's logits gives."""
        if self.hidden is not None:
            self.hidden[which] = grad_CV @ self._layer.weight_VD
        if self.weight is not None:
            self._add_to_weight(self.weight, hidden_CD, grad_CV)
        if self.bias is not None:
            self.bias += grad_CV.sum(0)

    def _add_to_weight(self, sum_VD: Tensor, hidden_CD: Tensor, grad_CV: Tensor) -> None:
        if self._whole:
            torch.mm(grad_CV.t(), hidden_CD, out=sum_VD)
            return
        if sum_VD.dtype == grad_CV.dtype:
            sum_VD.addmm_(grad_CV.t(), hidden_CD)
            return
        # By rows of the weight, so that a product in 16 bits is no larger than the logits it comes from.
        rows = max(1, grad_CV.numel() // hidden_CD.shape[1])
        for start in range(0, sum_VD.shape[0], rows):
            sum_VD[start : start + rows] += grad_CV[:, start : start + rows].t() @ hidden_CD


class _Reduced(torch.autograd.Function):
    """Mean or sum; see [Note: gradients in the forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: LossOptions,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        layer = _layer(weight_VD, bias_V, options)
        wide = torch.promote_types(options.compute, torch.float32)
        count = (targets_N != options.ignore_index).sum().to(wide)
        power = _power_of_two_in(count)
        scale = power / count if options.reduction == "mean" else torch.ones_like(count)
        sums = _Sums(hidden_ND, layer, wanted)
        total = torch.zeros_like(count)
        with _alone(hidden_ND.device.type):
            for which, hidden_CD, targets_C in layer.chunks(hidden_ND, targets_N):
                logits_CV = layer.logits(hidden_CD)
                loss, grad_CV = _with_gradient(layer, logits_CV, targets_C, scale, any(wanted))
                del logits_CV
                total += loss
                if grad_CV is not None:
                    sums.add(which, hidden_CD, grad_CV)
                del grad_CV
        mean = options.reduction == "mean"
        ctx.mean = mean
        ctx.save_for_backward(
            sums.hidden,
            None if sums.weight is None else sums.weight.to(weight_VD.dtype),
            None if sums.bias is None or bias_V is None else sums.bias.to(bias_V.dtype),
            power,
        )
        return total / count if mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *grads, power = ctx.saved_tensors
        factor = grad / power if ctx.mean else grad
        # Not in place: a backward may come again.
        return *(None if kept is None else kept * factor for kept in grads), None, None, None


class _PerToken(torch.autograd.Function):
    """A loss for each token; backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: LossOptions,
        wanted: tuple[bool, ...],
    ) -> Tensor:
        layer = _layer(weight_VD, bias_V, options)
        with _alone(hidden_ND.device.type), running_again(SecondRun(whole=1)):
            losses = [
                layer.losses(F.linear(hidden_CD, layer.weight_VD, layer.bias_V), targets_C, "none")
                for _, hidden_CD, targets_C in layer.chunks(hidden_ND, targets_N)
            ]
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
        ctx.options, ctx.wanted = options, wanted
        empty = hidden_ND.new_zeros(0, dtype=torch.promote_types(options.compute, torch.float32))
        return torch.cat(losses) if losses else empty

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        layer = _layer(weight_VD, bias_V, ctx.options)
        sums = _Sums(hidden_ND, layer, ctx.wanted)
        with _alone(hidden_ND.device.type):
            for which, hidden_CD, targets_C in layer.chunks(hidden_ND, targets_N):
                logits_CV = layer.logits(hidden_CD)
                with torch.enable_grad():
                    losses_C = layer.losses(logits_CV, targets_C, "none")
                (grad_CV,) = torch.autograd.grad(losses_C, logits_CV, grad_N[which])
                del logits_CV, losses_C
                sums.add(which, hidden_CD, grad_CV)
                del grad_CV
        weight = None if sums.weight is None else sums.weight.to(weight_VD.dtype)
        bias = None if sums.bias is None else sums.bias.to(bias_V.dtype)
        return sums.hidden, weight, bias, None, None, None


def _layer(weight_VD: Tensor, bias_V: Tensor | None, options: LossOptions) -> _Layer:
    compute = options.compute
    return _Layer(weight_VD.detach().to(compute), None if bias_V is None else bias_V.detach().to(compute), options)


@contextmanager
def _alone(device_type: str) -> Generator[None]:
    """Inside, dtypes are what they are, and what chunks save is no business of the caller's hooks.

    A recomputed block would drop what a chunk saves and want it back while that block's forward still runs.
    """
    with (
        torch.autocast(device_type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


def _with_gradient(
    layer: _Layer, logits_CV: Tensor, targets_C: Tensor, scale: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum of a chunk's losses and, where wanted, `scale` times its gradient by the logits."""
    with torch.set_grad_enabled(wanted):
        loss = layer.losses(logits_CV, targets_C, "sum")
    if not wanted:
        return loss, None
    (grad_CV,) = torch.autograd.grad(loss, logits_CV, scale)
    return loss.detach(), grad_CV


def _power_of_two_in(count: Tensor) -> Tensor:
    """Returns the largest power of two up to a whole number, without waiting for a GPU to tell its value."""
    return power_of_two(torch.frexp(count).exponent - 1).to(count.dtype)
