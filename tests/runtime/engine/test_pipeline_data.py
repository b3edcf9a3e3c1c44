"""What pipelines are given and give back: items of every kind, sources of data, evaluation, and what goes wrong."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import DsrunError, InputError, ModelError
from dsrun.pipe import PipelineError
from support.covering import covering
from support.pipelines import (
    MICROS,
    VOCABULARY,
    WIDTH,
    Case,
    Model,
    assert_same,
    items,
    layers_of,
    loss_fn,
    run,
    train,
    weights_of,
)

LENGTH = 8
#: Layouts in which ranks have the first chunk, the last one, both or neither.
LAYOUTS = [Case(1), Case(2), Case(4), Case(2, "zbv", 2), Case(2, data=2)]


# Items.


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def dicts(data_rank: int) -> Iterator[dict[str, Tensor]]:
    """Micro batches as Hugging Face's collators make them, padded, with labels that leave out the padding."""
    for number in itertools.count():
        generator = torch.Generator().manual_seed(1000 * data_rank + number)
        tokens = torch.randint(1, VOCABULARY, (2, 6 + number % 3), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, -2:] = 0
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def of_dicts(engine: Any, data_rank: int) -> list[float]:
    batches = dicts(data_rank)
    return [float(engine.train_batch(batches)) for _ in range(3)]


def test_a_dict_is_what_a_hugging_face_model_is_called_with_and_the_loss_is_its_own() -> None:
    torch.manual_seed(7)
    model = llama()
    losses = [float(model(**item).loss.detach()) for item in itertools.islice(dicts(0), MICROS)]
    expected = run(Case(1), of_dicts, llama)[0]
    assert expected[0] == pytest.approx(sum(losses) / MICROS, rel=1e-6)
    for case in (Case(2), Case(2, "zbv", 2)):
        assert run(case, of_dicts, llama) == [expected] * 2


@pytest.mark.parametrize("case", [Case(2), Case(4), Case(2, "interleaved", 2), Case(2, data=2, zero=1)], ids=str)
def test_a_list_of_layers_trains_with_its_own_loss_function(case: Case) -> None:
    def body(engine: Any, data_rank: int) -> tuple[list[float], list[float]]:
        batches = items(data_rank)
        losses = [float(engine.train_batch(data_iter=batches)) for _ in range(3)]
        return losses, [engine.get_global_grad_norm()]

    one = Case(data=case.data)
    expected = run(one, body, of_rank=layers_of(one))[0]
    assert run(case, body, of_rank=layers_of(case)) == [expected] * case.ranks
    assert expected[0][2] < expected[0][0]


# Where they come from.


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in tokens]


def test_without_an_iterator_the_engines_own_loader_is_gone_through_over_and_over() -> None:
    def body(engine: Any, data_rank: int) -> list[float]:
        return [float(engine.train_batch(loss_fn=loss_fn)) for _ in range(4)]

    def by_hand(engine: Any, data_rank: int) -> list[float]:
        assert len(engine.training_dataloader) == 12
        loader = itertools.chain.from_iterable(itertools.repeat(engine.training_dataloader))
        return [float(engine.train_batch(loader, loss_fn=loss_fn)) for _ in range(4)]

    # An epoch has twelve micro batches, of which the last one has one sample; a global batch has four.
    words = {"training_data": samples(23)}
    expected = run(Case(1), by_hand, **words)[0]
    assert run(Case(1), body, **words) == [expected]
    for case in (Case(2), Case(4)):
        assert run(case, body, **words) == [expected] * case.ranks
    of_two = run(Case(1, data=2), body, **words)[0]
    assert run(Case(2, data=2), body, **words) == [of_two] * 4


