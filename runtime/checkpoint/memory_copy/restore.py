"""Going back to a moment of which all ranks have a copy in memory: the newest, brought to each host where it is lost.

Makes no copies, and reads no tensors: who reads them gets an index, as of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsrun.checkpoint_files.index.value import Index
from dsrun.errors import CheckpointError

from ...mesh.agree.same import attempt
from ...mesh.collectives import Collectives
from .exchange import CopyExchange
from .files import GENERATIONS, CopyFiles, Label
from .moments import CopyInventory, key_of, newest_common, step_of, tell_held, why_none
from .neighbours import Neighbours


@dataclass(frozen=True, slots=True)
class RestoredCopy:
    """A moment of which every rank of this host has its state in this host's memory.

    Attributes:
        folder: folder that holds the copies.
        index: index of the tensors and values that this host has, and of no others.
        step: optimizer steps that it is of.
        generation: generation of the copies that belong to this moment, 0 or 1.
        fetched: ranks whose copy came from a neighbour.
    """

    folder: Path
    index: Index
    step: int
    generation: int
    fetched: tuple[int, ...]


class CopySearch:
    """Looks for a moment; every rank must, at the same time.

    Args:
        files: files that hold the copies in this host's memory.
        near: neighbours of this rank.
        exchange: exchange of copies with the neighbours; None where there is one host.
        collectives: all ranks.
        node_of: number of the host of each rank.
        device: device of the tensors that the collectives use.
    """

    def __init__(
        self,
        files: CopyFiles,
        near: Neighbours,
        exchange: CopyExchange | None,
        collectives: Collectives,
        *,
        node_of: Sequence[int],
        device: torch.device,
    ) -> None:
        self._files = files
        self._near = near
        self._exchange = exchange
        self._collectives = collectives
        self._node_of = node_of
        self._device = device

    def newest(self, *, newer_than: int) -> RestoredCopy | None:
        """Returns the newest moment of which all ranks have a copy; see `MemoryCopies.restore`."""
        labels = {
            (other, generation): self._files.whole(other, generation, self._node_of)
            for other in (self._collectives.rank, *self._near.kept)
            for generation in range(GENERATIONS)
        }
        held = tell_held(labels, newer_than, self._collectives, device=self._device)
        chosen = newest_common(held.own, held.kept)
        if chosen is None or step_of(chosen[0]) <= held.disk_step:
            if self._collectives.rank == 0 and chosen is None:
                print(f"dsrun: {why_none(held)}", flush=True)
            return None
        return self._brought(held, labels, *chosen)

    def _brought(
        self, held: CopyInventory, labels: Mapping[tuple[int, int], Label | None], key: int, generation: int
    ) -> RestoredCopy | None:
        """Has each host have what its ranks need of a moment; None, and a line of the rank, where one could not."""
        rank = self._collectives.rank
        lacking = tuple(other for other, keys in enumerate(held.own) if keys[generation] != key)
        found: list[RestoredCopy] = []

        def fetch() -> None:
            for (other, number), label in labels.items():
                if label is None or number != generation or key_of(label) != key:
                    self._files.unlabel(other, number)
            if lacking and self._exchange is None:
                raise CheckpointError("a rank of this host has lost its copy")
            if lacking and self._exchange is not None:
                self._exchange.fetch(lacking, labels, generation, lacks=rank in lacking)

        def look() -> None:
            index = self._index(generation, key)
            found.append(RestoredCopy(self._files.folder, index, step_of(key), generation, lacking))

        for what, work in (("fetch copies", fetch), ("read the labels of copies", look)):
            failure = attempt(work, self._collectives, device=self._device, label=what)
            if failure is not None:
                if failure.error is not None:
                    print(f"dsrun: rank {rank} could not {what} in memory: {failure.error}", flush=True)
                return None
        return found[0]

    def _index(self, generation: int, key: int) -> Index:
        """Returns the index of what the ranks of this host hold together."""
        labels: list[Label] = []
        for rank in self._near.here:
            label = self._files.read_label(rank, generation)
            if label is None or key_of(label) != key:
                raise CheckpointError(f"{self._files.folder}: rank {rank} has no copy of the step")
            labels.append(label)
        return self._files.index(labels, generation, rank=self._collectives.rank, size=self._collectives.size)
