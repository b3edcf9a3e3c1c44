"""Which units a rank has gathered since ranks last compared notes, and where ranks differ if they do.

Ranks that call different blocks of one size mix their weights without any error of the collectives. A step therefore
compares 32 bits a rank; only where they differ are the notes themselves exchanged. Gathers nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NoReturn
from zlib import crc32

import torch

from dsrun.errors import ModelError

from ...mesh.collectives import Collectives

#: Notes that are kept: a step's, of most models. A text that is generated takes any number of gathers without a step.
_KEPT = 1 << 14
_HINT = (
    "call the same blocks on every rank, make what chooses between them one of `zero_optimization.leaf_module`, or set "
    "`zero_optimization.stage` to 2"
)


class GatherLog:
    """One rank's notes.

    Args:
        names: names of the units, by their index.
        collectives: ranks that gather them in the same order.
        device: device of the log's buffers.
    """

    def __init__(self, names: Mapping[int, str], collectives: Collectives, device: torch.device) -> None:
        self._names = names
        self._collectives = collectives
        self._device = device
        self._notes: list[int] = []
        self._folded = 0  # notes that only the fingerprint still knows
        self._fingerprint = 0
        self._taken: tuple[int, list[int]] = (0, [])

    def note(self, index: int) -> None:
        """Notes that this rank gathers a unit."""
        self._notes.append(index)
        if len(self._notes) == _KEPT:
            self._fold()
            self._notes.clear()

    def take(self) -> int:
        """Returns 32 bits that tell apart what was noted, in order, since they were last taken."""
        self._taken = (self._folded, self._notes)
        self._fold()
        taken = self._fingerprint
        self._notes, self._folded, self._fingerprint = [], 0, 0
        return taken

    def refuse(self, at: str = "") -> NoReturn:
        """Says where ranks first differ in what was last taken; every rank must call. Two all-reduces.

        Args:
            at: the step, for the error.

        Raises:
            ModelError: always, on every rank.
        """
        folded, notes = self._taken
        counts = self._exchange([folded, len(notes)])
        longest = max(kept for _, kept in counts)
        # 0 stands for no note.
        everyone = self._exchange([*(index + 1 for index in notes), *[0] * (longest - len(notes))])
        found = first_difference(everyone) if len({before for before, _ in counts}) == 1 else None
        where = "the ranks called its blocks in different orders"
        if found is not None:
            position, other = found
            mine, theirs = (self._say(everyone[rank][position]) for rank in (0, other))
            where += f": gather {folded + position + 1}{at} is of {mine} on rank 0 and of {theirs} on rank {other}"
        else:
            where += at
        raise ModelError(f"model: {where}; so at stage 3 they computed with different weights", hint=_HINT)

    def _fold(self) -> None:
        self._fingerprint = crc32(array("q", self._notes).tobytes(), self._fingerprint)
        self._folded += len(self._notes)

    def _say(self, entry: int) -> str:
        return f"`{self._names[entry - 1]}`" if entry else "nothing more"

    def _exchange(self, mine: Sequence[int]) -> list[list[int]]:
        """Returns every rank's numbers, which are as many on each."""
        rank, size = self._collectives.rank, self._collectives.size
        table = torch.zeros(size, len(mine), dtype=torch.int64)
        table[rank] = torch.tensor(list(mine), dtype=torch.int64)
        flat = table.view(-1).to(self._device)
        self._collectives.all_reduce(flat, label="gather log").wait()
        with self._collectives.reading("gather log"):
            return flat.view(size, -1).tolist()


def first_difference(notes: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Returns where a rank's notes first differ from rank 0's, and the first such rank; None if none does."""
    for position, entries in enumerate(zip(*notes, strict=True)):
        for rank, entry in enumerate(entries):
            if entry != entries[0]:
                return position, rank
    return None
