"""This rank's micro batches: in one global order, with the same numbers in them for any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import dsrun
from dsrun.errors import ModelError
from dsrun.runtime.data.loader import LoaderOptions, TrainingLoader
from dsrun.runtime.data.order import EpochEnd
from support.training import config


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Sample i is i and what three generators draw."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Masked:
    """A collator that draws, as those of masked language models do."""

    def __call__(self, samples: list[Tensor]) -> Tensor:
        batch = torch.stack(samples)
        return torch.cat([batch, torch.rand(len(samples), 1, dtype=torch.float64)], dim=1)


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


@pytest.mark.parametrize("end", ["carry", "fill", "drop"])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(end: EpochEnd) -> None:
    orders: list[list[int]] = []
    for epoch in range(2):
        orders.clear()
        for size, micro in ((1, 6), (2, 3), (3, 2), (1, 2), (6, 1)):
            ranks = loaders(50, micro, size, options=LoaderOptions(end=end))
            for rank in ranks:
                rank.load_state_dict({"epoch": epoch, "samples_seen": 0, "seed": 1234})
            orders.append(order(ranks)[:48])
        assert all(found == orders[0] for found in orders)
        assert len(set(orders[0])) == 48
    assert orders[0] != order(loaders(50, 6, 1))[:48], "another epoch, another order"


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 3), (3, 1)])
def test_a_position_inside_an_epoch_is_resumed_on_other_ranks(before: int, after: int) -> None:
    whole = order(loaders(48, 6, 1))
    first = loaders(48, 6 // before, before)
    assert order(first, rounds=3) == whole[:18]
    states = [loader.state_dict() for loader in first]
    assert states[0] == {"epoch": 0, "samples_seen": 18, "seed": 1234} == states[-1]
    second = loaders(48, 6 // after, after, options=LoaderOptions(seed=99))
    for loader in second:
        loader.load_state_dict(states[0])
    assert order(second) == whole[18:], "the seed is the checkpoint's"
    assert [loader.epoch for loader in second] == [1] * after


def test_a_broken_off_iteration_goes_on() -> None:
    (loader,) = loaders(12, 4, 1)
    seen = [int(x) for x in next(iter(loader))]
    seen += order([loader])
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("end", ["carry", "fill", "drop"])
def test_a_checkpoint_after_the_last_batch_resumes_with_the_next_epoch(size: int, end: EpochEnd) -> None:
    (loader,) = loaders(10, 4, 1, options=LoaderOptions(end=end))
    for _ in range(len(loader)):
        next(iter(loader))
    ranks = loaders(10, 4 // size, size, options=LoaderOptions(end=end))
    for rank in ranks:
        rank.load_state_dict(loader.state_dict())
    resumed = order(ranks)
    assert {loader.epoch, *(rank.epoch - 1 for rank in ranks)} == {1}
    assert resumed == order([loader])


def samples_of(loader: TrainingLoader, batches: int) -> Tensor:
    """The next batches, over the ends of epochs, as one tensor."""
    found: list[Tensor] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch)
            if len(found) == batches:
                break
    return torch.cat(found)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_draws_the_same_numbers_for_any_workers_and_after_a_resume(workers: int) -> None:
    def make(workers: int) -> TrainingLoader:
        return TrainingLoader(
            Augmented(10), micro_batch=4, collate_fn=Masked(), options=LoaderOptions(workers=workers, seed=3)
        )

    whole = samples_of(make(0), 8)
    assert len(whole[:, 1:].unique()) == whole[:, 1:].numel(), "nothing is drawn twice"
    before = make(workers)
    assert torch.equal(samples_of(before, 3), whole[:12])
    after = make(workers)
    after.load_state_dict(before.state_dict())
    assert torch.equal(samples_of(after, 5), whole[12:])
    assert torch.equal(samples_of(before, 5), whole[12:]), "workers that live on make the rest of a broken-off epoch"


def test_batches_are_collated_and_no_generator_of_this_process_is_moved() -> None:
    loader = TrainingLoader(Augmented(4), micro_batch=2, collate_fn=tuple)
    torch.manual_seed(0)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert all(isinstance(batch, tuple) for batch in loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index]


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


def test_batches_for_the_cpu_are_not_page_locked_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    # As under `--backend gloo` on a machine with GPUs: page-locking would make a context on GPU 0 in every rank.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda check_available=False: True)
    engine, _, loader, _ = dsrun.initialize(
        model=nn.Linear(1, 1), config=config(1, micro=2), training_data=Numbers(4), collate_fn=torch.tensor
    )
    assert loader is not None
    assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 2, 3]
    assert sorted(torch.cat(list(engine.deepspeed_io(Numbers(4), collate_fn=torch.tensor))).tolist()) == [0, 1, 2, 3]
    loader = TrainingLoader(Numbers(2), micro_batch=2, collate_fn=torch.tensor, pin_for=torch.device("cpu"))
    assert not next(iter(loader)).is_pinned()


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.1)
def test_batches_for_a_gpu_are_page_locked() -> None:
    loader = TrainingLoader(
        Numbers(4),
        micro_batch=2,
        rank=0,
        size=1,
        collate_fn=torch.tensor,
        pin_for=torch.device("cuda", 0),
    )
    batches = list(loader)
    assert [batch.is_pinned() for batch in batches] == [True, True]
    plain = TrainingLoader(Numbers(4), micro_batch=2, rank=0, size=1, collate_fn=torch.tensor)
    assert [batch.is_pinned() for batch in plain] == [False, False]
