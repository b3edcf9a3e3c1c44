"""Losses that Hugging Face models make themselves, from logits of which each rank has a part: against whole ones."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.collectives import Traffic
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.operators import share_input
from dsrun.runtime.parallel.tensor.vocabulary.hugging_face_loss import CutLoss, cut_loss_of, loss_obstacle
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart
from dsrun.runtime.parallel.tensor.vocabulary.whole_logits import WholeLogits
from support.decoder_families import VOCAB as FAMILY_VOCAB
from support.decoder_families import decoders, one_of_each_kind, tiny
from support.inside_engine import mesh_of
from support.llama import MICRO, TIME, Ended, on_threads
from support.llama import tokens as tokens_of_engine

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")

VOCAB, BATCH, LENGTH = 43, 2, 9
CAUSAL, MASKED = loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss


def part_of(axis: Any, whole: int = VOCAB) -> VocabularyPart:
    """Parts as they are dealt: the first ranks have one more where they are uneven."""
    low, more = divmod(whole, axis.size)
    start = axis.rank * low + min(axis.rank, more)
    return VocabularyPart(axis, start, start + low + (axis.rank < more), whole)


def llama() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def cut(model: Any, part: VocabularyPart) -> bool:
    """Leaves the output layer this rank's rows, as whoever cuts models does, and the model its loss."""
    head = model.get_output_embeddings()
    for name, param in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(param.detach()[part.start : part.stop].clone()))
    head.register_forward_pre_hook(lambda _, args: (share_input(args[0], part.axis),))
    return cut_loss_of(model, part)


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(6))


def labelled(**more: Any) -> dict[str, Any]:
    labels = tokens()
    labels[0, :4] = -100
    return {"input_ids": tokens(), "labels": labels, **more}


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


CALLS: list[dict[str, Any]] = [
    {},
    {"num_items_in_batch": torch.tensor(7)},
    {"num_items_in_batch": 5},
    {"ignore_index": 20},
    {"shift_labels": torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB},
    {"num_items_in_batch": torch.tensor(11.0), "shift_labels": torch.full((BATCH, LENGTH), 42)},
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("more", CALLS)
def test_a_model_has_the_loss_and_the_gradients_of_the_whole_one(size: int, more: dict[str, Any]) -> None:
    whole = llama()
    given = labelled(**more)
    if "ignore_index" in more:
        given["labels"] = tokens()
    expected = whole(**given).loss
    expected.backward()
    models = [llama() for _ in range(size)]

    def body(axis: LoopbackCollectives) -> Tensor:
        model, part = models[axis.rank], part_of(axis)
        assert cut(model, part)
        output = model(**given)
        assert output.logits.shape == (BATCH, LENGTH, VOCAB), "whole to the script, and not there yet"
        assert dict(axis.traffic.bytes) == {"all_reduce": 3 * 4 * BATCH * LENGTH}
        before = axis.traffic.since(Traffic())
        output.loss.backward()
        assert "all_gather" not in axis.traffic.since(before).calls
        return output.loss.detach()

    losses = LoopbackWorld(size).run(body)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected.detach(), rtol=2e-6, atol=0.0)
    found = [grads_of(model) for model in models]
    for name, grad in grads_of(whole).items():
        ours = torch.cat([one[name] for one in found]) if name == "lm_head.weight" else found[0][name]
        torch.testing.assert_close(ours, grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()) + 1e-8)


