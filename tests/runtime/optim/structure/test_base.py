"""Optimizers that know their tensors give the same bits for every number of ranks, and their states travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from dsrun.errors import ModelError
from dsrun.runtime.optim.algorithms.adafactor import Adafactor
from dsrun.runtime.optim.algorithms.adam_mini import AdamMini
from dsrun.runtime.optim.algorithms.eight_bit import Adam8bit, Lion8bit
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.algorithms.muon import Muon
from dsrun.runtime.optim.structure.base import first_names
from support.shards import UNITS, assert_same, train_shards

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Lion": lambda groups: Lion(groups, lr=1e-2, weight_decay=0.1),
    "Lamb": lambda groups: Lamb(groups, lr=1e-2, weight_decay=0.1),
    "AdamMini": lambda groups: AdamMini(groups, lr=1e-2, weight_decay=0.1, num_heads=4),
    "Adafactor": lambda groups: Adafactor(groups, lr=1e-2, weight_decay=0.1),
    "Muon": lambda groups: Muon(groups, lr=1e-2, weight_decay=0.1, adam_lr=1e-3),
    "Muon gram": lambda groups: Muon(groups, lr=1e-2, ns_method="gram"),
    "Adam8bit": lambda groups: Adam8bit(groups, lr=1e-2, weight_decay=0.1, min_8bit_size=300),
    "Lion8bit": lambda groups: Lion8bit(groups, lr=1e-2, weight_decay=0.1, min_8bit_size=0),
}
#: (all-reduces, all-gathers, reduce-scatters) of a step over the units of the tests.
CALLS = {
    "Lion": (0, 0, 0),
    "Lamb": (2, 0, 0),
    "AdamMini": (2, 0, 0),
    "Adafactor": (4, 0, 0),
    "Muon": (0, 2, 2),
    "Muon gram": (0, 2, 2),
    "Adam8bit": (0, 0, 0),
    "Lion8bit": (0, 0, 0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_ranks_gives_the_same_bits(name: str) -> None:
    alone = train_shards(MAKERS[name], world_size=1)
    assert not torch.equal(
        alone.values["gain"], train_shards(MAKERS[name], world_size=1, steps=range(0)).values["gain"]
    )
    assert_same(train_shards(MAKERS[name], world_size=2, sharded=False).values, alone.values)
    for world_size in (2, 3, 7):
        assert_same(train_shards(MAKERS[name], world_size=world_size).values, alone.values)


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_enters_the_collectives_that_are_documented(name: str) -> None:
    calls = train_shards(MAKERS[name], world_size=2, steps=range(2)).traffic.calls
    found = tuple(calls[collective] / 2 for collective in ("all_reduce", "all_gather", "reduce_scatter"))
    assert found == CALLS[name]
    assert sum(calls.values()) == 2 * sum(CALLS[name])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 7)])
def test_states_move_to_another_number_of_ranks(name: str, before: int, after: int) -> None:
    whole = train_shards(MAKERS[name], world_size=1, steps=range(4))
    first = train_shards(MAKERS[name], world_size=before, steps=range(2))
    second = train_shards(
        MAKERS[name],
        world_size=after,
        steps=range(2, 4),
        start={k: v.clone() for k, v in first.values.items()},
        saved=first,
    )
    assert_same(second.values, whole.values)


@pytest.mark.parametrize("name", MAKERS)
def test_every_element_of_a_state_is_saved_once(name: str) -> None:
    trained = train_shards(MAKERS[name], world_size=3, steps=range(1))
    covered: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for entries in trained.entries:
        for entry in entries:
            if entry.holders.rank == 0:
                covered.setdefault((entry.name, entry.role), []).append((entry.start, entry.stop))
    shapes = {(entry.name, entry.role): entry.shape for entries in trained.entries for entry in entries}
    for key, ranges in covered.items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]], key
        assert ranges[-1][1] == torch.Size(shapes[key]).numel()


@pytest.mark.parametrize("name", ["Lamb", "Muon", "Adam8bit"])
def test_gradients_of_every_size_give_finite_steps(name: str) -> None:
    units = [[("w", (8, 64)), ("b", (64,))]]
    for scale in (0.0, 1e-38, 1e-12, 1e18):
        param = nn.Parameter(torch.full((8, 64), 0.5))
        optimizer = MAKERS[name]([{"params": [("w", param)]}])
        param.grad = torch.full_like(param, scale)
        optimizer.step()
        assert bool(torch.isfinite(param).all()), (scale, units)


def test_what_is_not_fp32_is_refused_by_name() -> None:
    optimizer = Lamb([("layer.weight", nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))])
    with pytest.raises(ModelError, match=r"`layer\.weight` is bfloat16; expected contiguous fp32"):
        optimizer.step()


def test_the_units_of_these_tests_have_odd_sizes() -> None:
    assert any(torch.Size(shape).numel() % 64 for unit in UNITS for _, shape in unit)


def test_a_message_has_the_first_names_and_how_many_more() -> None:
    assert first_names(["a", "b", "c"]) == "`a`, `b`, `c`"
    assert first_names([*"abcdefg"]) == "`a`, `b`, `c` and 4 more"
