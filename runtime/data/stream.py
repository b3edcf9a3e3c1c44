"""Training data that comes as a stream: shared out in its own order, and gone on with by the dataset's own state.

Every rank reads the whole stream and keeps its micro batches of it, so the samples of a round are the same for any
number of ranks, and so is the place in the stream after it: what one rank saved, any rank can go on from. Costs each
rank making the others' samples too; a stream that is dear to make is better read by a loader of the script's own.

[Note: states of streams] Only the dataset can find a place in its stream again, by the `state_dict` and
`load_state_dict` that datasets of Hugging Face and torchdata have. One without them trains and is saved all the same;
loading into the middle of an epoch of it is the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from dsrun.errors import CheckpointError, ModelError

from ..generators import host_kept, seed_host
from .drawing import drawing
from .loader import LoaderOptions
from .order import sample_seed

_STATE = "stream"


class StreamLoader:
    """Iterates over this rank's micro batches of a stream, one epoch an iteration; samples that fill no round are left.

    An iteration that was broken off goes on where it stopped, as of `TrainingLoader`; samples draw after seeds of their
    own, and collate after the last one's.

    Args:
        dataset: the same stream on every rank. Its `set_epoch` is called before each epoch if it has one.
        micro_batch: samples that a rank sees in one forward.
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        collate_fn: function that makes a batch of samples; None for torch's default.
        options: settings of the loader; the seed is used, and worker processes are refused.

    Raises:
        ModelError: worker processes are wished for, whose copies of the stream would be ahead of what was used.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        micro_batch: int,
        rank: int,
        size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: LoaderOptions,
    ) -> None:
        if options.workers:
            raise ModelError(
                f"training_data: {type(dataset).__name__} is a stream, and `dataloader_num_workers` is "
                f"{options.workers}; copies of it in workers would be ahead of what was used",
                hint="set it to 0, or iterate your own DataLoader and call engine(batch)",
            )
        self.dataset = dataset
        self._micro_batch, self._rank, self._size = micro_batch, rank, size
        self._collate = collate_fn or default_collate
        self._seed = options.seed
        self._tell = options.tell
        self._samples: Iterator[Any] | None = None
        self.epoch = 0
        self.samples_seen = 0

    def __iter__(self) -> Iterator[Any]:
        """Yields the micro batches that are left of this epoch."""
        return drawing(self._rounds(), self._tell)

    def _rounds(self) -> Iterator[Any]:
        while (kept := self._round()) is not None:
            yield kept

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, with the dataset's own state if JSON can hold it; see [Note: states of streams]."""
        position = {"epoch": self.epoch, "samples_seen": self.samples_seen, "seed": self._seed}
        if not hasattr(self.dataset, "state_dict"):
            return position
        state: Any = self.dataset.state_dict()  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]
        try:
            return {**position, _STATE: json.loads(json.dumps(state))}
        except (TypeError, ValueError):
            return position

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises where a position cannot be taken over; changes nothing.

        Raises:
            CheckpointError: it is in the middle of an epoch, and the dataset cannot find the place again.
        """
        if state["samples_seen"] == 0:
            return
        name, place = type(self.dataset).__name__, f"sample {state['samples_seen']} of epoch {state['epoch']}"
        hint = (
            "give it state_dict() and load_state_dict() that JSON can hold, as datasets of Hugging Face have; or take "
            "the model over alone by load_module_only=True"
        )
        if not hasattr(self.dataset, "load_state_dict"):
            raise CheckpointError(f"training_data: {name} has no load_state_dict to go on at {place} by", hint=hint)
        if _STATE not in state:
            raise CheckpointError(f"training_data: no state of {name} was saved to go on at {place} by", hint=hint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a position that `state_dict` returned on any number of ranks.

        Raises:
            CheckpointError: see `check_state`.
        """
        self.check_state(state)
        self.epoch, self.samples_seen = int(state["epoch"]), int(state["samples_seen"])
        self._seed = int(state["seed"])
        self._samples = None
        if _STATE in state and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state[_STATE])  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]

    def _round(self) -> Any | None:
        """Returns this rank's micro batch of the next round, or None where the epoch has ended and the next begins."""
        with host_kept():
            if self._samples is None:
                if hasattr(self.dataset, "set_epoch"):
                    self.dataset.set_epoch(self.epoch)  # pyright: ignore[reportUnknownMemberType,reportAttributeAccessIssue]
                self._samples = iter(self.dataset)
            taken = list(islice(self._seeded(self._samples), self._micro_batch * self._size))
            if len(taken) < self._micro_batch * self._size:
                self.epoch, self.samples_seen, self._samples = self.epoch + 1, 0, None
                return None
            first = self._rank * self._micro_batch
            batch = self._collate(taken[first : first + self._micro_batch])
        self.samples_seen += len(taken)
        return batch

    def _seeded(self, samples: Iterator[Any]) -> Iterator[Any]:
        for number in range(self.samples_seen, self.samples_seen + self._micro_batch * self._size):
            seed_host(sample_seed(self._seed, (self.epoch, number)))
            try:
                yield next(samples)
            except StopIteration:
                return
