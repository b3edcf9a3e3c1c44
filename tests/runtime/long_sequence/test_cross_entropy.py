"""`linear_cross_entropy` as a user calls it: every kernel, autocast, compilation, errors, and in an engine."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.long_sequence import linear_cross_entropy
from support.models import CONTEXT, VOCAB, TinyGPT
from support.ranks import run_ranks
from support.training import batches, config, full_parameters, make_engine

HAS_TORCHS_OWN = hasattr(torch.nn, "LinearCrossEntropyOptions")
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available()
KERNELS = [
    "auto",
    "chunks",
    pytest.param("torch", marks=pytest.mark.skipif(not HAS_TORCHS_OWN, reason="torch has its own from 2.13 on")),
    pytest.param("liger", marks=pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel and CUDA are not here")),
]


def make(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 20, 24, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(91, 24, generator=generator) * 0.3).to(device, dtype).requires_grad_()
    bias = torch.randn(91, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, 91, (2, 20), generator=generator)
    targets[0, 3] = -100
    return hidden, weight, bias, targets.to(device)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_loss_and_gradients_of_the_plain_computation(kernel: Any, reduction: Any) -> None:
    if kernel == "liger" and reduction == "none":
        pytest.skip("liger has no gradients of single tokens")
    hidden, weight, bias, targets = make(device="cuda" if kernel == "liger" else "cpu")
    found = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction, chunk_size=7, kernel=kernel)
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction=reduction)
    assert found.shape == (targets.shape if reduction == "none" else ())
    torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(found.square().sum(), (hidden, weight, bias))
    theirs = torch.autograd.grad(expected.square().sum(), (hidden, weight, bias))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * float(other.abs().max()) + 1e-6)


@pytest.mark.skipif(not HAS_TORCHS_OWN, reason="torch has its own from 2.13 on")
def test_torchs_own_by_name_returns_fp32_in_bf16_too() -> None:
    hidden, weight, bias, targets = make(torch.bfloat16)
    found = linear_cross_entropy(hidden, weight, targets, bias=bias, kernel="torch")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, targets, bias=bias), rtol=1e-2, atol=1e-2)


def test_under_autocast_the_weights_gradient_has_the_bits_of_autocasts_own() -> None:
    hidden, weight, bias, targets = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=40)
        expected = F.cross_entropy(F.linear(hidden, weight, bias).float().flatten(0, 1), targets.flatten())
    assert torch.equal(found, expected)
    ours = torch.autograd.grad(found, (hidden, weight, bias))
    theirs = torch.autograd.grad(expected, (hidden, weight, bias))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", KERNELS[:2])
def test_a_compiled_caller_gets_the_same(kernel: Any) -> None:
    hidden, weight, _, targets = make()

    def loss_of(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h * 2, w, targets, chunk_size=7, kernel=kernel)

    compiled = torch.compile(loss_of, backend="eager")
    for function in (loss_of, compiled):
        function(hidden, weight)
    ours, theirs = compiled(hidden, weight), loss_of(hidden, weight)
    assert torch.equal(ours, theirs)
    pairs = zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_VD": torch.zeros(91, 23)}, r"hidden \[2, 20, 24\], weight \[91, 23\], targets \[2, 20\] do not fit"),
        ({"targets": torch.zeros(2, 19, dtype=torch.int64)}, r"targets \[2, 19\] do not fit"),
        ({"targets": torch.zeros(2, 20)}, "targets are torch.float32; expected torch.int64"),
        ({"bias": torch.zeros(90)}, r"bias is \[90\]; expected \[91\]"),
        ({"weight_VD": torch.zeros(91, 24, dtype=torch.bfloat16)}, "hidden is torch.float32, weight torch.bfloat16"),
        ({"hidden": torch.zeros(2, 20, 24, dtype=torch.int64)}, "hidden is torch.int64; expected floating point"),
        ({"reduction": "median"}, "reduction is 'median'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5; expected 0 to 1"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a number above 0"),
        ({"chunk_size": 0}, "chunk_size is 0; expected a number of tokens above 0"),
        ({"kernel": "liger"}, "kernel='liger'"),
    ],
)
def test_a_mistake_is_named_with_its_values(change: dict[str, Any], words: str) -> None:
    hidden, weight, _, targets = make()
    arguments: dict[str, Any] = {"hidden": hidden, "weight_VD": weight, "targets": targets, **change}
    with pytest.raises(ModelError, match=words):
        linear_cross_entropy(**arguments)


class LanguageModel(TinyGPT):
    """Its forward returns the loss; the head is called as a layer, or its weight is read for the loss by chunks."""

    def __init__(self, *, chunk: int | None, tied: bool) -> None:
        super().__init__(layers=2, tied=tied)
        self.chunk = chunk

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.chunk is None:
            return F.cross_entropy(self.head(x).float().flatten(0, 1), targets_BT.flatten())
        return linear_cross_entropy(x, self.head.weight, targets_BT, chunk_size=self.chunk, kernel="chunks")


SAMPLES = 4


def train(settings: dict[str, Any], chunk: int | None, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps, on this rank's share of each batch."""
    torch.manual_seed(7)
    engine = make_engine(settings, model=LanguageModel(chunk=chunk, tied=tied))
    losses: list[float] = []
    rank, micro = engine.global_rank, engine.train_micro_batch_size_per_gpu()
    for step in range(3):
        tokens, targets = batches(step, samples=SAMPLES)
        for part in range(engine.gradient_accumulation_steps()):
            first = (part * engine.world_size + rank) * micro
            loss = engine(tokens[first : first + micro], targets[first : first + micro])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    weights = full_parameters(engine)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"bf16": True},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"activation_checkpointing": {"policy": "every_block"}},
    ],
)
def test_every_stage_trains_as_with_a_head_that_is_called(tied: bool, more: dict[str, Any]) -> None:
    expected = train(config(0, micro=SAMPLES, **more), None, tied)
    for stage in (0, 1, 2, 3):
        losses, weights = train(config(stage, micro=SAMPLES, **more), SAMPLES * CONTEXT, tied)
        assert losses == expected[0]
        assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


