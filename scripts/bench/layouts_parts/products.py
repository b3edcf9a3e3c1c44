"""The matrix products of the model's layers, forward and backward, on one rank of those that share each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .job import Job

#: Blocks with their products: more weights than caches near a core have room for.
_BLOCKS = 2


def shapes_of(job: Job, tensor: int) -> list[tuple[int, int, int]]:
    """Returns inputs, outputs and number of each kind of Linear of some blocks and the head, of one rank.

    Args:
        job: sizes of the model.
        tensor: ranks that share each layer.
    """
    llama = job.llama
    blocks = min(_BLOCKS, llama.layers)
    width, inner = llama.hidden // tensor, llama.inner // tensor
    keys = llama.hidden * llama.key_heads // llama.heads // tensor
    return [
        (llama.hidden, width, blocks),
        (llama.hidden, keys, 2 * blocks),
        (width, llama.hidden, blocks),
        (llama.hidden, inner, 2 * blocks),
        (inner, llama.hidden, blocks),
        (llama.hidden, llama.vocab // tensor, 1),
    ]


def flops_of(job: Job, *, tokens: int, tensor: int) -> float:
    """Returns the FLOPs of a call of `products_of`."""
    return sum(6.0 * tokens * inputs * outputs * count for inputs, outputs, count in shapes_of(job, tensor))


def products_of(job: Job, *, tokens: int, tensor: int) -> Callable[[], None]:
    """Returns a function that makes the products of one micro batch; each layer has weights of its own.

    Args:
        job: sizes of the model.
        tokens: tokens of a micro batch.
        tensor: ranks that share each layer.
    """
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for inputs, outputs, count in shapes_of(job, tensor):
        x, dy = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
        for _ in range(count):
            layers.append((x, dy, torch.randn(outputs, inputs), torch.zeros(outputs, inputs)))

    def call() -> None:
        for x, _, weight, _ in layers:
            torch.nn.functional.linear(x, weight)
        for x, dy, weight, grad in layers:
            torch.mm(dy, weight)
            torch.mm(dy.t(), x, out=grad)

    return call
