"""What ranks that cannot see each other leave in the job's store when they wait in vain, or have left the job.

Costs nothing until then. Where ranks share memory, `turnstile` knows more, and sooner. Under NCCL a wait in vain raises
nothing, and the launcher says where each rank is: see [Note: no error from NCCL] in c10d.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..compat import PrefixStore, Store

#: How long a rank that has waited in vain asks after the others: their own time-outs end at about the same time.
_PATIENCE_S = 3.0


class Whereabouts:
    """The words of the ranks of one axis.

    Args:
        store: the job's, see `compat.store_of`.
        ranks: ranks of the axis, by their numbers in the job, in the order of the axis.
        rank: place of this rank on the axis.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        self._store = PrefixStore("dsrun whereabouts", store)
        self._ranks = list(ranks)
        self._me = rank

    def leave_word(self, text: str) -> None:
        """Says where this rank is or was last, like `waits in all_gather of unit 4`.

        A store that is gone takes no word: it went with the rank that held it, and the others fail by that.
        """
        try:
            self._store.set(str(self._ranks[self._me]), text)
        except (dist.DistError, RuntimeError):
            return

    def ask(self) -> str:
        """Returns where each other rank is, for an error: `rank 1 has left the job; rank 2 ...`. Takes seconds."""
        deadline_s = time.monotonic() + _PATIENCE_S
        others = [rank for place, rank in enumerate(self._ranks) if place != self._me]
        return "; ".join(f"rank {rank} {self._word_of(rank, deadline_s)}" for rank in others)

    def _word_of(self, rank: int, deadline_s: float) -> str:
        try:
            self._store.wait([str(rank)], timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
            return self._store.get(str(rank)).decode("utf-8", "replace")
        except (dist.DistError, RuntimeError):
            return "says nothing: it has ended, or is stuck outside of collectives"
