"""A dataset whose samples draw the same random numbers wherever and whenever they are made.

An augmentation that draws from a stream of its worker depends on how many workers there are and what they made before:
after a resume it is another one. Here each sample has a seed of its own, made of the run's seed, the epoch and its
index. Costs 6 us a sample, and 70 us a batch in the process that trains, whose own generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch.utils.data import Dataset, get_worker_info

from ..generators import host_kept, seed_host

#: A sample to make: the seed of what it draws, and its index in the dataset.
SeededPick: TypeAlias = tuple[int, int]


class SeededBatches(Dataset[Any]):
    """Makes whole batches of picks; a DataLoader's `collate_fn` then has nothing left to do.

    Args:
        dataset: map-style. One with `__getitems__`, which makes many samples in one call, is seeded once a call, by the
            first of them.
        collate: function that makes a batch of samples; random draws in it continue those of the last sample that was
            seeded.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, pick: SeededPick) -> Any:
        """Returns one sample."""
        seed, index = pick
        seed_host(seed)
        return self._dataset[index]

    def __getitems__(self, picks: Sequence[SeededPick]) -> Any:
        """Returns the batch of these samples; torch's DataLoader calls it with all that one batch has."""
        if get_worker_info() is not None:
            return self._batch(picks)
        with host_kept():
            return self._batch(picks)

    def _batch(self, picks: Sequence[SeededPick]) -> Any:
        many: Any = getattr(self._dataset, "__getitems__", None)
        if many is None:
            return self._collate([self[pick] for pick in picks])
        seed_host(picks[0][0])
        return self._collate(many([index for _, index in picks]))
