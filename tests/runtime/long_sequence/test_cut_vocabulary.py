"""`linear_cross_entropy` of a weight that is cut over ranks: the loss of the whole one, its collectives, its bytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsrun
from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.config.axes import AXES, AxisRow
from dsrun.errors import ModelError
from dsrun.long_sequence import linear_cross_entropy
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.long_sequence.loss_kernels import loss_bytes
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart, note_vocabulary
from support.allocations import allocations, peak_of
from support.models import VOCAB, TinyGPT
from support.ranks import run_ranks
from support.threaded_ranks import ranks_of_threads
from support.training import batches, config

TOKENS, WIDTH, WHOLE = 24, 16, 37
CUTS = [(19, 18), (30, 7), (13, 12, 12)]


class Cut:
    """What one rank has: inputs that are the same on all, and its part of weight and bias.

    Args:
        axis: ranks.
        lengths: lengths of the ranks' parts.
        dtype: dtype of all floating point tensors.
    """

    def __init__(self, axis: LoopbackCollectives, lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        hidden, weight, bias, self.targets = make(dtype)
        start, stop = list(pairwise(accumulate(lengths, initial=0)))[axis.rank]
        self.part = VocabularyPart(axis, start, stop, WHOLE)
        self.hidden = hidden.requires_grad_()
        self.weight, self.bias = (nn.Parameter(tensor[start:stop].clone()) for tensor in (weight, bias))
        for param in (self.weight, self.bias):
            note_vocabulary(param, self.part)

    def loss(self, *, chunk: int = 7, bias: bool = True, **more: Any) -> Tensor:
        given = self.bias if bias else None
        return linear_cross_entropy(self.hidden, self.weight, self.targets, bias=given, chunk_size=chunk, **more)


def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which one does not count."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(WHOLE, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(WHOLE, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, WHOLE, (2, TOKENS // 2), generator=generator)
    targets[0, 5] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.2}, {"softcap": 3.0}, {"ignore_index": 4}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_fp64_loss_and_gradients_are_those_of_the_whole_weight(
    lengths: Any, more: dict[str, Any], reduction: Any
) -> None:
    given: dict[str, Any] = {"reduction": reduction, **more}
    hidden, weight, bias, targets = make(torch.float64)
    if "ignore_index" in more:
        targets = targets.clamp(min=0)
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    expected = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=7, **given)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)

    def body(axis: LoopbackCollectives) -> tuple[Tensor, ...]:
        cut = Cut(axis, lengths)
        cut.targets = targets
        loss = cut.loss(**given)
        return (loss.detach(), *torch.autograd.grad(loss.square().sum(), (cut.hidden, cut.weight, cut.bias)))

    found = LoopbackWorld(len(lengths)).run(body)
    for loss, of_hidden, *_ in found:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(of_hidden, found[0][1])
    torch.testing.assert_close(found[0][0], expected.detach(), rtol=1e-12, atol=1e-13)
    joined = (found[0][1], *(torch.cat([one[which] for one in found]) for which in (2, 3)))
    for ours, theirs in zip(joined, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_numbers_a_token_go_round_in_forward_and_hidden_states_once_in_backward() -> None:
    chunks = -(-TOKENS // 7)

    def body(axis: LoopbackCollectives) -> None:
        cut = Cut(axis, (19, 18), torch.float32)
        loss = cut.loss()
        assert dict(axis.traffic.calls) == {"all_reduce": 2 * chunks}
        assert dict(axis.traffic.bytes) == {"all_reduce": 3 * 4 * TOKENS}
        loss.backward()
        assert dict(axis.traffic.calls) == {"all_reduce": 2 * chunks + 1}
        assert dict(axis.traffic.bytes) == {"all_reduce": 3 * 4 * TOKENS + 4 * TOKENS * WIDTH}

    LoopbackWorld(2).run(body)


def test_hidden_states_that_want_no_gradient_are_not_summed() -> None:
    def body(axis: LoopbackCollectives) -> None:
        cut = Cut(axis, (19, 18))
        cut.hidden.requires_grad_(False)
        loss = cut.loss(chunk=TOKENS)
        loss.backward()
        assert dict(axis.traffic.calls) == {"all_reduce": 2}
        with torch.no_grad():
            assert torch.equal(cut.loss(chunk=TOKENS), loss)
        assert dict(axis.traffic.calls) == {"all_reduce": 4}

    LoopbackWorld(2).run(body)


def test_losses_of_tokens_repeat_the_numbers_in_backward() -> None:
    def body(axis: LoopbackCollectives) -> None:
        Cut(axis, (19, 18)).loss(chunk=TOKENS, reduction="none").sum().backward()
        assert dict(axis.traffic.calls) == {"all_reduce": 5}

    LoopbackWorld(2).run(body)


def test_a_chunk_is_as_long_as_the_whole_vocabulary_asks_for() -> None:
    hidden, vocab = torch.zeros(1024, 64), 512

    def body(axis: LoopbackCollectives) -> int:
        head = nn.Parameter(torch.zeros(vocab // 2, 64))
        note_vocabulary(head, VocabularyPart(axis, axis.rank * 256, axis.rank * 256 + 256, vocab))
        linear_cross_entropy(hidden, head, torch.zeros(1024, dtype=torch.int64))
        return axis.traffic.calls["all_reduce"]

    assert LoopbackWorld(2).run(body) == [2 * 1024 // 128] * 2, "1024 x 64 / 512 = 128; by this rank's 256 it is 256"


@pytest.mark.parametrize("kernel", ["torch", "liger"])
def test_other_kernels_by_name_are_refused(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("dsrun.runtime.long_sequence.cross_entropy"),
        "installed",
        lambda: {"torch": True, "liger": True},
    )

    def body(axis: LoopbackCollectives) -> None:
        with pytest.raises(ModelError, match=f"kernel='{kernel}' cannot compute a vocabulary that is cut over ranks"):
            Cut(axis, (19, 18)).loss(kernel=kernel)

    LoopbackWorld(2).run(body)


def test_on_one_rank_it_has_the_bits_and_the_kernels_of_a_whole_weight() -> None:
    hidden, weight, bias, targets = make(torch.float32)
    params = [nn.Parameter(weight), nn.Parameter(bias)]
    inputs = (hidden.requires_grad_(), *params)
    found: list[tuple[Tensor, ...]] = []
    axis = AloneCollectives()
    for marked in (False, True):
        for param in params if marked else []:
            note_vocabulary(param, VocabularyPart(axis, 0, WHOLE, WHOLE))
        loss = linear_cross_entropy(hidden, params[0], targets, bias=params[1], chunk_size=7)
        found.append((loss.detach(), *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert axis.traffic.calls.total() == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_exact_mode_it_has_the_bits_of_one_rank(reduction: Any) -> None:
    def body(axis: LoopbackCollectives) -> tuple[Tensor, ...]:
        cut = Cut(axis, (19, 18) if axis.size == 2 else (WHOLE,), torch.float32)
        for param in (cut.weight, cut.bias):
            # Parts are compared as values, so each parameter may have one of its own.
            note_vocabulary(param, replace(cut.part, exact=True))
        loss = cut.loss(reduction=reduction)
        grads = torch.autograd.grad(loss.square().sum(), (cut.hidden, cut.weight, cut.bias))
        assert dict(axis.traffic.calls) == ({"all_gather": 2} if axis.size == 2 else {})
        return (loss.detach(), *grads)

    # In a thread as well, for the number of threads in a product is that of the thread which asks for it.
    ((expected, expected_of_hidden, *others),) = LoopbackWorld(1).run(body)
    found = LoopbackWorld(2).run(body)
    for loss, of_hidden, *_ in found:
        assert torch.equal(loss, expected)
        assert torch.equal(of_hidden, expected_of_hidden)
    for which, other in enumerate(others, 2):
        assert torch.equal(torch.cat([one[which] for one in found]), other)


def test_a_weight_that_is_cut_beside_a_bias_that_is_not_is_refused() -> None:
    def body(axis: LoopbackCollectives) -> None:
        cut = Cut(axis, (19, 18))
        cut.bias = nn.Parameter(cut.bias.detach().clone())
        with pytest.raises(ModelError, match="has cut one over the vocabulary and not the other"):
            cut.loss()
        cut.bias = nn.Parameter(torch.zeros(WHOLE, dtype=torch.float64))
        with pytest.raises(ModelError, match=r"bias is \[37\]; expected"):
            cut.loss()

    LoopbackWorld(2).run(body)


def test_a_target_that_is_no_token_of_the_whole_is_refused() -> None:
    def body(axis: LoopbackCollectives) -> None:
        cut = Cut(axis, (19, 18))
        cut.targets[0, 0] = WHOLE
        with pytest.raises(IndexError, match="Target 37 is out of bounds"):
            cut.loss()

    LoopbackWorld(2).run(body)


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


@pytest.mark.parametrize("chunk", [7, TOKENS])
def test_whole_logits_are_never_there_not_even_a_chunk_of_them(chunk: int) -> None:
    def body(axis: LoopbackCollectives) -> int:
        cut = Cut(axis, (30, 7))
        with LargestTensor() as seen:
            cut.loss(chunk=chunk).backward()
        return seen.numel

    most = LoopbackWorld(2).run(body)
    assert most == [max(chunk * length, TOKENS * WIDTH, length * WIDTH) for length in (30, 7)]


#: Tokens, width, this rank's tokens of the vocabulary, chunk, dtype.
SHAPES = [(256, 64, 2048, 32, torch.float32), (256, 64, 2048, 32, torch.bfloat16)]


class TwoInOne(AloneCollectives):
    """An axis of two ranks of which this one sees itself: enough to count what it allocates."""

    size = 2


def _peaks() -> list[int]:
    counted: list[int] = []
    for tokens, width, vocab, chunk, dtype in SHAPES:
        hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
        weight = nn.Parameter(torch.randn(vocab, width).to(dtype))
        note_vocabulary(weight, VocabularyPart(TwoInOne(), 0, vocab, 2 * vocab))
        targets = torch.randint(0, 2 * vocab, (tokens,))
        held: list[Tensor] = []

        def forward(h: Tensor = hidden, w: Tensor = weight, t: Tensor = targets, c: int = chunk) -> None:
            held.append(linear_cross_entropy(h, w, t, chunk_size=c))  # noqa: B023  # called at once

        with torch.backends.mkldnn.flags(enabled=False):
            forward()
            held.clear()
            counted.append(peak_of(allocations(forward)))
    return counted


def test_bytes_are_at_most_those_of_the_formula_for_the_tokens_that_a_rank_has() -> None:
    ((peaks),) = run_ranks(1, _peaks)
    for (tokens, width, vocab, chunk, dtype), peak in zip(SHAPES, peaks, strict=True):
        expected = loss_bytes(tokens, width, vocab, size=dtype.itemsize, chunk=chunk).forward
        assert 0.7 * expected < peak <= expected + 16 * 1024, "numbers a token, 8 bytes each"


class LanguageModel(TinyGPT):
    """Its forward reads the head's weight for the loss, outside of the head's own forward."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(layers=2)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(self.norm(x), self.head.weight, targets_BT, chunk_size=10, kernel="chunks")


