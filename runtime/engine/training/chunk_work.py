"""What each action of a schedule is on a rank: steps of `ScheduledBatches`, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .micro_batch import LossFunction, MicroBatch

if TYPE_CHECKING:
    from .scheduled import ScheduledBatches


class _Items:
    """The micro batches of a global batch, each read once and kept until this rank's last chunk has used it."""

    def __init__(
        self, batches: ScheduledBatches, items: Sequence[Any], loss_fn: LossFunction | None, where: str
    ) -> None:
        self._batches = batches
        self._left = list(items)
        self._read: dict[int, MicroBatch] = {}
        self._loss_fn = loss_fn
        self._where = where
        last = len(batches.stages.rank_of) - 1
        self._needing = {chunk for chunk in batches.stages.own if batches.stages.needs_batch or chunk in (0, last)}

    def of(self, chunk: int, micro: int) -> MicroBatch:
        """Returns a micro batch as a chunk needs it; an empty one where it needs none."""
        if not self._left or chunk not in self._needing:
            return MicroBatch((), {})
        if micro not in self._read:
            self._read[micro] = self._batches.read(self._left[micro], self._loss_fn, where=self._where)
            self._left[micro] = None
        return self._read.pop(micro) if chunk == max(self._needing) else self._read[micro]


class _GatheredParameters:
    """Turns of chunks whose parameters are slices; see `ChunkWork`.

    Args:
        batches: Steps of this rank.
    """

    def __init__(self, batches: ScheduledBatches) -> None:
        self._batches = batches

    def gather(self, chunk: int) -> None:
        """See `ChunkWork`."""
        self._batches.gather(chunk)

    def drop(self, chunk: int) -> None:
        """See `ChunkWork`."""
        self._batches.drop(chunk)

    def abandon(self) -> None:
        """See `ChunkWork`: who began the batch gives it up."""


class TrainingWork(_GatheredParameters):
    """Actions of a batch that trains; see `ChunkWork`.

    Args:
        batches: Steps of this rank.
        items: Items of the data, one a micro batch; none where this rank needs none.
        micros: Number of micro batches.
        loss_fn: Function that computes the loss; None: the model returns it.
    """

    def __init__(
        self, batches: ScheduledBatches, items: Sequence[Any], micros: int, loss_fn: LossFunction | None
    ) -> None:
        super().__init__(batches)
        self._micros = micros
        self._loss_fn = loss_fn
        self._items = _Items(batches, items, loss_fn, "engine.train_batch")
        self._last = len(batches.stages.rank_of) - 1
        self._counts_here = self._last in batches.stages.own

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """See `ChunkWork`."""
        batches = self._batches
        item = self._items.of(chunk, micro)
        batches.begin_forward(chunk, item, number=micro)
        loss: Tensor | None = None
        with batches.counting():
            output = batches.run_chunk(chunk, item, received, number=micro)
            if chunk == self._last:
                loss = batches.loss(output, item, self._loss_fn, where="engine.train_batch")
        if loss is not None:
            batches.note_loss(loss)
            return batches.scaled(loss, self._micros)
        if not self._counts_here and chunk == batches.stages.own[0]:
            batches.note_loss(None)
        return output

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        """See `ChunkWork`."""
        self._batches.backward(chunk, micro, outputs, grads, split=split)

    def weight_grads(self, chunk: int, micro: int) -> None:
        """See `ChunkWork`."""
        self._batches.weight_grads(chunk, micro)

    def reduce(self, chunk: int) -> None:
        """See `ChunkWork`."""
        self._batches.reduce(chunk)


class EvaluationWork(_GatheredParameters):
    """Actions of a batch that is evaluated; see `ChunkWork`.

    Args:
        batches: Steps of this rank.
        items: Items of the data, as for `TrainingWork`.
        loss_fn: Function that computes the loss; None: the model returns it.
        computes_loss: Whether losses are wanted.

    Attributes:
        outputs: Output and loss of each micro batch, where this rank has the last chunk.
    """

    def __init__(
        self, batches: ScheduledBatches, items: Sequence[Any], loss_fn: LossFunction | None, *, computes_loss: bool
    ) -> None:
        super().__init__(batches)
        self._loss_fn = loss_fn
        self._computes_loss = computes_loss
        self._items = _Items(batches, items, loss_fn, "engine.eval_batch")
        self._last = len(batches.stages.rank_of) - 1
        self.outputs: list[Any] = []

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """See `ChunkWork`."""
        item = self._items.of(chunk, micro)
        output = self._batches.run_chunk(chunk, item, received, number=micro)
        if chunk != self._last:
            return output
        loss = None
        if self._computes_loss:
            loss = self._batches.loss(output, item, self._loss_fn, where="engine.eval_batch")
        self.outputs.append((output, loss))
        return None

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        """See `ChunkWork`: there is none."""
        raise AssertionError("a batch that is evaluated has no backward")

    def weight_grads(self, chunk: int, micro: int) -> None:
        """See `ChunkWork`: there are none."""

    def reduce(self, chunk: int) -> None:
        """See `ChunkWork`: there is nothing to reduce."""
