"""The loss by chunks: the plain computation's bits with one chunk, its gradients within bounds with several, its bytes.

[Note: the bounds]
u is the unit roundoff, g(n) = n u / (1 - n u) bounds the relative error of a sum of n products (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, section 3.1), whatever its order.
In fp32, against exact gradients: a logit is off by z = g(D + 1) sum |h||w|, a log-probability by 2 z + g(V + 4)
(1 + its size), a probability p by p times that, e. The weight's gradient is a sum over N tokens of G h, G = p - 1 or
p: it is off by sum e |h| + g(N + 8) sum (|G| + e) |h|. That of hidden states is a sum over V of G w.
In bf16, against the plain computation: both make the same G. One rounds the sum, the other each chunk's and their sum:
they differ by u (2 |sum| + sum over chunks |sum of the chunk|), and g32(N) sum |G||h| for each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsrun.long_sequence import linear_cross_entropy
from dsrun.runtime.long_sequence.loss_kernels import loss_bytes
from support.allocations import allocations, peak_of
from support.ranks import run_ranks

N, D, V = 48, 40, 517


def make(dtype: torch.dtype, *, tokens: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which one does not count."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) * 0.2
    bias = torch.randn(V, generator=generator)
    targets = torch.randint(0, V, (tokens,), generator=generator)
    targets[tokens // 2] = -100
    hidden, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias))
    return hidden, weight, bias, targets


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, softcap: float | None = None, **more: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, targets, **more)


def chunked(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, chunk: int, **more: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=chunk, kernel="chunks", **more)


def grads(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("more", [{}, {"reduction": "sum"}, {"softcap": 3.0}, {"ignore_index": 5}])
def test_one_chunk_has_the_bits_of_the_plain_computation(dtype: torch.dtype, more: dict[str, Any]) -> None:
    *inputs, targets = make(dtype)
    if "ignore_index" in more:
        targets = targets.clamp(min=0)
        targets[:7] = 5
    expected, found = plain(*inputs, targets, **more), chunked(*inputs, targets, chunk=N, **more)
    assert torch.equal(found, expected)
    for ours, theirs in zip(grads(found, *inputs), grads(expected, *inputs), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert torch.equal(ours, theirs)


def _g(n: int, unit: float = 2.0**-24) -> float:
    return n * unit / (1 - n * unit)


@pytest.mark.parametrize("chunk", [1, 7, 16, N])
def test_in_fp32_gradients_are_within_the_bound_of_exact_ones(chunk: int) -> None:
    hidden, weight, _, targets = make(torch.float32)
    h, w = hidden.detach().double(), weight.detach().double()
    counts = targets != -100
    log_p = F.log_softmax(h @ w.T, dim=1)
    error_z = _g(D + 1) * (h.abs() @ w.abs().T).max()
    error_p = log_p.exp() * torch.expm1(2 * error_z + _g(V + 4) * (1 + log_p.abs()))
    g = log_p.exp()
    g[counts, targets[counts]] -= 1
    g, error_p = g * counts[:, None] / counts.sum(), error_p * counts[:, None] / counts.sum()
    size = g.abs() + error_p
    found = grads(chunked(hidden, weight, None, targets, chunk=chunk), hidden, weight)
    exact = (g @ w, g.T @ h)
    bounds = (error_p @ w.abs() + _g(V + 8) * size @ w.abs(), error_p.T @ h.abs() + _g(N + 8) * size.T @ h.abs())
    for ours, true, bound in zip(found, exact, bounds, strict=True):
        assert bool(((ours.double() - true).abs() <= bound).all())
        assert float(bound.max()) < 2e-3 * float(true.abs().max()), "a bound that says something"


@pytest.mark.parametrize("chunk", [7, 16])
def test_in_bf16_the_weights_gradient_is_rounded_once_a_chunk(chunk: int) -> None:
    hidden, weight, _, targets = make(torch.bfloat16)
    logits = F.linear(hidden, weight).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits.float(), targets), logits)
    expected = grads(plain(hidden, weight, None, targets), hidden, weight)
    found = grads(chunked(hidden, weight, None, targets, chunk=chunk), hidden, weight)
    assert torch.equal(found[0], expected[0]), "a token's gradient has nothing to do with its chunk"
    parts = [(g[i : i + chunk].double().T @ hidden[i : i + chunk].detach().double()).abs() for i in range(0, N, chunk)]
    whole = (g.double().T @ hidden.detach().double()).abs()
    u = 2.0**-8
    bound = (1 + 4 * u) * u * (2 * whole + torch.stack(parts).sum(0))
    bound += 2 * _g(N) * g.double().abs().T @ hidden.detach().double().abs()
    assert bool(((found[1].double() - expected[1].double()).abs() <= bound).all())


def test_small_probabilities_do_not_vanish_in_fp16() -> None:
    tokens = 4096
    hidden, weight, _, targets = make(torch.float16, tokens=tokens)
    wide = weight.detach().double().requires_grad_()
    exact = grads(plain(hidden.detach().double(), wide, None, targets) * 1024.0, wide)[0]
    found = grads(chunked(hidden, weight, None, targets, chunk=512) * 1024.0, weight)[0].double()
    theirs = grads(plain(hidden, weight, None, targets), weight)[0].double() * 1024.0
    assert float((found - exact).norm()) < 1e-3 * float(exact.norm())
    assert float((theirs - exact).norm()) > 3 * float((found - exact).norm()), "1 / (4096 x 517) is hardly there"


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_smoothing_and_reductions_agree_to_rounding(reduction: Any, label_smoothing: float) -> None:
    *inputs, targets = make(torch.float64)
    more: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing, "softcap": 4.0}
    expected, found = plain(*inputs, targets, **more), chunked(*inputs, targets, chunk=11, **more)
    weights = torch.linspace(0.5, 2.0, N, dtype=torch.float64) if reduction == "none" else torch.ones(())
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    pairs = zip(grads((found * weights).sum(), *inputs), grads((expected * weights).sum(), *inputs), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_batch_in_which_nothing_counts_gives_what_torch_gives() -> None:
    hidden, weight, _, _ = make(torch.float32)
    targets = torch.full((N,), -100)
    for found in (chunked(hidden, weight, None, targets, chunk=16), plain(hidden, weight, None, targets)):
        assert bool(found.isnan())
        assert all(not grad.any() for grad in grads(found, hidden, weight))
    assert chunked(hidden, weight, None, targets, chunk=16, reduction="sum").item() == 0.0


def test_no_token_at_all_is_a_sum_of_nothing() -> None:
    hidden, weight, _, _ = make(torch.float32)
    nothing = hidden[:0].detach().requires_grad_()
    loss = chunked(nothing, weight, None, torch.zeros(0, dtype=torch.int64), chunk=16, reduction="sum")
    assert loss.item() == 0.0
    assert [tuple(grad.shape) for grad in grads(loss, nothing, weight)] == [(0, D), (V, D)]
    assert chunked(nothing, weight, None, torch.zeros(0, dtype=torch.int64), chunk=16, reduction="none").shape == (0,)


def test_what_wants_no_gradient_gets_none() -> None:
    hidden, weight, bias, targets = make(torch.float32)
    loss = chunked(hidden.detach(), weight, bias.detach(), targets, chunk=16)
    assert torch.equal(grads(loss, weight)[0], grads(chunked(hidden, weight, bias, targets, chunk=16), weight)[0])
    with torch.no_grad():
        assert not chunked(hidden, weight, bias, targets, chunk=16).requires_grad


def test_a_second_backward_gives_the_same_again() -> None:
    hidden, weight, _, targets = make(torch.float32)
    loss = chunked(hidden, weight, None, targets, chunk=16) * 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_kept_goes_through_the_callers_hooks_and_what_chunks_save_does_not() -> None:
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(hidden, weight, torch.arange(64) % 50, chunk_size=16, kernel="chunks")
    assert kept == [(64, 8), (50, 8), ()]


def test_gradients_of_gradients_are_refused_and_not_wrong() -> None:
    hidden, weight, _, targets = make(torch.float32)
    loss = chunked(hidden, weight, None, targets, chunk=16) * torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


#: Tokens, width, vocabulary, chunk, dtype.
SHAPES = [
    (256, 64, 4096, 32, torch.float32),
    (256, 64, 4096, 32, torch.bfloat16),
    (256, 64, 4096, 256, torch.bfloat16),
    (128, 320, 2048, 16, torch.bfloat16),
]


def _count() -> list[tuple[list[int], int]]:
    counted: list[tuple[list[int], int]] = []
    for tokens, width, vocab, chunk, dtype in SHAPES:
        hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
        weight = torch.randn(vocab, width).to(dtype).requires_grad_()
        targets = torch.randint(0, vocab, (tokens,))
        held: list[Tensor] = []

        def forward(h: Tensor = hidden, w: Tensor = weight, t: Tensor = targets, c: int = chunk) -> None:
            held.append(chunked(h, w, None, t, chunk=c))  # noqa: B023  # called at once

        # Where a CPU multiplies bf16 itself (AMX), oneDNN packs matrices into memory of its own, no tensor of ours.
        with torch.backends.mkldnn.flags(enabled=False):
            forward()
            held.clear()
            sizes = allocations(forward)
        counted.append((sizes, sum(t.nbytes for t in held[0].grad_fn.saved_tensors if t is not None)))  # type: ignore[union-attr]
    return counted


def test_bytes_are_those_of_the_formula_and_logits_are_never_whole() -> None:
    ((counted),) = run_ranks(1, _count)
    for (tokens, width, vocab, chunk, dtype), (sizes, kept) in zip(SHAPES, counted, strict=True):
        expected = loss_bytes(tokens, width, vocab, size=dtype.itemsize, chunk=chunk)
        assert kept == expected.kept + 4, "and the power of two"
        assert expected.forward <= peak_of(sizes) <= expected.forward + 16 * 1024, "numbers a token, 8 bytes each"
        if chunk < tokens:
            assert not {tokens * vocab * size for size in (2, 4)} & set(sizes)