@pytest.mark.parametrize("loss", [CAUSAL, MASKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_items_in_batch", [None, 4, torch.tensor(3)])
def test_it_is_called_as_transformers_losses_are(loss: Any, dtype: torch.dtype, num_items_in_batch: Any) -> None:
    logits = torch.randn(BATCH, LENGTH, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    labels = labelled()["labels"]
    expected = loss(logits, labels, VOCAB, num_items_in_batch, -100, label_smoothing=0.1)

    def body(axis: LoopbackCollectives) -> Tensor:
        part = part_of(axis)
        ours = CutLoss(part, loss, shifts=loss is CAUSAL)
        mine = logits[..., part.start : part.stop]
        by_name = ours(logits=mine, labels=labels, vocab_size=VOCAB, num_items_in_batch=num_items_in_batch)
        by_place = ours(mine, labels, VOCAB, num_items_in_batch, -100, label_smoothing=0.1)
        assert torch.equal(by_name, by_place), "a keyword that theirs leaves alone too"
        assert torch.equal(ours(logits, labels, VOCAB, num_items_in_batch), expected), "whole logits have theirs"
        others = loss(logits, tokens(), VOCAB, num_items_in_batch, ignore_index=int(tokens()[1, 2]))
        assert torch.equal(ours(logits, tokens(), VOCAB, num_items_in_batch, int(tokens()[1, 2])), others)
        return by_name

    for found in LoopbackWorld(2).run(body):
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def zloss(output: Any) -> Tensor:
    loss: Tensor = output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()
    return loss


def entropy(output: Any) -> Tensor:
    log_p = output.logits[:, :-1].log_softmax(-1)
    loss: Tensor = output.loss - 0.3 * (log_p.exp() * log_p).sum(-1).mean()
    return loss


def both_and_accuracy(output: Any) -> Tensor:
    with torch.inference_mode():
        right = (output.logits.argmax(-1) == tokens()).double().mean()
    return (1.0 + right.clone()) * (zloss(output) + entropy(output))


def squares(output: Any) -> Tensor:
    loss: Tensor = output.logits.square().mean()
    return loss


def of_tuple(output: Any) -> Tensor:
    return zloss(SimpleNamespace(loss=output[0], logits=output[1]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("term", "more"),
    [
        (zloss, {}),
        (entropy, {}),
        (both_and_accuracy, {}),
        (of_tuple, {"return_dict": False}),
        (zloss, {"logits_to_keep": LENGTH}),
        (zloss, {"output_hidden_states": True}),
        (squares, {}),
    ],
)
def test_terms_of_the_script_are_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, size: int, term: Callable[[Any], Tensor], more: dict[str, Any]
) -> None:
    # transformers computes its losses in fp32; this compares in fp64.
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    whole = llama().double()
    given = labelled(**more)
    expected = term(whole(**given))
    expected.backward()
    expected = expected.detach()
    models = [llama().double() for _ in range(size)]

    def body(axis: LoopbackCollectives) -> Tensor:
        model = models[axis.rank]
        assert cut(model, part_of(axis))
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(2):  # of accumulation
            loss = term(model(**given)) / 2
            loss.backward()
            total += loss.detach()
        assert axis.traffic.calls["all_gather"] == 2, "one for each output, however often it is used"
        return total

    for found in LoopbackWorld(size).run(body):
        assert float(found) == pytest.approx(float(expected), rel=1e-12)
    grads = [grads_of(model) for model in models]
    for name, grad in grads_of(whole).items():
        ours = torch.cat([one[name] for one in grads]) if name == "lm_head.weight" else grads[0][name]
        torch.testing.assert_close(ours, grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))


@pytest.mark.parametrize("width", [16, 8])
def test_what_is_as_long_as_a_part_and_no_logits_is_left_alone(width: int) -> None:
    """Hidden states of 16, and two ranks with 16 tokens each; or 8 tokens, of which nothing is as long."""
    models = [llama_of(2 * width) for _ in range(2)]
    expected = llama_of(2 * width)(tokens() % (2 * width), output_hidden_states=True)

    def body(axis: LoopbackCollectives) -> None:
        model, given = models[axis.rank], tokens() % (2 * width)
        assert cut(model, part_of(axis, 2 * width))
        output = model(given, labels=given, output_hidden_states=True)
        assert not any(isinstance(one, WholeLogits) for one in (*output.hidden_states, output.loss))
        for found, right in zip(output.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(output.logits.detach() + 0, expected.logits.detach(), rtol=1e-6, atol=1e-7)

    LoopbackWorld(2).run(body)


def llama_of(vocab: int) -> Any:
    model = llama()
    torch.manual_seed(4)
    model.lm_head = nn.Linear(16, vocab, bias=False)
    model.config.vocab_size = vocab
    return model


def test_a_rank_without_tokens_and_half_precision_have_whole_logits_too() -> None:
    models = [llama_of(2).bfloat16() for _ in range(3)]
    given = {"input_ids": tokens(), "labels": tokens() % 2}
    expected = llama_of(2).bfloat16()(**given)

    def body(axis: LoopbackCollectives) -> None:
        part, model = part_of(axis, 2), models[axis.rank]
        assert part.tokens == (axis.rank < 2)
        assert cut(model, part)
        output = model(**given)
        assert output.logits.shape == (BATCH, LENGTH, 2)
        assert output.logits.dtype == torch.bfloat16
        torch.testing.assert_close(output.logits.detach() + 0, expected.logits.detach())
        zloss(output).backward()

    LoopbackWorld(3).run(body)


def test_under_autocast_a_term_of_the_script_is_that_of_one_rank() -> None:
    models = [llama() for _ in range(2)]

    def term(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return zloss(model(**labelled()))

    expected = term(llama()).detach()

    def body(axis: LoopbackCollectives) -> None:
        assert cut(models[axis.rank], part_of(axis))
        torch.testing.assert_close(term(models[axis.rank]).detach(), expected, rtol=1e-3, atol=0.0)

    LoopbackWorld(2).run(body)


class Inside(nn.Module):
    """A model around one of transformers, with the loss and the output layer of that one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.loss_function: Any = CAUSAL

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head  # pyright: ignore[reportReturnType]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = self.inner(input_ids, labels=labels)
        logits = output["logits"]
        return Answer(self.loss_function(logits, labels, VOCAB), (logits * 2.0, [None]))


class Answer:
    """An output of no known kind."""

    def __init__(self, loss: Tensor, more: tuple[Any, ...]) -> None:
        self.loss, self.more = loss, more


def test_the_outermost_model_alone_hands_out_whole_logits() -> None:
    models = [Inside() for _ in range(2)]
    expected = Inside()(**labelled())

    def body(axis: LoopbackCollectives) -> None:
        model: Any = models[axis.rank]
        assert cut(model, part_of(axis))
        seen: list[Any] = []

        def see(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(type(output.logits))

        model.inner.register_forward_hook(see)
        output = model(**labelled())
        assert seen == [Tensor], "the loss around it is made of parts as well"
        assert isinstance(output.more[0], WholeLogits)
        torch.testing.assert_close(output.loss, expected.loss, rtol=2e-6, atol=0.0)
        torch.testing.assert_close(output.more[0].detach() + 0, expected.more[0].detach(), rtol=1e-6, atol=1e-7)

    LoopbackWorld(2).run(body)


def test_frozen_models_have_whole_logits_at_once() -> None:
    models = [llama() for _ in range(2)]
    expected = llama()(**labelled()).loss.detach()

    def body(axis: LoopbackCollectives) -> None:
        assert cut(models[axis.rank], part_of(axis))
        models[axis.rank].requires_grad_(False)
        output = models[axis.rank](**labelled())
        assert type(output.logits) is Tensor
        assert output.logits.shape[-1] == VOCAB
        torch.testing.assert_close(output.loss, expected, rtol=2e-6, atol=0.0)

    LoopbackWorld(2).run(body)


def test_without_labels_or_without_gradients_logits_are_whole() -> None:
    whole = llama()
    given = labelled()
    expected = whole(**given)
    models = [llama() for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        model = models[axis.rank]
        assert cut(model, part_of(axis))
        for args, kwargs in (((given["input_ids"],), {}), ((given["input_ids"], None, None, None, None, None), {})):
            torch.testing.assert_close(model(*args, **kwargs).logits, expected.logits, rtol=1e-6, atol=1e-7)
        with torch.no_grad():
            output = model(**given)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0.0)
        before = axis.traffic.since(Traffic())
        assert model(given["input_ids"], None, None, None, None, given["labels"]).logits.shape[-1] == VOCAB
        assert "all_gather" not in axis.traffic.since(before).calls
        before = axis.traffic.since(Traffic())
        assert model(given["input_ids"], shift_labels=given["labels"]).logits.shape[-1] == VOCAB
        assert axis.traffic.since(before).calls["all_gather"] == 1, "no loss is made, and the model may use them"

    LoopbackWorld(2).run(body)


def test_a_loss_of_the_script_over_gathered_logits_has_the_gradients_of_the_whole() -> None:
    whole = llama()
    whole(tokens()).logits.square().mean().backward()
    models = [llama() for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        assert cut(models[axis.rank], part_of(axis))
        models[axis.rank](tokens()).logits.square().mean().backward()

    LoopbackWorld(2).run(body)
    found = [grads_of(model) for model in models]
    for name, grad in grads_of(whole).items():
        ours = torch.cat([one[name] for one in found]) if name == "lm_head.weight" else found[0][name]
        torch.testing.assert_close(ours, grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()) + 1e-8)


def test_generation_chooses_among_all_tokens() -> None:
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = llama().generate(tokens(), **given)
    models = [llama() for _ in range(2)]

    def body(axis: LoopbackCollectives) -> Tensor:
        assert cut(models[axis.rank], part_of(axis))
        found: Tensor = models[axis.rank].generate(tokens(), **given)
        return found

    assert all(torch.equal(found, expected) for found in LoopbackWorld(2).run(body))


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    models = [llama() for _ in range(2)]

    def body(axis: LoopbackCollectives) -> None:
        model = models[axis.rank]
        assert cut(model, part_of(axis))
        handle = model.model.norm.register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="on its way"):
            model(**labelled())
        handle.remove()
        assert model(tokens()).logits.shape[-1] == VOCAB

    LoopbackWorld(2).run(body)


def _fail(*_: Any) -> None:
    raise RuntimeError("on its way")


def test_a_copy_of_a_cut_model_is_cut_by_itself() -> None:
    models = [llama() for _ in range(2)]
    expected = llama()(**labelled()).loss.detach()

    def body(axis: LoopbackCollectives) -> None:
        assert cut(models[axis.rank], part_of(axis))
        twin = copy.deepcopy(models[axis.rank])
        torch.testing.assert_close(twin(**labelled()).loss.detach(), expected, rtol=2e-6, atol=0.0)
        assert twin(tokens()).logits.shape[-1] == VOCAB

    LoopbackWorld(2).run(body)


class Model(nn.Module):
    """What makes a model one of transformers to the loss: an output layer and a loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, VOCAB, bias=False)
        self.loss_function: Any = CAUSAL
        self.config = SimpleNamespace(vocab_size=VOCAB, pad_token_id=0)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.lm_head(x[:, -4:, :]).float() / 2
        logits = torch.tanh(logits) * 2
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return SimpleNamespaceOutput(loss=loss, logits=logits)


class SimpleNamespaceOutput(SimpleNamespace):
    pass


class Bare(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits  # type: ignore[union-attr]


class Masks(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        logits[:, :, self.config.pad_token_id] = -1e9
        return self.loss_function(logits, labels, VOCAB), logits


class Unpads(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        logits = logits[..., :40]
        return self.loss_function(logits, labels, 40), logits


class Counts(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        return self.loss_function(logits, labels, vocab_size=logits.shape[-1]), logits


class Regularises(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        return self.loss_function(logits, labels, VOCAB) + logits.logsumexp(-1).mean(), logits


class Renames(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        scores = logits
        return self.loss_function(logits, labels, VOCAB), scores.argmax(-1)


class Samples(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.lm_head(x)
        return self.loss_function(logits, labels, VOCAB), F.softmax(logits, -1)


def with_loss(loss: Any) -> Model:
    model = Model()
    model.loss_function = loss
    return model


def without_head() -> Model:
    model = Model()
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign,assignment,return-value]
    return model


def of_no_text() -> Model:
    space: dict[str, Any] = {"Model": Model}
    exec("class Written(Model):\n    def forward(self, x): return self.loss_function(x)", space)
    made: Model = space["Written"]()
    return made


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Model, None),
        (lambda: with_loss(MASKED), None),
        (lambda: nn.Linear(3, 3), "Linear names no output layer"),
        (lambda: nn.Sequential(Model()), "Sequential names no output layer"),
        (without_head, "Model names no output layer"),
        (lambda: with_loss(loss_utils.ForTokenClassification), "the loss of Model is ForTokenClassification"),
        (lambda: with_loss(lambda *_: None), "the loss of Model is <lambda>"),
        (Bare, "the forward of Bare makes its loss without `self.loss_function`"),
        (Masks, r"the forward of Masks has `logits\[:, :, self.config.pad_token_id\]`"),
        (Unpads, r"the forward of Unpads has `logits\[..., :40\]`"),
        (Counts, "the forward of Counts has `logits.shape`"),
        (Regularises, "the forward of Regularises has `logits.logsumexp`"),
        (Renames, "the forward of Renames has `scores = logits`"),
        (Samples, r"the forward of Samples has `F.softmax\(logits, -1\)`"),
        (of_no_text, "the forward of Written has no text to read"),
    ],
)
def test_what_parts_of_logits_do_not_do_for_is_named_and_changes_nothing(
    make: Callable[[], Any], reason: str | None
) -> None:
    model = make()
    found = loss_obstacle(model)
    before = getattr(model, "loss_function", None)
    assert cut_loss_of(model, part_of(AloneCollectives())) is (reason is None)
    if reason is None:
        assert found is None
        assert isinstance(model.loss_function, CutLoss)
    else:
        assert found is not None
        assert re.match(reason, found), found
        assert getattr(model, "loss_function", None) is before
        assert not any(module._forward_hooks for module in model.modules())


def test_exact_losses_are_those_of_gathered_logits() -> None:
    model = Model()
    assert not cut_loss_of(model, replace(part_of(AloneCollectives()), exact=True))
    assert model.loss_function is CAUSAL


class Outer(Model):
    """Has a model that makes the logits, and a loss of its own over them."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Model()
        del self.lm_head

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.language_model(x)
        logits = outputs.logits
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return SimpleNamespaceOutput(loss=loss, logits=logits)


def test_a_model_around_the_one_with_the_output_layer_has_its_loss_cut_too() -> None:
    x, labels = torch.randn(2, 4, 4), torch.arange(8).view(2, 4)
    torch.manual_seed(0)
    whole = Outer()
    expected = whole(x, labels).loss

    def body(axis: LoopbackCollectives) -> None:
        model = copy.deepcopy(whole)
        assert cut(model, part_of(axis))
        output = model(x, labels=labels)
        assert output.logits.shape[-1] == VOCAB
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0.0)
        inner = model.language_model(x, labels)
        torch.testing.assert_close(inner.loss, expected, rtol=1e-6, atol=0.0)
        assert model(x).logits.shape[-1] == model.language_model(x).logits.shape[-1] == VOCAB

    LoopbackWorld(2).run(body)


def _family_loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@pytest.mark.parametrize(
    "whole",
    [False, pytest.param(True, marks=pytest.mark.soak("one family of each kind of plan has its loss cut by default"))],
    ids=["one of each kind", "all"],
)
@pytest.mark.filterwarnings("ignore")  # of models' own code
def test_every_family_has_the_loss_of_whole_logits_or_a_reason_why_they_are_gathered(whole: bool) -> None:
    """Reasons are asked of every model's text, which costs little; the bits of a cut loss, of fewer by default."""
    ids = torch.randint(3, FAMILY_VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    cut_ones: list[str] = []
    reasons: dict[str, str] = {}
    tried = decoders() if whole else one_of_each_kind(decoders())
    for name, config in decoders().items():
        torch.manual_seed(3)
        model: Any = tiny(config).train()
        reason = loss_obstacle(model)
        if reason is not None:
            reasons[name] = reason
        if reason is not None or name not in tried:
            continue
        assert "labels" in inspect.signature(model.forward).parameters, name
        expected = _family_loss(model, ids).detach()
        models = [copy.deepcopy(model) for _ in range(2)]

        def body(axis: LoopbackCollectives, models: list[Any] = models) -> Tensor:
            model = models[axis.rank]
            whole = model.get_output_embeddings().weight.shape[0]
            assert cut(model, part_of(axis, whole))
            loss = _family_loss(model, ids)
            assert dict(axis.traffic.calls) == {"all_reduce": 2}
            return loss.detach()

        for found in LoopbackWorld(2).run(body):
            assert float(found) == pytest.approx(float(expected), rel=2e-6), name
        cut_ones.append(name)
    gathered = {name: reason for name, reason in reasons.items() if "names no output layer" not in reason}
    assert gathered == {
        "InklingTextConfig": "the forward of InklingForCausalLM has `logits[..., :unpadded_vocab_size]`"
    }
    assert len(cut_ones) >= (80 if whole else 12)


def gathered_in_a_step(term: Callable[[Any], Tensor], tensor: int = 2, **more: Any) -> tuple[list[int], Ended]:
    """Returns the bytes that all-gathers over the tensor axis moved in the second step's forwards, and results."""

    def body(engine: Any, data_rank: int) -> tuple[list[int], Ended]:
        traffic, found, ended = mesh_of(engine).tensor.traffic, list[int](), Ended()
        engine.module.config.use_cache = False  # recomputed blocks would add to it twice
        for step in range(2):
            for micro in range(engine.gradient_accumulation_steps()):
                given = tokens_of_engine(step, micro, data_rank)[:, :TIME] % VOCAB
                before = traffic.since(Traffic())
                loss = term(engine(input_ids=given, labels=given))
                found.append(traffic.since(before).bytes["all_gather"])
                engine.backward(loss)
                engine.step()
                ended.losses.append(loss.item())
            ended.norms.append(engine.get_global_grad_norm())
        return found[-2:], ended

    ranks: list[tuple[list[int], Ended]] = on_threads(tensor, tensor, body, make=llama, **more)
    assert all(one[1].losses == ranks[0][1].losses for one in ranks)
    return ranks[0]


LOGITS = 4 * MICRO * TIME * 2 * 22  # bytes of fp32 in two parts of the vocabulary
ENGINES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 3},
    {"stage": 3, "activation_checkpointing": {"policy": "every_block"}},
    {"stage": 1, "bf16": {"enabled": True}},
    {"stage": 0, "tensor_parallel": {"sequence_parallel": True}},
]


@pytest.mark.parametrize("more", ENGINES)
def test_an_engine_gathers_logits_where_the_script_uses_them_and_not_else(more: dict[str, Any]) -> None:
    silent, _ = gathered_in_a_step(lambda output: output.loss, **more)
    used, ended = gathered_in_a_step(zloss, **more)
    whole = {key: value for key, value in more.items() if key != "tensor_parallel"}
    _, expected = gathered_in_a_step(zloss, 1, **whole)
    of_logits = LOGITS // (2 if "bf16" in more else 1)
    assert [after - before for before, after in zip(silent, used, strict=True)] == [of_logits] * 2
    if "tensor_parallel" not in more:  # slices of the sequence are gathered in a forward
        assert silent == [0, 0]
    rel = 2e-2 if "bf16" in more else 1e-5
    assert ended.losses == pytest.approx(expected.losses, rel=rel)
    assert ended.norms == pytest.approx(expected.norms, rel=10 * rel)


def test_the_config_says_that_a_loss_is_of_whole_logits() -> None:
    section = {"vocab_parallel_lm_head": False}
    assert gathered_in_a_step(lambda output: output.loss, stage=0)[0] == [0, 0]
    assert gathered_in_a_step(lambda output: output.loss, stage=0, tensor_parallel=section)[0] == [LOGITS] * 2