HALF = VOCAB // 2 + 1


def cut_head(model: nn.Module, settings: object, mesh: Any, say: object) -> Cuts:
    """Leaves this rank its tokens of the head."""
    del settings, say
    assert isinstance(model, LanguageModel)
    axis, weight = mesh.tensor, model.head.weight
    start, stop = ((0, HALF), (HALF, VOCAB))[axis.rank]
    note_vocabulary(weight, VocabularyPart(axis, start, stop, VOCAB))
    shape = tuple(weight.shape)
    weight.data = weight.detach()[start:stop].clone()
    box = Region((start, 0), (stop - start, shape[1]))
    return {id(weight): CutParameter(RankPlacement(cut_over=("second",)), TensorBoxes(shape, (box,)))}


def train(size: int, stage: int, **more: Any) -> list[list[float]]:
    """Losses and norms of three steps on each rank; all have the same samples."""
    models = [LanguageModel() for _ in range(size)]

    def rank(axis: LoopbackCollectives) -> list[float]:
        engine: Any = dsrun.initialize(model=models[axis.rank], config=config(stage, micro=4, **more))[0]
        found: list[float] = []
        for step in range(3):
            loss = engine(*batches(step, samples=4))
            engine.backward(loss)
            engine.step()
            found += [float(loss.detach()), engine.get_global_grad_norm()]
        engine.destroy()
        return found

    with ranks_of_threads(torch.device("cpu")) as run:
        return LoopbackWorld(size).run(lambda collectives: run(collectives, rank))


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes a second axis of so many ranks with the same samples, over which the head is cut if there are several."""

    def widen(size: int) -> None:
        row = AxisRow("second", "second axis", lambda settings: size, ("replica", "tensor"), size > 1)
        monkeypatch.setattr(importlib.import_module("dsrun.config.axes"), "AXES", (*AXES, row))
        root = importlib.import_module("dsrun.runtime.engine.initialize")
        monkeypatch.setattr(root, "CUT_BY_AXES", (cut_head,) if size > 1 else ())

    return widen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {"policy": "every_block"}}])
def test_an_engine_trains_a_cut_head_as_a_whole_one_at_every_stage(
    second: Callable[[int], None], stage: int, more: dict[str, Any]
) -> None:
    second(1)
    ((expected),) = train(1, stage, **more)
    second(2)
    for found in train(2, stage, **more):
        assert found == pytest.approx(expected, rel=2e-5)
