"""The order in which a run sees its samples: one sequence for any number of ranks. Pure arithmetic; loads no sample.

[Note: global order]
An epoch is one permutation of the samples, of the seed and the epoch's number. Epochs follow each other. A round is
what all ranks see in one micro step: the next `micro batch x ranks` samples of that sequence, of which rank r takes the
r-th micro batch. So one rank that accumulates twice sees the very micro batches that two ranks see in one micro step,
and a position is a number of samples, which means the same on any number of ranks.

[Note: ends of an epoch]
Where the samples that are left do not fill a round:
- carry: the round goes on with the first samples of the next epoch, which begins there. Every sample comes once an
  epoch, and the sequence is the same for every size of a round, to the end of the run.
- fill: samples from the epoch's own start fill it up, and the next iteration is a whole epoch: for evaluation.
- drop: they are left out. How many are repeated or left out depends on the size of a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import xxhash
from torch import Tensor

#: What becomes of a round that the epoch does not fill, see [Note: ends of an epoch].
EpochEnd: TypeAlias = Literal["carry", "fill", "drop"]
#: One sample: number of the epoch that it is seen in, and its index in the dataset.
Pick: TypeAlias = tuple[int, int]

_KEPT_EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Position:
    """The next sample to be seen.

    Attributes:
        epoch: its number, from 0.
        samples: number of samples of the epoch that come before the next one, over all ranks.
    """

    epoch: int = 0
    samples: int = 0


class GlobalOrder:
    """The sequence of a run, see [Note: global order].

    Args:
        samples: number of samples in the dataset; 1 or more.
        round_size: samples that all ranks see in one micro step.
        end: rule for a round that the epoch's last samples do not fill: `carry`, `fill` or `drop`.
        seed: seed of the permutations.
        shuffle: False: each epoch is the dataset's own order.
    """

    def __init__(self, samples: int, *, round_size: int, end: EpochEnd, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self.round_size = round_size
        self.end: EpochEnd = end
        self.seed = seed
        self._shuffle = shuffle
        self._permutations: dict[int, Tensor] = {}  # of the last epochs that were asked for

    def settled(self, position: Position) -> Position:
        """Returns where a position that may lie at or beyond the end of its epoch really is."""
        if self.end == "carry":
            epochs, samples = divmod(position.samples, self.samples)
            return Position(position.epoch + epochs, samples)
        # The least that the epoch has to have left for another round.
        needed = self.round_size if self.end == "drop" else 1
        return position if self.samples - position.samples >= needed else Position(position.epoch + 1)

    def rounds_left(self, position: Position) -> int:
        """Returns the rounds from a settled position to the end of its epoch; one at least."""
        left = self.samples - position.samples
        return left // self.round_size if self.end == "drop" else -(-left // self.round_size)

    def after_round(self, position: Position) -> Position:
        """Returns the position after the round that begins at a settled one."""
        return self.settled(Position(position.epoch, position.samples + self.round_size))

    def picks(self, position: Position, *, first: int, count: int) -> list[Pick]:
        """Returns samples of the round that begins at a settled position.

        Args:
            position: position at which the round begins, already settled.
            first: samples of the round before those asked for.
            count: number of samples of the round to return.
        """
        found: list[Pick] = []
        epoch, at = position.epoch, position.samples + first
        while count:
            if self.end == "carry":
                epoch += at // self.samples
            at %= self.samples
            indices: list[int] = self._permutation(epoch)[at : at + count].tolist()
            found += [(epoch, index) for index in indices]
            count -= len(indices)
            at += len(indices)
        return found

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._permutations:
            while len(self._permutations) >= _KEPT_EPOCHS:
                del self._permutations[min(self._permutations)]
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=generator) if self._shuffle else torch.arange(self.samples)
            self._permutations[epoch] = order
        return self._permutations[epoch]


def sample_seed(seed: int, pick: Pick) -> int:
    """Returns a seed for what a sample draws: 64 bits, of the run's seed, the epoch and the sample."""
    return xxhash.xxh3_64_intdigest(b"%d:%d:%d" % (seed, *pick))
