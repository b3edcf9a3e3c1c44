"""Copies of ranks' states from one rank's memory to another's: to who keeps them, and back.

What comes counts once its sums are compared with those it was sent with. When copies are exchanged is decided
elsewhere, and who keeps whose in `neighbours.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsrun.checkpoint_files.reference import summed
from dsrun.errors import CheckpointError

from ...mesh.join.mail import Mail, Parcel
from .files import CopyFiles, Label
from .neighbours import Neighbours


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A copy for another rank: to which, its label, and its bytes."""

    rank: int
    label: Label
    image: Tensor


class CopyExchange:
    """This rank's part of exchanges; its neighbours must take theirs at the same time.

    Args:
        files: files that hold the copies in this host's memory.
        mail: transport of bytes to and from the neighbour ranks.
        near: neighbours of this rank: the rank that keeps its copy, and the ranks for which it keeps copies.
    """

    def __init__(self, files: CopyFiles, mail: Mail, near: Neighbours) -> None:
        self._files = files
        self._mail = mail
        self._near = near

    def keep(self, label: Label, image: Tensor, generation: int) -> None:
        """Sends this rank's copy to its keeper, and takes those that this rank keeps.

        Args:
            label: label of this rank's copy.
            image: its bytes.
            generation: generation of all copies that are sent and received.

        Raises:
            CheckpointError: a copy came with other bytes than it was sent with.
            RuntimeError: a neighbour is gone, or late.
            OSError: there is no memory for what came.
        """
        keeper = self._near.keeper
        self._swap([] if keeper is None else [_Sent(keeper, label, image)], self._near.kept, generation)

    def fetch(
        self,
        lacking: Sequence[int],
        labels: Mapping[tuple[int, int], Label | None],
        generation: int,
        *,
        lacks: bool,
    ) -> None:
        """Brings copies from those who keep them back to ranks that have lost their own.

        Args:
            lacking: those ranks.
            labels: labels of the copies that this rank keeps, by rank and generation; None for a copy that is not
                whole.
            generation: generation of the copies to fetch.
            lacks: whether this rank has lost its own copy.

        Raises:
            CheckpointError: see `keep`; so are other errors.
        """
        sends: list[_Sent] = []
        for rank in self._near.kept:
            label = labels[rank, generation]
            if rank in lacking and label is not None:
                sends.append(_Sent(rank, label, self._files.image(rank, generation, label.nbytes)))
        keeper = self._near.keeper
        self._swap(sends, [keeper] if keeper is not None and lacks else [], generation)
        for sent in sends:
            self._files.label(sent.rank, generation, sent.label)

    def _swap(self, sends: Sequence[_Sent], receives: Sequence[int], generation: int) -> None:
        """Sends copies to ranks, and takes those of others; the latter count once their sums are compared."""
        told = {sent.rank: sent.label.to_bytes() for sent in sends}
        lengths = {rank: torch.zeros(2, dtype=torch.int64) for rank in receives}
        self._mail.exchange(
            [
                Parcel(sent.rank, torch.tensor([len(told[sent.rank]), sent.label.nbytes]).view(torch.uint8))
                for sent in sends
            ],
            [Parcel(rank, lengths[rank].view(torch.uint8)) for rank in receives],
        )
        texts = {rank: torch.zeros(int(lengths[rank][0]), dtype=torch.uint8) for rank in receives}
        self._mail.exchange(
            [Parcel(rank, torch.frombuffer(bytearray(text), dtype=torch.uint8)) for rank, text in told.items()],
            [Parcel(rank, texts[rank]) for rank in receives],
        )
        labels = {rank: Label.from_bytes(bytes(texts[rank].tolist())) for rank in receives}
        # Of whom a copy comes says its label: a keeper sends what is another rank's.
        images = {
            sender: self._files.image(sender if label is None else label.rank, generation, int(lengths[sender][1]))
            for sender, label in labels.items()
        }
        self._mail.exchange(
            [Parcel(sent.rank, sent.image) for sent in sends],
            [Parcel(rank, image) for rank, image in images.items()],
        )
        for sender, label in labels.items():
            if label is None or summed([images[sender].numpy().data]) != label.stored:
                raise CheckpointError(f"the copy from rank {sender} came with other bytes than it was sent with")
            self._files.label(label.rank, generation, label)
