"""What a checkpoint holds, from its index alone: how many tensors, elements and bytes of each role and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .index.dtypes import ITEMSIZE
from .index.value import Index


@dataclass(frozen=True, slots=True)
class Share:
    """All tensors of one role and dtype."""

    role: str
    dtype: str
    tensors: int
    numel: int
    nbytes: int


def shares(index: Index) -> list[Share]:
    """Returns what an index lists, by role and dtype: parameters first, the most bytes first."""
    found: dict[tuple[str, str], list[int]] = {}
    for (_, role), stored in index.tensors.items():
        found.setdefault((role, stored.dtype), []).append(prod(stored.shape))
    every = [
        Share(role, dtype, len(numels), sum(numels), sum(numels) * ITEMSIZE[dtype])
        for (role, dtype), numels in found.items()
    ]
    return sorted(every, key=lambda share: (share.role != "param", -share.nbytes, share.role, share.dtype))
