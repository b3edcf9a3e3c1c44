"""Parameters cut out of the flat partitions that DeepSpeed's ranks save. Arithmetic on tensors; no files, no names.

Source: DeepSpeed 0.19, deepspeed/utils/zero_to_fp32.py, which says how partitions become parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def gather(parts: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """Returns elements [start, start + numel) of flat tensors that follow each other.

    Raises:
        ValueError: the parts do not have as many.
    """
    pieces: list[Tensor] = []
    for part in parts:
        first, last = max(0, start), min(part.numel(), start + numel)
        if first < last:
            pieces.append(part.view(-1)[first:last])
        start -= part.numel()
    found = sum(piece.numel() for piece in pieces)
    if found != numel:
        raise ValueError(f"partitions have {found} of a tensor's {numel} elements")
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty(0, dtype=parts[0].dtype)


def of_stage_2(ranks: Sequence[Tensor], start: int, shape: Sequence[int]) -> Tensor:
    """Returns a parameter of stages 1 and 2, whose ranks cut a group as a whole.

    Args:
        ranks: each rank's partition of the group.
        start: the parameter's first element in the group.
        shape: its shape.
    """
    return gather(ranks, start, prod(shape)).view(tuple(shape))


def of_stage_3(ranks: Sequence[Sequence[Tensor]], start: int, shape: Sequence[int]) -> Tensor:
    """Returns a parameter of stage 3, whose ranks cut every parameter.

    Args:
        ranks: each rank's partitions of all sub-groups, which follow each other.
        start: first element of the parameter's slice in them.
        shape: its whole shape.
    """
    numel = prod(shape)
    slices = [gather(parts, start, slice_numel(numel, len(ranks))) for parts in ranks]
    return torch.cat(slices)[:numel].view(tuple(shape))


def slice_numel(numel: int, ranks: int) -> int:
    """Returns how many elements of a parameter each rank of stage 3 has, the last one's padding included."""
    return -(-numel // ranks)
