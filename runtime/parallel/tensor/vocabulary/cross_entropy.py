"""Cross entropy of logits of which each rank of the tensor axis has some tokens; whole logits exist nowhere.

Where logits come from is no matter here, nor how many are there at once. Shapes: C tokens of a chunk, V tokens of the
vocabulary that this rank has.

[Note: numbers a token]
The ranks agree on three numbers a token: the largest logit, the sum of exponentials, and the logit of the target, which
one of them has. The first has to be there before exponentials are; the others share an all-reduce, and so does the sum
of the logits, which label smoothing needs. All are taken relative to the largest, so nothing overflows. In backward
every rank has all that the gradient of its own logits needs.
Source: Megatron-LM (Shoeybi et al., 2019), section 3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .part import VocabularyPart


def cut_cross_entropy(
    logits_CV: Tensor,
    targets_C: Tensor,
    part: VocabularyPart,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Returns `F.cross_entropy` of the whole logits, the same bits on every rank: a scalar, or [C] for `none`.

    Enters two all-reduces over the part's axis, of C numbers and of 2 C (3 C with label smoothing); backward enters
    none, and gives the gradient of this rank's logits. See [Note: numbers a token].

    Args:
        logits_CV: this rank's logits, fp32 or wider; left as they are.
        targets_C: int64, the same on every rank: tokens of the whole vocabulary, or `ignore_index`.
        part: tokens that this rank has.
        ignore_index: target of tokens that do not count.
        reduction: `mean` over the tokens that count, `sum`, or `none`.
        label_smoothing: share of the target that is spread over the whole vocabulary.

    Raises:
        IndexError: a target that is no token, as torch does; on CUDA the device's own assertion.
    """
    assert logits_CV.shape == (targets_C.numel(), part.tokens), f"logits {tuple(logits_CV.shape)} of {part}"
    assert logits_CV.dtype in (torch.float32, torch.float64), f"logits are {logits_CV.dtype}"
    counts_C = targets_C != ignore_index
    _check_targets(targets_C, counts_C, part.whole)
    losses_C: Any = _Losses.apply(logits_CV, targets_C, counts_C, part, label_smoothing)
    match reduction:
        case "none":
            return losses_C
        case "sum":
            return losses_C.sum()
        case "mean":
            return losses_C.sum() / counts_C.sum()


class _Losses(torch.autograd.Function):
    """The loss of each token."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: Tensor, targets_C: Tensor, counts_C: Tensor, part: VocabularyPart, label_smoothing: float
    ) -> Tensor:
        here_C = (targets_C >= part.start) & (targets_C < part.stop)
        places_C = (targets_C - part.start).masked_fill(~here_C, 0)
        shifted_CV = logits_CV - _largest(logits_CV, part)[:, None]
        terms = [_at(shifted_CV, places_C).masked_fill(~here_C, 0.0)]
        if label_smoothing:
            terms.append(shifted_CV.sum(1))
        probabilities_CV = shifted_CV.exp_()
        sums = torch.stack([probabilities_CV.sum(1), *terms])
        part.axis.all_reduce(sums.view(-1), label="sums of a loss over the vocabulary").wait()
        log_sum_C = sums[0].log()
        losses_C = log_sum_C - sums[1]
        if label_smoothing:
            of_any_C = log_sum_C - sums[2] / part.whole
            losses_C = (1.0 - label_smoothing) * losses_C + label_smoothing * of_any_C
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(probabilities_CV.div_(sums[0][:, None]), places_C, here_C, counts_C)
            ctx.label_smoothing, ctx.whole = label_smoothing, part.whole
        return losses_C.masked_fill(~counts_C, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        probabilities_CV, places_C, here_C, counts_C = ctx.saved_tensors
        grad_C = grad_C.masked_fill(~counts_C, 0.0)
        grad_CV = probabilities_CV * grad_C[:, None]
        if ctx.label_smoothing:
            grad_CV -= (grad_C * (ctx.label_smoothing / ctx.whole))[:, None]
        if grad_CV.shape[1]:
            of_target_C = (grad_C * (ctx.label_smoothing - 1.0)).masked_fill(~here_C, 0.0)
            grad_CV.scatter_add_(1, places_C[:, None], of_target_C[:, None])
        return grad_CV, None, None, None, None


def _largest(logits_CV: Tensor, part: VocabularyPart) -> Tensor:
    """Returns the largest logit of each token, [C]; enters an all-reduce."""
    count = logits_CV.shape[0]
    largest_C = logits_CV.amax(1) if part.tokens else logits_CV.new_full((count,), -torch.inf)
    part.axis.all_reduce(largest_C, op="max", label="largest logits").wait()
    return largest_C


def _at(values_CV: Tensor, places_C: Tensor) -> Tensor:
    """Returns a value of each row, [C]; zeros where rows are empty."""
    if values_CV.shape[1] == 0:
        return values_CV.new_zeros(values_CV.shape[0])
    return values_CV.gather(1, places_C[:, None]).squeeze(1)


def _check_targets(targets_C: Tensor, counts_C: Tensor, whole: int) -> None:
    """Raises IndexError where a target is no token; all ranks have the same, so all of them do."""
    counted_C = targets_C.masked_fill(~counts_C, 0)
    try:
        # An index by which nothing is read: on CUDA its bounds are checked by the device, and nobody waits.
        counted_C.new_zeros(1).expand(whole).index_select(0, counted_C)
    except IndexError as error:
        foreign = counted_C[(counted_C < 0) | (counted_C >= whole)]
        raise IndexError(f"Target {int(foreign[0])} is out of bounds.") from error
