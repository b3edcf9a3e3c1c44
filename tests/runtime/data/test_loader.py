"""One global order of samples for any number of ranks, and a position in it that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dsrun.errors import ModelError
from dsrun.runtime.data.loader import TrainingLoader


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loaders(length: int, micro: int, size: int, **more: Any) -> list[TrainingLoader]:
    return [TrainingLoader(Numbers(length), micro_batch=micro, rank=r, size=size, **more) for r in range(size)]


def order(ranks: list[TrainingLoader], rounds: int | None = None) -> list[int]:
    """The samples in their global order: (micro step, rank)."""
    seen: list[int] = []
    for number, step in enumerate(zip(*ranks, strict=True), start=1):
        seen += [int(sample) for batch in step for sample in batch]
        if number == rounds:
            break
    return seen


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(drop_last: bool) -> None:
    for epoch in range(2):
        orders: list[list[int]] = []
        for size, micro in ((1, 6), (2, 3), (3, 2), (1, 2), (6, 1)):
            ranks = loaders(50, micro, size, drop_last=drop_last)
            for rank in ranks:
                rank.load_state_dict({"epoch": epoch, "samples_seen": 0, "seed": 1234})
            orders.append(order(ranks)[:48])
        assert all(found == orders[0] for found in orders)
        assert len(set(orders[0])) == 48
    assert orders[0] != order(loaders(50, 6, 1))[:48], "another epoch, another order"


def test_an_epoch_sees_every_sample_and_is_filled_up_or_cut() -> None:
    filled = order(loaders(10, 2, 2))
    assert len(filled) == 12
    assert sorted(filled[:10]) == list(range(10))
    assert filled[10:] == filled[:2]
    cut = order(loaders(10, 2, 2, drop_last=True))
    assert cut == filled[:8]
    assert [len(loader) for loader in (loaders(10, 2, 2)[0], loaders(10, 2, 2, drop_last=True)[0])] == [3, 2]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 3), (3, 1)])
def test_a_position_inside_an_epoch_is_resumed_on_other_ranks(before: int, after: int) -> None:
    whole = order(loaders(48, 6, 1))
    first = loaders(48, 6 // before, before)
    assert order(first, rounds=3) == whole[:18]
    states = [loader.state_dict() for loader in first]
    assert states[0] == {"epoch": 0, "samples_seen": 18, "seed": 1234} == states[-1]
    second = loaders(48, 6 // after, after)
    for loader in second:
        loader.load_state_dict(states[0])
    assert order(second) == whole[18:]
    assert [loader.epoch for loader in second] == [1] * after


def test_a_broken_off_iteration_goes_on() -> None:
    (loader,) = loaders(12, 4, 1)
    seen = [int(x) for x in next(iter(loader))]
    seen += order([loader])
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_checkpoint_after_the_last_batch_resumes_with_the_next_epoch(size: int, drop_last: bool) -> None:
    (loader,) = loaders(10, 4, 1, drop_last=drop_last)
    for _ in range(len(loader)):
        next(iter(loader))
    ranks = loaders(10, 4 // size, size, drop_last=drop_last)
    for rank in ranks:
        rank.load_state_dict(loader.state_dict())
    resumed = order(ranks)
    assert len(resumed) == len(loader) * 4
    assert [rank.epoch for rank in ranks] == [2] * size
    assert resumed == order([loader])


def test_a_dataset_smaller_than_a_round_repeats_or_is_refused() -> None:
    found = order(loaders(3, 4, 2))
    assert len(found) == 8
    assert set(found) == {0, 1, 2}
    with pytest.raises(ModelError, match="3 samples do not fill a micro batch of 4 on 2 ranks"):
        loaders(3, 4, 2, drop_last=True)
    with pytest.raises(ModelError, match="0 samples do not fill"):
        loaders(0, 1, 1)


class Stream(IterableDataset[int]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Unsized(Dataset[int]):
    """Map-style without a length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Unsized()])
def test_a_dataset_without_length_is_refused(dataset: Dataset[int]) -> None:
    with pytest.raises(ModelError, match=f"{type(dataset).__name__} has no length"):
        TrainingLoader(dataset, micro_batch=1, rank=0, size=1)


def test_batches_are_collated_and_the_default_generator_is_left_alone() -> None:
    loader = TrainingLoader(Numbers(4), micro_batch=2, rank=0, size=1, collate_fn=lambda samples: tuple(samples))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert all(isinstance(batch, tuple) for batch in loader)
    assert torch.equal(torch.get_rng_state(), state)
