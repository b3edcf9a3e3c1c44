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
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.operators import share_input
from dsrun.runtime.parallel.tensor.vocabulary.hugging_face_loss import CutLoss, cut_loss_of, loss_obstacle
from dsrun.runtime.parallel.tensor.vocabulary.part import VocabularyPart
from support.decoder_families import NO_DECODER, configurations, tiny
from support.decoder_families import VOCAB as FAMILY_VOCAB

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
        assert output.logits.shape == (BATCH, LENGTH, part.tokens), "this rank's part"
        assert dict(axis.traffic.bytes) == {"all_reduce": 3 * 4 * BATCH * LENGTH}
        output.loss.backward()
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
        by_place = model(given["input_ids"], None, None, None, None, given["labels"])
        assert by_place.logits.shape[-1] == part_of(axis).tokens
        assert model(given["input_ids"], shift_labels=given["labels"]).logits.shape[-1] == VOCAB, "no loss is made"

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
        assert output.logits.shape[-1] == part_of(axis).tokens
        torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0.0)
        inner = model.language_model(x, labels)
        torch.testing.assert_close(inner.loss, expected, rtol=1e-6, atol=0.0)
        assert model(x).logits.shape[-1] == model.language_model(x).logits.shape[-1] == VOCAB

    LoopbackWorld(2).run(body)


def _family_loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@pytest.mark.filterwarnings("ignore")  # of models' own code
def test_every_family_has_the_loss_of_whole_logits_or_a_reason_why_they_are_gathered() -> None:
    ids = torch.randint(3, FAMILY_VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    cut_ones: list[str] = []
    reasons: dict[str, str] = {}
    for name, config in configurations().items():
        if name in NO_DECODER:
            continue
        torch.manual_seed(3)
        model: Any = tiny(config).train()
        reason = loss_obstacle(model)
        if reason is not None:
            reasons[name] = reason
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
    assert len(cut_ones) >= 80
