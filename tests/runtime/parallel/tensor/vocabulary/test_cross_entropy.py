"""Cross entropy over a cut vocabulary, against torch's on whole logits: values, collectives, and what is never made."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.vocabulary.cross_entropy import cut_cross_entropy
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart

TOKENS, VOCAB = 12, 10
#: Lengths of the parts of 2 and 3 ranks; one is empty.
CUTS = [(5, 5), (7, 3), (4, 3, 3), (4, 6, 0)]


def over(lengths: tuple[int, ...], body: Callable[[VocabularyPart], Any]) -> list[Any]:
    """Runs `body` once a rank with its part."""
    places = list(pairwise(accumulate(lengths, initial=0)))

    def rank(axis: LoopbackCollectives) -> Any:
        return body(VocabularyPart(axis, *places[axis.rank], sum(lengths)))

    return LoopbackWorld(len(lengths)).run(rank)


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits and targets, of which two do not count; far from zero, so that exponentials overflow by themselves."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) * 4 + 2000.0
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[2] = targets[9] = -100
    return logits.to(dtype), targets


def cut(
    part: VocabularyPart, logits: Tensor, targets: Tensor, weights: Tensor | float, **more: Any
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of this rank's logits."""
    mine = logits[:, part.start : part.stop].clone().requires_grad_()
    loss = cut_cross_entropy(mine, targets, part, **more)
    (grad,) = torch.autograd.grad((loss * weights).sum(), mine)
    return loss.detach(), grad


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_fp64_it_is_torchs_on_whole_logits(lengths: Any, label_smoothing: float, reduction: Any) -> None:
    logits, targets = make()
    more: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    weights = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64) if reduction == "none" else 3.0
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, **more)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), whole)
    found = over(lengths, lambda part: cut(part, logits, targets, weights, **more))
    for loss, _ in found:
        assert torch.equal(loss, found[0][0]), "the same bits on every rank"
    torch.testing.assert_close(found[0][0], expected.detach(), rtol=1e-12, atol=1e-12)
    grads = torch.cat([grad for _, grad in found], 1)
    torch.testing.assert_close(grads, expected_grad, rtol=1e-12, atol=1e-13)


def test_an_ignored_token_of_the_vocabulary_counts_for_nothing_on_the_rank_that_has_it() -> None:
    logits, targets = make()
    targets = targets.clamp(min=0)
    targets[:5] = 7
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=7)
    (expected_grad,) = torch.autograd.grad(expected, whole)
    found = over((5, 5), lambda part: cut(part, logits, targets, 1.0, ignore_index=7))
    torch.testing.assert_close(found[1][0], expected.detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), expected_grad, rtol=1e-12, atol=1e-13)


def test_where_nothing_counts_it_gives_what_torch_gives() -> None:
    logits, _ = make()
    nothing = torch.full((TOKENS,), -100)
    for loss, grad in over((5, 5), lambda part: cut(part, logits, nothing, 1.0)):
        assert loss.isnan()
        assert not grad.any()
    for loss, grad in over((5, 5), lambda part: cut(part, logits, nothing, 1.0, reduction="sum")):
        assert loss.item() == 0.0
        assert not grad.any()


def test_tokens_that_are_masked_away_on_a_whole_rank_have_no_share() -> None:
    logits, targets = make()
    logits[:, 5:] = -torch.inf
    targets = targets.clamp(max=4)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    found = over((5, 5), lambda part: cut(part, logits, targets, 1.0))
    torch.testing.assert_close(found[0][0], expected.detach(), rtol=1e-12, atol=0.0)
    assert not found[1][1].any()


def test_in_fp32_it_is_as_near_to_the_exact_loss_as_torchs() -> None:
    logits, targets = make(torch.float32)
    exact = F.cross_entropy(logits.double(), targets)
    for loss, grad in over((4, 3, 3), lambda part: cut(part, logits, targets, 1.0)):
        assert loss.dtype == grad.dtype == torch.float32
        assert abs(float(loss.double() - exact)) <= 4 * 2.0**-23 * float(exact)


@pytest.mark.parametrize("target", [VOCAB, -1])
def test_a_target_that_is_no_token_is_refused_as_torch_does_on_every_rank(target: int) -> None:
    logits, targets = make()
    targets[4] = target

    def refused(part: VocabularyPart) -> str:
        with pytest.raises(IndexError) as caught:
            cut(part, logits, targets, 1.0)
        assert part.axis.traffic.calls.total() == 0, "before anybody waits"
        return str(caught.value)

    with pytest.raises(IndexError) as torchs:
        F.cross_entropy(logits, targets)
    assert over((7, 3), refused) == [str(torchs.value)] * 2


@pytest.mark.parametrize(("label_smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
def test_two_all_reduces_of_numbers_a_token_and_none_in_backward(label_smoothing: float, numbers: int) -> None:
    logits, targets = make(torch.float32)

    def count(part: VocabularyPart) -> None:
        mine = logits[:, part.start : part.stop].clone().requires_grad_()
        loss = cut_cross_entropy(mine, targets, part, label_smoothing=label_smoothing)
        traffic = part.axis.traffic
        assert dict(traffic.calls) == {"all_reduce": 2}
        assert dict(traffic.bytes) == {"all_reduce": 4 * TOKENS * (1 + numbers)}
        loss.backward()
        assert dict(traffic.calls) == {"all_reduce": 2}

    over((4, 3, 3), count)


def test_the_logits_are_left_as_they_are_and_one_tensor_of_their_size_is_kept() -> None:
    logits, targets = make()
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    def body(part: VocabularyPart) -> None:
        mine = logits[:, part.start : part.stop].clone().requires_grad_()
        before = mine.detach().clone()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            cut_cross_entropy(mine, targets, part, reduction="none")
        assert torch.equal(mine, before)

    over((10,), body)
    assert kept == [(TOKENS, VOCAB), (TOKENS,), (TOKENS,), (TOKENS,)]


class LargestTensor(TorchDispatchMode):
    """Most elements of a tensor with memory of its own that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def test_whole_logits_are_never_there() -> None:
    logits, targets = make()
    parts = [logits[:, :7].clone(), logits[:, 7:].clone()]

    def body(part: VocabularyPart) -> int:
        mine = parts[part.axis.rank].requires_grad_()
        with LargestTensor() as seen:
            cut_cross_entropy(mine, targets, part, label_smoothing=0.1).backward()
        return seen.numel

    assert over((7, 3), body) == [TOKENS * 7, TOKENS * 3]
