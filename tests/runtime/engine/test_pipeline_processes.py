"""Pipelines of real processes over Gloo: what threads cannot show, for random numbers and torch's defaults are theirs.

Each process trains one engine after another; what one stage computes is the oracle.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import dsrun
from support.pipelines import Case, Ended, Model, assert_same, train, weights_of
from support.ranks import run_ranks

DROPOUT = 0.1
RECOMPUTE = {"activation_checkpointing": {"policy": "every_block"}}


#: (schedule, chunks of a rank, dtype, whether blocks are run again in backward); plain, for processes exchange it.
Layout = tuple[str, int, str, bool]
#: Schedule and chunks, by stages.
SCHEDULES = {1: [("1f1b", 1)], 2: [("1f1b", 1), ("zbv", 2)], 4: [("1f1b", 1), ("zero_bubble", 1)]}


def layouts(stages: int, every: bool) -> list[Layout]:
    """Returns layouts with all values of dtype and recomputation, or half of them: each pair of two values once."""
    product = itertools.product(SCHEDULES[stages], ("fp32", "bf16"), (False, True))
    found = [(schedule, virtual, dtype, recomputes) for (schedule, virtual), dtype, recomputes in product]
    orders = SCHEDULES[stages]
    if every or len(orders) == 1:
        return found
    return [one for one in found if (orders.index(one[:2]) + (one[2] == "bf16") + one[3]) % 2 == 0]


def _engine(case: Case, *, on_meta: bool = False) -> Any:
    torch.manual_seed(7)
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(tied=case.tied, dropout=case.dropout)
    torch.manual_seed(11)
    return dsrun.initialize(model=model, config=case.config())[0]


def _train_all(stages: int, every: bool) -> dict[Layout, Ended]:
    found: dict[Layout, Ended] = {}
    for one in layouts(stages, every):
        schedule, virtual, dtype, recomputes = one
        more: dict[str, Any] = RECOMPUTE if recomputes else {}
        case = Case(stages, schedule, virtual, dtype=dtype, dropout=DROPOUT, more=more)
        engine = _engine(case)
        found[one] = train(engine, 0)
        engine.destroy()
    return found


@functools.cache
def _trained(stages: int, every: bool = False) -> list[dict[Layout, Ended]]:
    return run_ranks(stages, _train_all, stages, every)


EVERY = pytest.mark.soak("each pair of schedule, dtype and recomputation")


@pytest.mark.parametrize(
    ("stages", "every"),
    [
        pytest.param(stages, every, id=f"{stages}{', all' * every}", marks=EVERY if every else ())
        for every in (False, True)
        for stages in (2, 4)
    ],
)
def test_dropout_draws_the_same_in_any_stages_also_where_layers_are_recomputed(stages: int, every: bool) -> None:
    (one_stage,) = _trained(1)
    expected = {dtype: ended for (_, _, dtype, recomputes), ended in one_stage.items() if not recomputes}
    for (_, _, dtype, _), ended in one_stage.items():
        assert_same([ended], expected[dtype])
    of_ranks = _trained(stages, every)
    for layout in layouts(stages, every):
        assert_same([ranks[layout] for ranks in of_ranks], expected[layout[2]])


def _without_dropout() -> list[float]:
    engine = _engine(Case(1))
    losses = train(engine, 0).losses
    engine.destroy()
    return losses


def test_dropout_drops_something() -> None:
    (one_stage,) = _trained(1)
    (plain,) = run_ranks(1, _without_dropout)
    assert all(ended.losses[0] != plain[0] for ended in one_stage.values())


def _from_meta(stages: int, chunks: list[int], tied: bool) -> list[tuple[dict[str, Tensor], Ended]]:
    """First values and what is trained, with each number of chunks."""
    found: list[tuple[dict[str, Tensor], Ended]] = []
    for virtual in chunks:
        engine = _engine(Case(stages, "interleaved" if virtual > 1 else "1f1b", virtual, tied=tied), on_meta=True)
        first = weights_of(engine)
        found.append((first, train(engine, 0, updates=2)))
        engine.destroy()
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_model_on_the_meta_device_gets_the_same_first_values_in_any_stages(tied: bool) -> None:
    (((first, expected),),) = run_ranks(1, _from_meta, 1, [1], tied)
    assert any(value.std() > 0.01 for value in first.values())
    for found in zip(*run_ranks(2, _from_meta, 2, [1, 2], tied), strict=True):
        seen: dict[str, Tensor] = {}
        for values, _ in found:
            seen.update(values)
        assert seen.keys() - {"head.weight"} == first.keys() - {"head.weight"}
        for name, value in seen.items():
            assert torch.equal(value, first.get(name, first["embedding.weight"])), name
        assert_same([ended for _, ended in found], expected)