def test_a_loader_an_iterator_and_a_function_for_items_are_used_where_they_are_set() -> None:
    raw = [torch.cat([row, row[:1]]) for row, _ in samples(6)]

    def pair(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        return tokens_BT[:, :-1], tokens_BT[:, 1:]

    batches = [torch.stack(raw[:2]), torch.stack(raw[2:4]), torch.stack(raw[4:5]), raw[5][None, :5]]

    def loader(engine: Any, data_rank: int) -> list[float]:
        engine.set_batch_fn(pair)
        engine.set_dataloader(batches)
        return [float(engine.train_batch(loss_fn=loss_fn)) for _ in range(2)]

    def iterator(engine: Any, data_rank: int) -> list[float]:
        engine.set_dataiterator(map(pair, itertools.cycle(batches)))
        return [float(engine.train_batch(loss_fn=loss_fn)) for _ in range(2)]

    expected = run(Case(1), iterator)[0]
    for case in (Case(1), Case(2), Case(2, "zbv", 2)):
        for body in (loader, iterator):
            assert run(case, body) == [expected] * case.ranks


def test_stages_between_the_ends_of_a_list_of_layers_need_no_data() -> None:
    def body(engine: Any, data_rank: int) -> list[float]:
        is_end = engine.is_first_stage() or engine.is_last_stage()
        batches = items(data_rank) if is_end else None
        return [float(engine.train_batch(batches)) for _ in range(2)]

    expected = run(Case(1), body, of_rank=layers_of(Case(1)))[0]
    assert run(Case(4), body, of_rank=layers_of(Case(4))) == [expected] * 4


# Evaluation.


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_an_evaluation_between_updates_changes_no_bit_of_training(case: Case) -> None:
    def body(engine: Any, data_rank: int) -> Any:
        batches, losses = items(data_rank), []
        for number in range(3):
            losses.append(float(engine.train_batch(batches, loss_fn=loss_fn)))
            engine.eval_batch(items(7 + data_rank), loss_fn=loss_fn, num_micro_batches=1 + 3 * number)
            assert engine.module.training
        return losses, engine.get_global_grad_norm(), weights_of(engine)

    for (losses, norm, weights), plain in zip(run(case, body), run(case), strict=True):
        assert losses == plain.losses
        assert norm == plain.norms[-1]
        assert all(torch.equal(value, plain.weights[name]) for name, value in weights.items())


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_an_evaluation_gives_what_is_asked_for_where_it_is_asked_for(case: Case) -> None:
    torch.manual_seed(7)
    model = Model(tied=False, dropout=0.0)
    outputs: list[list[Tensor]] = []
    of_ranks: list[list[Tensor]] = []
    with torch.no_grad():
        for data_rank in range(case.data):
            pairs = list(itertools.islice(items(data_rank), MICROS))
            outputs.append([model(inputs) for inputs, _ in pairs])
            of_ranks.append([loss_fn(out, pair[1]) for out, pair in zip(outputs[-1], pairs, strict=True)])
    by_micro = torch.tensor(of_ranks).mean(0)

    def same(found: Any, expected: list[Tensor], *, is_last: bool) -> None:
        if not is_last:
            assert found is None
            return
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def body(engine: Any, data_rank: int) -> None:
        last = engine.is_last_stage()

        def evaluate(**words: Any) -> Any:
            return engine.eval_batch(items(data_rank), loss_fn=loss_fn, **words)

        mean = evaluate()
        torch.testing.assert_close(mean, by_micro.mean(), rtol=1e-6, atol=0)
        listed = evaluate(reduce_output=None)
        torch.testing.assert_close(torch.stack(listed), by_micro, rtol=1e-6, atol=0)
        loss, found = evaluate(return_logits=True)
        assert torch.equal(loss, mean)
        same(found, outputs[data_rank], is_last=last)
        same(evaluate(compute_loss=False), outputs[data_rank], is_last=last)
        kept = evaluate(bcast_loss=False)
        assert torch.equal(kept, mean) if last else kept is None
        two = evaluate(num_micro_batches=2)
        torch.testing.assert_close(two, by_micro[:2].mean(), rtol=1e-6, atol=0)
        with torch.no_grad():
            assert torch.equal(evaluate(), mean)
        for words in ({"reduce_output": "sum"}, {"num_micro_batches": 0}):
            with pytest.raises(InputError, match=next(iter(words))):
                evaluate(**words)

    run(case, body)


# What goes wrong.


def told(call: Callable[[], Any]) -> BaseException:
    """Returns the error of a call."""
    with pytest.raises((DsrunError, StopIteration, ValueError, RuntimeError)) as raised:
        call()
    return raised.value


BATCH_CALLS = {name: name for name in ("train_batch", "eval_batch")}


@pytest.mark.parametrize(("case", "call"), covering({str(case): case for case in LAYOUTS[:4]}, BATCH_CALLS, together=1))
def test_data_that_ends_is_told_on_all_ranks_and_training_can_go_on(case: Case, call: str) -> None:
    def body(engine: Any, data_rank: int) -> list[BaseException]:
        # Of several ranks one has less.
        count = MICROS + (2 if engine.global_rank == 0 else MICROS)
        batches = itertools.islice(items(data_rank), count)
        getattr(engine, call)(batches, loss_fn=loss_fn)
        inside = told(lambda: getattr(engine, call)(batches, loss_fn=loss_fn))
        before = told(lambda: getattr(engine, call)(iter(()), loss_fn=loss_fn))
        train(engine, data_rank, 1)
        return [inside, before]

    for inside, before in run(case, body):
        assert isinstance(inside, ModelError)
        assert f"ends after 2 of the {MICROS} micro batches" in str(inside)
        assert isinstance(before, StopIteration)


def refusals(engine: Any, data_rank: int) -> dict[str, BaseException]:
    """What is refused before anything is done, and training goes on after all of it."""

    def batch(**words: Any) -> Any:
        return engine.train_batch(items(data_rank), loss_fn=loss_fn, **words)

    found = {
        "a list": told(lambda: engine.train_batch(list(itertools.islice(items(data_rank), MICROS)), loss_fn=loss_fn)),
        "no data": told(lambda: engine.train_batch(loss_fn=loss_fn)),
    }
    with torch.no_grad():
        found["no_grad"] = told(batch)
    with engine.no_sync():
        found["no_sync"] = told(batch)
    batch()
    return found


@pytest.mark.parametrize("case", [Case(1), Case(2), Case(2, data=2)], ids=str)
def test_a_call_at_the_wrong_time_or_without_an_iterator_is_refused_on_every_rank(case: Case) -> None:
    for found in run(case, refusals):
        assert isinstance(found["a list"], InputError)
        assert "data_iter is a list, which is no iterator" in str(found["a list"])
        assert isinstance(found["no data"], InputError)
        assert isinstance(found["no_grad"], ModelError)
        assert "under torch.no_grad()" in str(found["no_grad"])
        assert isinstance(found["no_sync"], ModelError)
        assert "inside engine.no_sync" in str(found["no_sync"])


def test_a_global_batch_that_backward_has_begun_is_not_mixed_with_a_whole_one() -> None:
    def body(engine: Any, data_rank: int) -> str:
        inputs, targets = next(items(data_rank))
        engine.backward(loss_fn(engine(inputs), targets))
        return str(told(lambda: engine.train_batch(items(data_rank), loss_fn=loss_fn)))

    (text,) = run(Case(1), body)
    assert "micro steps of a global batch that engine.backward has begun" in text


@pytest.mark.parametrize("case", [Case(2), Case(2, "zbv", 2)], ids=str)
def test_parts_of_a_step_are_refused_with_the_call_that_does_them(case: Case) -> None:
    def body(engine: Any, data_rank: int) -> list[BaseException]:
        inputs, _ = next(items(data_rank))
        found = [
            told(lambda: engine(inputs)),
            told(lambda: engine.forward(inputs)),
            told(lambda: engine.backward(torch.ones((), requires_grad=True))),
            told(engine.step),
            told(lambda: engine.generate(input_ids=inputs)),
        ]
        engine.train_batch(dicts(data_rank))
        return found

    for found in run(case, body, llama):
        for error in found:
            assert isinstance(error, PipelineError)
            assert "in 2 pipeline stages" in str(error)
            assert "engine.train_batch(data_iter)" in str(error.hint)


class Refusal(Exception):
    """What a script raises."""


def raising(*_: Any) -> Tensor:
    raise Refusal("the loss cannot be computed")


#: What the script gives, and a part of what is said of it where it is found.
WRONG: dict[str, tuple[Any, Any, str]] = {
    "a loss function that raises": (items, raising, "the loss cannot be computed"),
    "no scalar": (items, lambda logits, labels: logits, "expected one number"),
    "no loss": (items, lambda logits, labels: None, "expected one number"),
    "a model that returns none": (lambda rank: (pair[:1] for pair in items(rank)), None, "expected one number"),
    "no pair": (lambda rank: (pair[0] for pair in items(rank)), loss_fn, r"expected a pair \(inputs, labels\)"),
}


@pytest.mark.parametrize(
    ("wrong", "case", "call"),
    covering({name: name for name in WRONG}, {str(case): case for case in LAYOUTS[:4]}, BATCH_CALLS),
)
def test_what_fails_on_one_stage_ends_all_of_them(wrong: str, case: Case, call: str) -> None:
    data, function, text = WRONG[wrong]
    failed = threading.Event()

    def body(engine: Any, data_rank: int) -> None:
        try:
            getattr(engine, call)(data(data_rank), loss_fn=function)
        except BaseException:
            failed.set()
            raise
        pytest.fail("it went well")

    with pytest.raises((Refusal, DsrunError), match=text):
        run(case, body)
    assert failed.is_set()


CALLS: dict[str, Callable[[Any], Any]] = {
    "train_batch": lambda engine: engine.train_batch(items(0), loss_fn=loss_fn),
    "eval_batch": lambda engine: engine.eval_batch(items(0), loss_fn=loss_fn),
    "save_checkpoint": lambda engine: engine.save_checkpoint("checkpoints"),
    "load_checkpoint": lambda engine: engine.load_checkpoint("checkpoints"),
    "save_16bit_model": lambda engine: engine.save_16bit_model("weights"),
}


@pytest.mark.parametrize(("call", "fails"), covering({name: name for name in CALLS}, BATCH_CALLS, together=1))
def test_a_call_after_a_batch_that_failed_between_stages_is_refused_at_once(call: str, fails: str) -> None:
    def body(engine: Any, data_rank: int) -> None:
        wrong = (pair[0] for pair in items(data_rank))
        if engine.is_last_stage():
            getattr(engine, fails)(wrong, loss_fn=loss_fn)  # waits for the first stage, which has failed
        assert "expected a pair" in str(told(lambda: getattr(engine, fails)(wrong, loss_fn=loss_fn)))
        raise Refusal(str(told(lambda: CALLS[call](engine))))

    with pytest.raises(Refusal, match=f"engine.{call}: an earlier batch has failed on this rank"):
        run(Case(2), body)


@pytest.mark.parametrize(
    ("case", "fails"), covering({str(case): case for case in (Case(1), Case(1, zero=3))}, BATCH_CALLS, together=1)
)
def test_one_stage_goes_on_after_a_batch_that_failed_as_if_there_had_been_none(case: Case, fails: str) -> None:
    def body(engine: Any, data_rank: int) -> Any:
        with pytest.raises(Refusal):
            getattr(engine, fails)(items(data_rank), loss_fn=raising)
        return train(engine, data_rank)

    assert_same(run(case, body), run(case)[0])


@pytest.mark.parametrize("fails", ["train_batch", "eval_batch"])
def test_a_batch_that_failed_lets_go_of_chunks_that_were_gathered(fails: str) -> None:
    both = threading.Barrier(2)

    def body(engine: Any, data_rank: int) -> None:
        wrong = (pair[0] for pair in items(data_rank))
        if engine.is_last_stage():
            getattr(engine, fails)(wrong, loss_fn=loss_fn)  # waits for the first stage, which has failed
        told(lambda: getattr(engine, fails)(wrong, loss_fn=loss_fn))
        states = {param.ds_status.name for param in engine.module.parameters()}
        both.wait(60)  # what one of them raises ends the gathers of the other
        raise Refusal(str(states))

    with pytest.raises(Refusal, match=r"^\{'NOT_AVAILABLE'\}$"):
        run(Case(2, "breadth_first", 2, data=2, zero=3), body)
