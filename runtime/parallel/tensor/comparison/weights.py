"""Weights of the two runs of a region: whole ones of what ranks have parts of, with random numbers added, and parts.

[Note: weights of a comparison]
Those of the model would not do: a projection that begins at zero hides all that lies before it, and a bias of zeros may
be added twice. So random numbers are added, the same on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsrun.checkpoint_files.index.region import TensorBoxes

from ....mesh.collectives import Collectives
from .runs import fp32

_SEED = 20_261_128


def names_of(module: nn.Module) -> dict[str, str]:
    """Returns all names of a module's parameters, and by each the first one of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(param), name) for name, param in module.named_parameters(remove_duplicate=False)}


def whole_of(param: Tensor, boxes: TensorBoxes | None, axis: Collectives) -> Tensor:
    """Returns a parameter's whole values in fp32, or in fp64 of such: each rank fills in its boxes, and all add up."""
    part = fp32(param) if param.is_floating_point() else param.detach().clone()
    if boxes is None:
        return part
    whole = part.new_zeros(boxes.shape)
    position = 0
    flat = part.reshape(-1)
    for box in boxes.boxes:
        whole[box.slices] = flat[position : position + box.numel].view(box.shape)
        position += box.numel
    axis.all_reduce(whole.view(-1), label="weights of a block").wait()
    return whole


def with_noise(whole: Tensor, number: int) -> Tensor:
    """Returns whole values with random numbers added, the same on all ranks, so that nothing begins at zero.

    Those of a matrix would keep the size of an activation; other values that are not zero keep their sign.

    Args:
        whole: values, left as they are.
        number: number of the parameter, so that no two get the same.
    """
    if not whole.is_floating_point():
        return whole
    generator = torch.Generator(whole.device).manual_seed(_SEED + number)
    noise = torch.randn(whole.shape, generator=generator, device=whole.device, dtype=whole.dtype)
    if whole.dim() > 1:
        return whole + noise * (0.5 / whole.shape[-1] ** 0.5)
    return torch.where(whole == 0, 0.1 * noise, whole * (1 + 0.1 * noise))


def leaf(value: Tensor) -> Tensor:
    """Returns a tensor that gradients are wanted of, where it holds floating numbers."""
    return value.requires_grad_(value.is_floating_point())


def part_of_whole(whole: Tensor, boxes: TensorBoxes | None, like: Tensor) -> Tensor:
    """Returns this rank's part of whole values, in memory of its own."""
    part = whole.clone() if boxes is None else torch.cat([whole[box.slices].reshape(-1) for box in boxes.boxes])
    return part.view(like.shape)
