"""The training data of one rank: sharded, shuffled, resumable, in one global order for any number of ranks.

[Note: global order]
An epoch is one permutation of the samples. Global batch b is its next `micro batch x accumulation x ranks` samples, cut
into micro batches in the order (micro step, rank). So one rank that accumulates twice sees the very micro batches that
two ranks see in one micro step, and a run resumed on another number of ranks goes on with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from dsrun.errors import ModelError


class TrainingLoader:
    """Iterates over this rank's micro batches, one epoch an iteration, see [Note: global order].

    An iteration that was broken off, in this process or before a checkpoint, goes on where it stopped.

    Args:
        dataset: map-style; the same on every rank.
        micro_batch: samples a rank sees in one forward.
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        collate_fn: makes a batch of samples; torch's default if None.
        drop_last: True: an epoch ends before samples that do not fill a micro batch on every rank; False: it is filled
            up with samples from its start.
        seed: of the permutations; the same on every rank.

    Raises:
        ModelError: the dataset has no length, or too few samples for one micro batch on every rank.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch: int,
        rank: int,
        size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int = 1234,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ModelError(
                f"training_data: {type(dataset).__name__} has no length, so it cannot be sharded",
                hint="pass a map-style dataset, or iterate your own DataLoader and call engine(batch)",
            )
        self._samples = len(cast(Sized, dataset))
        self._round = micro_batch * size  # samples that all ranks see in one micro step
        rounds = self._samples // self._round if drop_last else -(-self._samples // self._round)
        if rounds == 0:
            raise ModelError(
                f"training_data: {self._samples} samples do not fill a micro batch of {micro_batch} on {size} ranks",
                hint="use more data, fewer ranks or a smaller train_micro_batch_size_per_gpu",
            )
        self._rounds = rounds
        self._micro_batch = micro_batch
        self._rank = rank
        self._seed = seed
        self.epoch = 0
        self.samples_seen = 0  # of this epoch, over all ranks
        # A generator of its own: torch's loader would draw from the default one, and shift dropout after a resume.
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=_Plan(self), collate_fn=collate_fn, generator=torch.Generator()
        )

    def __len__(self) -> int:
        """Micro batches of a whole epoch on this rank."""
        return self._rounds

    def __iter__(self) -> Iterator[Any]:
        """Yields the micro batches that are left of this epoch, then moves on to the next epoch.

        An epoch of which nothing is left (a checkpoint after its last batch) is over: the next one is yielded.
        """
        if self.samples_seen >= self._rounds * self._round:
            self._end_epoch()
        for batch in self._loader:
            # Counted before the yield: a batch that was handed out has been seen.
            self.samples_seen += self._round
            yield batch
        self._end_epoch()

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which does not depend on the number of ranks."""
        return {"epoch": self.epoch, "samples_seen": self.samples_seen, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes over a position; a position inside a micro step of this many ranks is rounded down to its start."""
        self.epoch = int(state["epoch"])
        seen = int(state["samples_seen"])
        # Of an epoch that was filled up for more ranks, every sample has been seen: there is nothing left for fewer.
        self.samples_seen = (self._rounds if seen >= self._samples else seen // self._round) * self._round
        self._seed = int(state["seed"])

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.samples_seen = 0

    def indices(self) -> Iterator[list[int]]:
        """Yields the sample indices of this rank's remaining micro batches of this epoch."""
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self._samples, generator=generator).tolist()
        # An epoch is filled up to whole rounds with samples from its start, over and over for a tiny dataset.
        while len(order) < self._rounds * self._round:
            order += order[: self._rounds * self._round - len(order)]
        for number in range(self.samples_seen // self._round, self._rounds):
            first = number * self._round + self._rank * self._micro_batch
            yield order[first : first + self._micro_batch]


class _Plan(Sampler[list[int]]):
    """The loader's indices as torch's DataLoader wants them."""

    def __init__(self, loader: TrainingLoader) -> None:
        self._of = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._of.indices()

    def __len__(self) -> int:
        return len(self._of)
