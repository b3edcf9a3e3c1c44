"""What a sample draws depends on its seed alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsrun.runtime.data.seeded import SeededBatches


class Drawn(Dataset[Tensor]):
    """Sample i is i plus a random number below 1."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


class DrawnAtOnce(Drawn):
    """The same, made in one call."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return list(torch.tensor(indices) + torch.rand(len(indices)))


def test_a_sample_is_the_same_in_any_batch() -> None:
    dataset = SeededBatches(Drawn(), torch.stack)
    batch: Tensor = dataset.__getitems__([(11, 4), (12, 5), (13, 6)])
    assert batch.long().tolist() == [4, 5, 6]
    assert torch.equal(dataset.__getitems__([(13, 6), (11, 4)]), batch[[2, 0]])
    assert not torch.equal(dataset.__getitems__([(14, 4)]), batch[:1])


def test_a_dataset_that_makes_whole_batches_is_asked_once() -> None:
    dataset = SeededBatches(DrawnAtOnce(), torch.stack)
    batch: Tensor = dataset.__getitems__([(11, 4), (12, 5)])
    assert batch.long().tolist() == [4, 5]
    assert torch.equal(dataset.__getitems__([(11, 4), (99, 5)]), batch), "the first one's seed counts"