def _on_two_ranks() -> list[tuple[list[float], dict[str, Tensor]]]:
    return [train(config(stage, micro=SAMPLES // 2), 10, tied) for stage in (0, 3) for tied in (False, True)]


def test_two_ranks_train_as_one_that_accumulates() -> None:
    first, second = run_ranks(2, _on_two_ranks)
    ((alone),) = run_ranks(1, _alone)
    for (losses, weights), (other, _), (both, expected) in zip(first, second, alone, strict=True):
        assert [value for pair in zip(losses, other, strict=True) for value in pair] == both
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def _alone() -> list[tuple[list[float], dict[str, Tensor]]]:
    return [
        train(config(stage, micro=SAMPLES // 2, accumulation=2), 10, tied) for stage in (0, 3) for tied in (False, True)
    ]


class Head(nn.Linear):
    """A head that makes the loss itself: at stage 3 its weight is gathered for its own forward, without a copy."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(hidden, self.weight, targets, chunk_size=16, kernel="chunks")


class PerToken(nn.Linear):
    """Weighs the losses of tokens: backward makes the logits again, from the weight as it is gathered then."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        losses = linear_cross_entropy(hidden, self.weight, targets, chunk_size=16, reduction="none", kernel="chunks")
        return (losses * torch.linspace(0.5, 1.5, losses.shape[1])).mean()


class WithHead(nn.Module):
    def __init__(self, head: type[nn.Linear]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))
        self.head = head(24, VOCAB, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


@pytest.mark.parametrize("head", [Head, PerToken])
def test_a_head_that_makes_the_loss_itself_trains_at_every_stage(head: type[nn.Linear]) -> None:
    found: list[list[float]] = []
    for stage in (0, 3):
        torch.manual_seed(2)
        engine = make_engine(config(stage, micro=3), model=WithHead(head))
        losses: list[float] = []
        for seed in range(3):
            x = torch.randn(3, 9, 24, generator=torch.Generator().manual_seed(seed))
            loss = engine(x, torch.arange(27).view(3, 9))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append(losses)
        engine.destroy()
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]
