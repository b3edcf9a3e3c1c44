"""This rank's micro batches as indices, for a script's own DataLoader, and the position that a checkpoint keeps.

A DataLoader with workers asks for indices long before their batches come out of it. So what counts as seen is what was
handed out: `follow` counts it, and the sampler itself does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from dsrun.errors import ModelError

from .order import EpochEnd, GlobalOrder, Pick, Position

_Batch = TypeVar("_Batch")

#: Of permutations and of what a sample draws, where nothing else is asked for.
DEFAULT_SEED = 1234


class ShardedSampler(Sampler[list[int]]):
    """The micro batches of one rank, one epoch an iteration, see [Note: global order] in order.py.

        sampler = ShardedSampler(dataset, micro_batch=4)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for batch in sampler.follow(loader): ...

    An iteration that was broken off, in this process or before a checkpoint, goes on where it stopped.

    Args:
        samples: number of samples, or the dataset; the same on every rank.
        micro_batch: samples that a rank sees in one forward.
        rank: data-parallel rank; that of torch.distributed by default, or 0 where it is not in use.
        size: number of data-parallel ranks; None for that of torch.distributed, or 1 where that is not in use.
        shuffle: False: each epoch is the dataset's own order.
        seed: seed of the permutations; the same on every rank.
        end: rule for samples that do not fill a micro batch on every rank: `carry`, `fill` or `drop`; see [Note: ends
            of an epoch].

    Raises:
        ModelError: there are too few samples.
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        micro_batch: int,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = DEFAULT_SEED,
        end: EpochEnd = "carry",
    ) -> None:
        count = samples if isinstance(samples, int) else len(samples)
        joined = dist.is_available() and dist.is_initialized()
        size = (dist.get_world_size() if joined else 1) if size is None else size
        round_size = micro_batch * size
        if count < (round_size if end == "drop" else 1):
            raise ModelError(
                f"training_data: {count} samples do not fill a micro batch of {micro_batch} on {size} ranks",
                hint="use more data, fewer ranks or a smaller train_micro_batch_size_per_gpu",
            )
        self._rank = (dist.get_rank() if joined else 0) if rank is None else rank
        self._micro_batch = micro_batch
        self._shuffle = shuffle
        self._order = GlobalOrder(count, round_size=round_size, end=end, seed=seed, shuffle=shuffle)
        self._position = Position()
        self._jumps = 0  # positions taken over, by which an iteration sees that it is somewhere else now

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next sample belongs to, from 0."""
        return self._position.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of that epoch that were handed out, over all ranks."""
        return self._position.samples

    @property
    def seed(self) -> int:
        """Of the permutations."""
        return self._order.seed

    def __len__(self) -> int:
        """Micro batches of the present epoch on this rank, those handed out included."""
        before = self._position.samples // self._order.round_size
        return before + self._order.rounds_left(self._position)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of the micro batches that are left of this epoch; counts nothing."""
        for picks in self.picks():
            yield [index for _, index in picks]

    def picks(self) -> Iterator[list[Pick]]:
        """Yields what `__iter__` does, each sample with the number of its epoch."""
        position = self._position
        for _ in range(self._order.rounds_left(position)):
            yield self._order.picks(position, first=self._rank * self._micro_batch, count=self._micro_batch)
            position = self._order.after_round(position)

    def follow(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields the batches that a loader with this sampler has left of the epoch, and counts each as seen.

        Where a position is taken over meanwhile, it goes on there, to the end of that epoch.
        """
        jumps = -1
        while jumps != self._jumps:
            jumps = self._jumps
            for batch in loader:
                # Counted before the yield: a batch that was handed out has been seen.
                self._position = self._order.after_round(self._position)
                yield batch
                if jumps != self._jumps:
                    break

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which does not depend on the number of ranks."""
        return {"epoch": self.epoch, "samples_seen": self.samples_seen, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a position that `state_dict` returned on any number of ranks, and its seed."""
        order = self._order
        self._order = GlobalOrder(
            order.samples, round_size=order.round_size, end=order.end, seed=int(state["seed"]), shuffle=self._shuffle
        )
        self._position = self._order.settled(Position(int(state["epoch"]), int(state["samples_seen"])))
        self._jumps += 1
