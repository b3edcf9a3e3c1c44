"""The training data of one rank: sharded, shuffled, resumable, in one global order for any number of ranks.

Puts together what the modules beside it know: which samples (`order`, `sampler`), what they draw (`seeded`), and worker
processes that live through the signals of a stop (`worker_process`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from dsrun.errors import CheckpointError, ModelError

from .drawing import drawing
from .order import EpochEnd, sample_seed
from .sampler import DEFAULT_SEED, ShardedSampler
from .seeded import SeededBatches, SeededPick
from .worker_process import check_temporary_folder, leave_signals_to_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What a config may want of loaders.

    Attributes:
        end: rule for samples that do not fill a micro batch on every rank: `carry`, `fill` or `drop`; see [Note: ends
            of an epoch].
        seed: seed of the permutations, and of the random numbers that samples draw; the same on every rank.
        workers: processes that make batches ahead, which live as long as the loader; 0: this process makes them when
            they are asked for.
        tell: function that is told the phase when a batch is waited for and when it is there; None: nobody is.
    """

    end: EpochEnd = "carry"
    seed: int = DEFAULT_SEED
    workers: int = 0
    tell: Callable[[str], None] | None = None


_NO_OPTIONS = LoaderOptions()


class TrainingLoader:
    """Iterates over this rank's micro batches, one epoch an iteration, see [Note: global order] in order.py.

    An iteration that was broken off, in this process or before a checkpoint, goes on where it stopped: with the same
    samples, and the same random numbers in each of them, for any number of workers.

    Args:
        dataset: map-style; the same on every rank.
        micro_batch: samples that a rank sees in one forward.
        rank: data-parallel rank; that of torch.distributed by default, or 0 where it is not in use.
        size: number of data-parallel ranks; None for that of torch.distributed, or 1 where that is not in use.
        collate_fn: function that makes a batch of samples; None for torch's default.
        options: settings of ends of epochs, seed and worker processes.
        shuffle: False: each epoch is the dataset's own order.
        pin_for: device that batches will be copied to: for any but the CPU they are made in page-locked memory. None:
            they are not, whatever there is.

    Raises:
        ModelError: the dataset has no length, or too few samples.
        InputError: workers could not hand batches over, see `check_temporary_folder`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        micro_batch: int,
        rank: int | None = None,
        size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        options: LoaderOptions = _NO_OPTIONS,
        shuffle: bool = True,
        pin_for: torch.device | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ModelError(
                f"training_data: {type(dataset).__name__} has no length, so it cannot be sharded",
                hint="pass a map-style dataset, or iterate your own DataLoader, call engine(batch), and give what it "
                "takes to find the place again to save_checkpoint as client_state",
            )
        self.dataset = dataset
        self._sampler = ShardedSampler(
            cast(Sized, dataset),
            micro_batch=micro_batch,
            rank=rank,
            size=size,
            shuffle=shuffle,
            seed=options.seed,
            end=options.end,
        )
        self._tell = options.tell
        if options.workers:
            check_temporary_folder()
        # A generator of its own: torch's loader would draw from the default one, and shift dropout after a resume.
        loader: DataLoader[Any] = DataLoader(
            SeededBatches(dataset, collate_fn or default_collate),
            batch_sampler=_Picks(self._sampler),
            collate_fn=_as_it_is,
            generator=torch.Generator(),
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            # Not where there merely is an accelerator: ranks that train on the CPU would each take memory of the first.
            pin_memory=pin_for is not None and pin_for.type != "cpu",
            worker_init_fn=leave_signals_to_rank if options.workers else None,
        )
        # Workers that still live when the interpreter ends would be ended by a signal, and leave their files behind:
        # dropped before, they end by themselves.
        self._held = [loader]
        weakref.finalize(self, self._held.clear)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next sample belongs to, from 0."""
        return self._sampler.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of that epoch that were handed out, over all ranks."""
        return self._sampler.samples_seen

    def __len__(self) -> int:
        """Micro batches of the present epoch on this rank, those handed out included."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yields the micro batches that are left of this epoch."""
        return drawing(self._sampler.follow(self._held[0]), self._tell)

    def state_dict(self) -> dict[str, int]:
        """Returns the position, which does not depend on the number of ranks."""
        return self._sampler.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises where a position cannot be taken over; changes nothing.

        Raises:
            CheckpointError: it is the place in a stream.
        """
        if "stream" in state:
            raise CheckpointError(
                f"training_data: the place was saved with a stream, and {type(self.dataset).__name__} is none",
                hint="train on the data it was saved with, or take the model over alone by load_module_only=True",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a position that `state_dict` returned on any number of ranks, and its seed."""
        self._sampler.load_state_dict(state)


class _Picks(Sampler[list[SeededPick]]):
    """The sampler's micro batches as `SeededBatches` takes them."""

    def __init__(self, sampler: ShardedSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[SeededPick]]:
        seed = self._sampler.seed
        for picks in self._sampler.picks():
            yield [(sample_seed(seed, pick), pick[1]) for pick in picks]

    def __len__(self) -> int:
        return len(self._sampler)


def _as_it_is(batch: Any) -> Any:
    return batch
