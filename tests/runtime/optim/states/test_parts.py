"""States of parameters that are cut over ranks are states of the whole parameters' boxes, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from dsrun.checkpoint_files.index.region import TensorBoxes
from dsrun.errors import CheckpointError, ModelError
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.memory.arenas import Arenas
from dsrun.runtime.optim.algorithms.adafactor import Adafactor
from dsrun.runtime.optim.algorithms.adam_mini import AdamMini
from dsrun.runtime.optim.algorithms.eight_bit import Adam8bit, Lion8bit
from dsrun.runtime.optim.algorithms.lamb import Lamb
from dsrun.runtime.optim.algorithms.lion import Lion
from dsrun.runtime.optim.algorithms.muon import Muon
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.optim.states.format import BF16_STATES, INT8_STATES
from dsrun.runtime.protocols import SOLE_HOLDER, Holders, OwnedRange
from support.entries import column, packed, part_of, row

CUTS = {"qkv": packed, "up": column, "down": row}
SHAPES = {"qkv": (48, 16), "up": (40, 16), "down": (16, 40)}


def whole_values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rank_of(
    data: int, tensor: int, grid: tuple[int, int], make: Callable[[Any], optim.Optimizer], *, slices: bool = True
) -> ShardOptimizer:
    """An optimizer over what a rank owns of the three weights, with their gradients there."""
    parts = {name: cut(SHAPES[name], tensor, grid[1]) for name, cut in CUTS.items()}
    shapes = {name: _shape(SHAPES[name], parts[name]) for name in CUTS}
    layout = lay_out("block", list(shapes.items()), world_size=grid[0], cut=parts)
    start, stop = layout.shard_range(data) if slices else (0, layout.padded_numel)
    values, grads = torch.zeros(layout.padded_numel), torch.zeros(layout.padded_numel)
    for extent in layout.extents:
        for flat, source in ((values, whole_values(0)), (grads, whole_values(1))):
            flat[extent.offset : extent.offset + extent.numel] = part_of(source[extent.name], extent.whole)
    ranks = Holders(("data",), data, grid[0])
    holders = SOLE_HOLDER if slices else ranks
    owned = OwnedRange(layout, start, values[start:stop], grads[start:stop], (0,) * 3, holders=holders, ranks=ranks)
    shards = ShardOptimizer([owned], group_count=1)
    shards.drive(make([{"params": params} for params in shards.shards_by_group()]))
    return shards


def _shape(shape: tuple[int, ...], part: TensorBoxes) -> tuple[int, ...]:
    """A rank's tensor has the columns of its boxes, and their rows together."""
    return (part.numel // part.boxes[0].shape[1], part.boxes[0].shape[1]) if part.boxes else (0, shape[1])


def ranks_of(grid: tuple[int, int], make: Callable[[Any], optim.Optimizer]) -> list[ShardOptimizer]:
    return [rank_of(data, tensor, grid, make) for data in range(grid[0]) for tensor in range(grid[1])]


def adam(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=1e-2, foreach=False)


def put_together(ranks: list[ShardOptimizer]) -> tuple[dict[tuple[str, str], Tensor], Counter[tuple[str, str]]]:
    """Whole states out of the pieces of all ranks, and how many elements of each were saved."""
    whole: dict[tuple[str, str], Tensor] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for shards in ranks:
        for entry in shards.saved.state_entries():
            key = entry.name, entry.role
            target = whole.setdefault(key, torch.full(entry.shape, torch.nan))
            counts[key] += entry.tensor.numel()
            position = 0
            for region in entry.whole.regions(entry.start, entry.stop):
                target[region.slices] = entry.tensor[position : position + region.numel].view(region.shape)
                position += region.numel
    return whole, counts


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_states_of_parts_are_those_of_the_whole_parameters(grid: tuple[int, int]) -> None:
    ranks = ranks_of(grid, adam)
    for shards in ranks:
        shards.step()
    whole, counts = put_together(ranks)
    grads = whole_values(1)
    for name in SHAPES:
        torch.testing.assert_close(whole[name, "exp_avg"], grads[name] * 0.1)
        torch.testing.assert_close(whole[name, "exp_avg_sq"], grads[name] ** 2 * 0.001)
        assert whole[name, "scalar:step"] == 1
        assert counts[name, "exp_avg"] == grads[name].numel()
        assert counts[name, "scalar:step"] == 1, "once in the world, by whoever has the first element"
    for other in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]:
        for shards in ranks_of(other, adam):
            roles = sorted({role for _, role in whole})
            for entry in shards.saved.loadable_entries(roles):
                entry.tensor.copy_(part_of(whole[entry.name, entry.role], entry.whole)[entry.start : entry.stop])
            for entry in shards.saved.state_entries():
                expected = part_of(whole[entry.name, entry.role], entry.whole)[entry.start : entry.stop]
                assert torch.equal(entry.tensor, expected), (other, entry.name, entry.role)


