"""Pipeline stages through whole engines, in threads: the same bits as one stage, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsrun.errors import ModelError
from support.pipelines import MICROS, UPDATES, Case, Ended, Model, assert_same, items, loss_fn, run, weights_of

PIPELINES = [
    Case(2, "gpipe"),
    Case(2, "1f1b"),
    Case(4, "1f1b"),
    Case(2, "interleaved", 2),
    Case(4, "interleaved", 2),
    Case(2, "breadth_first", 2),
    Case(4, "zero_bubble"),
    Case(2, "zbv", 2),
]


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: f"{case.schedule}-{case.stages}x{case.virtual}")
def test_stages_have_the_bits_of_one_stage(case: Case, dtype: str, tied: bool) -> None:
    one = run(Case(tied=tied, dtype=dtype))[0]
    found = run(Case(case.stages, case.schedule, case.virtual, tied=tied, dtype=dtype))
    assert_same(found, one)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_and_data_ranks_have_the_bits_of_data_ranks_alone(zero: int) -> None:
    expected = run(Case(data=2, zero=zero))
    found = run(Case(2, data=2, zero=zero))
    assert expected[0].losses == expected[1].losses
    assert_same(found, expected[0])


def test_one_stage_by_train_batch_has_the_bits_of_the_loop() -> None:
    def loop(engine: Any, data_rank: int) -> Ended:
        batches, losses, norms = items(data_rank), [], []
        for _ in range(UPDATES):
            total = 0.0
            for _ in range(MICROS):
                inputs, targets = next(batches)
                loss = loss_fn(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach())
            losses.append(total / MICROS)
            norms.append(engine.get_global_grad_norm())
        return Ended(losses, norms, weights_of(engine))

    by_hand, whole = run(Case(), loop)[0], run(Case())[0]
    assert whole.norms == by_hand.norms
    assert whole.losses == pytest.approx(by_hand.losses, rel=1e-7)
    for name, value in whole.weights.items():
        assert torch.equal(value, by_hand.weights[name]), name


def test_uses_of_a_weight_on_one_rank_and_on_others_are_summed_once() -> None:
    expected = run(Case(data=2, tied=True))
    found = run(Case(2, "zbv", 2, data=2, tied=True))
    assert_same(found, expected[0])


def test_a_stage_that_trains_nothing_takes_part() -> None:
    def frozen() -> Model:
        model = Model(tied=False, dropout=0.0)
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(("blocks.6", "blocks.7", "norm", "head")))
        return model

    one = run(Case(), make=frozen)[0]
    found = run(Case(2), make=frozen)
    assert_same(found, one)


def test_stages_that_draw_different_items_are_refused() -> None:
    def body(engine: Any, data_rank: int) -> None:
        del data_rank
        with pytest.raises(ModelError, match="drawn different items"):
            engine.train_batch(items(engine.stage_id), loss_fn=loss_fn)

    run(Case(2), body)
