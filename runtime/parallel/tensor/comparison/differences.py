"""What differs between a part of a model that is cut and the same part whole, on any rank, and by how much.

[Note: gradients in parts]
A weight that a plan leaves whole may yet work on parts: a norm of this rank's heads, a factor of the activation. Each
rank then has a part of its gradient. Some plans do not say so (of transformers 5.20, those of 3 families). Where parts
add up to what the whole block gives, they are added up in training too, and that is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....mesh.collectives import Collectives
from .runs import parameter_in

#: Largest norm of a difference, by the norm of what it should be. Rounding in fp32 makes some 1e-6; a wrong plan, 1.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Differences:
    """What has been found, the same on all ranks.

    Attributes:
        errors: sentences, one for each result that differs.
        partial: whole parameters of which each rank has a part of the gradient, see [Note: gradients in parts].
    """

    errors: list[str]
    partial: list[str]


def differences(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    axis: Collectives,
    *,
    cut: Collection[str],
    in_parts: Collection[str],
    device: torch.device,
) -> Differences:
    """Compares the results of two runs; enters all-reduces over the axis.

    Args:
        found: results of the cut run, see `Run.results`; gradients of parameters that are cut are parts.
        expected: results of the whole run, those of such parameters cut in the same way.
        axis: ranks of the tensor axis.
        cut: names of parameters of which each rank has a part.
        in_parts: names of whole parameters whose gradients the plan says are parts.
        device: device of the collectives' tensors.
    """
    alone: list[Tensor] = []
    added: list[Tensor] = []
    least = _least_scale(expected)
    for name, want in expected.items():
        mine, param = found[name], parameter_in(name)
        if mine.shape != want.shape:
            alone.append(torch.ones((), device=device))
            added.append(alone[-1])
            continue
        mine, want = _numbers(mine), _numbers(want)
        scale = want.norm().maximum(least * want.numel() ** 0.5)
        alone.append(((mine - want).norm() / scale).float())
        if param and param not in cut:
            mine = mine.clone(memory_format=torch.contiguous_format)
            axis.all_reduce(mine.view(-1), label="gradient in parts").wait()
        added.append(((mine - want).norm() / scale).float())
    worst = torch.stack([*alone, *added]).nan_to_num(nan=float("inf"))
    axis.all_reduce(worst, op="max", label="differences of a block").wait()
    one, all_ = worst.view(2, -1).tolist()
    errors: list[str] = []
    partial: list[str] = []
    for name, apart, together in zip(expected, one, all_, strict=True):
        param = parameter_in(name)
        if param in cut or param in in_parts:
            apart = together
        if apart <= TOLERANCE:
            continue
        if param and together <= TOLERANCE:
            partial.append(param)
        else:
            errors.append(f"{name} differs by {apart:.2g} of itself")
    return Differences(errors, partial)


def _numbers(value: Tensor) -> Tensor:
    """Returns a tensor with 0 for what is no number, as in rows that see nothing: in both runs, it is no difference."""
    return value.nan_to_num(0.0, 0.0, 0.0)


def _least_scale(expected: Mapping[str, Tensor]) -> Tensor:
    """Returns what an element's size is taken for at least: some gradients are nothing but rounding.

    The bias of keys has none where positions are not rotated, for softmax does not see what is added to all of a row.
    """
    gradients = [_numbers(value) for name, value in expected.items() if name.startswith("gradient") and value.numel()]
    sizes = [value.norm() / value.numel() ** 0.5 for value in gradients]
    tiny = torch.finfo(torch.float32).tiny
    return 1e-2 * torch.stack(sizes).max().clamp_min(tiny) if sizes else torch.tensor(tiny)