def test_a_copy_in_memory_has_the_numbers_that_ranks_without_the_first_element_ask_for() -> None:
    for shards in ranks_of((2, 2), adam):
        shards.step()
        saved = [*shards.saved.state_entries(), *shards.saved.leading_scalars()]
        there = {(entry.name, entry.role) for entry in saved}
        asked = {(entry.name, entry.role) for entry in shards.saved.loadable_entries(["exp_avg", "scalar:step"])}
        assert asked <= there


def test_entries_know_who_holds_them() -> None:
    for slices in (True, False):
        shards = rank_of(1, 0, (2, 2), adam, slices=slices)
        shards.step()
        expected = SOLE_HOLDER if slices else Holders(("data",), 1, 2)
        assert {entry.holders for entry in shards.saved.state_entries()} == {expected}


@pytest.mark.parametrize(
    "make",
    [
        Lamb,
        Adafactor,
        AdamMini,
        Muon,
        lambda groups: Adam8bit(groups, min_8bit_size=700),
        lambda groups: Lion8bit(groups, min_8bit_size=700),
    ],
)
def test_an_optimizer_that_must_see_whole_tensors_refuses_parts_by_name(make: Callable[[Any], Any]) -> None:
    rank_of(0, 0, (2, 1), make)
    with pytest.raises(ModelError) as caught:
        rank_of(0, 1, (2, 2), make)
    said = str(caught.value)
    assert "must see whole tensors" in said
    assert "`qkv`" in said
    assert caught.value.hint is not None
    assert "AdamW" in caught.value.hint


@pytest.mark.parametrize("make", [Lion, lambda groups: Adam8bit(groups, min_8bit_size=1000)])
def test_an_optimizer_that_updates_each_element_by_itself_takes_parts(make: Callable[[Any], Any]) -> None:
    shards = rank_of(0, 1, (2, 2), make)
    shards.step()
    assert shards.saved.state_entries()


def test_an_eight_bit_optimizer_judges_the_whole_tensor() -> None:
    # A half has fewer elements than are coded, the whole tensor has more: another cut would keep other states.
    with pytest.raises(ModelError, match="`qkv`"):
        rank_of(0, 0, (1, 2), lambda groups: Adam8bit(groups, min_8bit_size=500))


def test_states_in_codes_of_parts_are_refused_by_name() -> None:
    whole, part = rank_of(0, 0, (2, 1), adam), rank_of(0, 0, (2, 2), adam)
    whole.house_states(Arenas(), form=INT8_STATES)
    part.house_states(Arenas(), form=BF16_STATES)
    with pytest.raises(ModelError, match=r"state_format.*`qkv`, `up`, `down`") as caught:
        rank_of(0, 0, (2, 2), adam).house_states(Arenas(), form=INT8_STATES)
    assert caught.value.hint == "set `state_format` to bf16 or leave it out"


def test_a_checkpoint_of_states_in_codes_is_refused_where_parameters_are_cut() -> None:
    roles = ["exp_avg_codes", "exp_avg_scales", "scalar:step"]
    rank_of(0, 0, (2, 1), adam).saved.check_codes(roles)
    part = rank_of(0, 0, (2, 2), adam)
    part.saved.check_codes(["exp_avg", "scalar:step"])
    with pytest.raises(CheckpointError, match=r"codes of 8 bits.*`qkv`"):
        part.saved.check_codes(roles)
