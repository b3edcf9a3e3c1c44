"""Things cut into contiguous parts by DeepSpeed's rules: layers over stages, a tensor over the ranks of a group.

ZeRO's own shards are laid out elsewhere (`runtime/layout`), by other rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.errors import LayoutError

from ..accelerator import get_accelerator
from ..compat import all_gather_single


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """Returns the sum of each prefix that is not empty: `[3, 7, 12]` for `[3, 4, 5]`."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Returns where the parts of equally many items begin, and where the last one ends.

    The first parts have one item more where the items do not divide; with fewer items than parts, the last are empty.

    Args:
        num_items: items.
        num_parts: parts, at least 1.

    Returns:
        `num_parts + 1` positions, from 0 to `num_items`.
    """
    each, over = divmod(num_items, num_parts)
    return [part * each + min(part, over) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Returns where parts of about the same weight begin, and where the last one ends.

    Of all ways it takes one with the least difference between the heaviest and the lightest part, found part by part:
    the best of the first j parts is kept for each number of items, and the last of those that are equal.

    Args:
        weights: weight of each item.
        num_parts: parts, at least 1. With fewer items than that, see `partition_uniform`.

    Returns:
        `num_parts + 1` positions, from 0 to the number of items.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *accumulate(map(float, weights))]
    # Of the first items in the parts so far: the heaviest part and the lightest; no item, no part.
    best: list[tuple[float, float] | None] = [(0.0, math.inf), *[None] * count]
    starts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        found: list[tuple[float, float] | None] = [None] * (count + 1)
        start = [0] * (count + 1)
        for stop in range(part, count + 1):
            least = math.inf
            for first in range(part - 1, stop):
                before = best[first]
                if before is None:
                    continue
                weight = sums[stop] - sums[first]
                extremes = max(before[0], weight), min(before[1], weight)
                if extremes[0] - extremes[1] <= least:
                    least, found[stop], start[stop] = extremes[0] - extremes[1], extremes, first
        best = found
        starts.append(start)
    bounds = [count]
    for start in reversed(starts):
        bounds.append(start[bounds[-1]])
    return bounds[::-1]


class PartitionedTensor:
    """A tensor of which each rank of a group keeps one part, cut by `partition_uniform`.

    Args:
        tensor: whole tensor, the same on every rank; this rank's part is copied out of it.
        group: process group whose ranks share it.
        partition_meta: DeepSpeed's argument, without effect, as there.

    Attributes:
        group: the process group.
        num_parts: ranks of the group.
        rank: this rank's place in the group.
        orig_size: shape of the whole.
        orig_device: device of the whole.
        local_data: this rank's part, flat.
        partition: positions at which the parts begin, and at which the last one ends.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        del partition_meta
        self.group = group
        self.num_parts = dist.get_world_size(group=group)
        self.rank = dist.get_rank(group=group)
        self.orig_size = list(tensor.shape)
        self.orig_device: torch.device | str = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """Returns what `to_meta` and `data` of the same rank were taken of.

        Args:
            meta: numbers that `to_meta` returned, int64.
            local_part: tensor that `data` returned.
            group: process group of as many ranks.
            device: device that `full` puts the whole on; None: the accelerator.

        Raises:
            LayoutError: it was taken of another rank, or of another number of ranks.
        """
        words: list[int] = [int(word) for word in meta.tolist()]
        dims, rest = words[0], words[1 + words[0] :]
        made = cls(torch.empty(0), group)
        if meta.dtype != torch.long or rest[:2] != [made.num_parts, made.rank]:
            raise LayoutError(
                f"PartitionedTensor.from_meta: the numbers, in {meta.dtype}, are of part {rest[1]} of {rest[0]}; "
                f"expected part {made.rank} of {made.num_parts}, in torch.int64",
                hint="pass what `to_meta` returned on the same rank of a group of as many ranks",
            )
        made.orig_size = words[1 : 1 + dims]
        made.orig_device = get_accelerator().device_name() if device is None else device
        made.local_data = local_part.detach()
        made.partition = rest[2:]
        return made

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the whole tensor; every rank of the group must call: one all-gather, of parts padded to one size.

        Args:
            device: device of the result; None: that of the whole.
        """
        longest = self.partition[1] - self.partition[0]
        mine = self.local_data.new_zeros(longest, device=self.orig_device if device is None else device)
        mine[: self.local_data.numel()] = self.local_data
        parts = mine.new_empty(self.num_parts * longest)
        if not longest:
            return parts.view(self.orig_size)
        all_gather_single(parts, mine, group=self.group)
        sizes = [stop - start for start, stop in zip(self.partition, self.partition[1:], strict=False)]
        kept = [part[:size] for part, size in zip(parts.split(longest), sizes, strict=True)]
        return torch.cat(kept).view(self.orig_size)

    def to_meta(self) -> Tensor:
        """Returns shape and parts as int64 numbers, from which `from_meta` makes it again: sizes are counted first."""
        words = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(words, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """Returns this rank's part, flat, not a copy."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Returns the shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Returns the shape of the whole."""
        return self.orig_size
