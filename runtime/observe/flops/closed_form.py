"""FLOPs of a forward from the shapes of its layers, where operations cannot be watched: in compiled models.

[Note: estimated] Each linear layer meets each token once, which is so in dense language models and not where experts
take turns. Attention is that of the model's `config`, with a causal mask, in the share of its blocks that this rank
has. A model with other layers that multiply, or without tokens, is not estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  # the base of all convolutions

from dsrun.errors import ModelError
from dsrun.estimate.model.architecture import Architecture, from_transformers

from ...second_runs import SecondRun
from ...stacks import find_stacks
from .counter import FlopCount, Flops


def closed_form(
    modules: Sequence[nn.Module], *, tokens: int, sequence: int, runs: Sequence[SecondRun] = ()
) -> FlopCount | None:
    """Returns what a forward and its backward multiply, see [Note: estimated]; None where shapes do not tell.

    Args:
        modules: Modules that the forward runs.
        tokens: Tokens of the forward; 0 where they are not known.
        sequence: Tokens of a sequence.
        runs: Second runs that have begun in the forward, one a block.
    """
    parts = list({id(part): part for module in modules for part in module.modules()}.values())
    if not tokens or any(isinstance(part, _ConvNd | nn.RNNBase) for part in parts):
        return None
    trains = any(param.requires_grad for module in modules for param in module.parameters())
    products = Flops()
    for weight in _linear_weights(parts):
        flops = 2.0 * tokens * weight.numel()
        products += _with_backward(flops, gradients=int(trains) + int(weight.requires_grad))
    shape = next((shape for part in parts if (shape := _architecture(part)) is not None), None)
    blocks = _blocks(modules)
    numel = sum(weight.numel() for block in blocks for weight in _linear_weights(block.modules()))
    attention = Flops()
    if shape is not None:
        held = numel / shape.most_of_block(1)  # whole blocks that this rank has, in parts or not
        attention = _with_backward(tokens * held * shape.block_attention_flops(sequence), gradients=2 * int(trains))
    again = sum(run.whole + run.cut for run in runs if not run.keeps_products) / len(blocks) if blocks else 0.0
    return FlopCount(
        products=Flops(products.forward, products.model, products.model + again * 2.0 * tokens * numel),
        attention=Flops(attention.forward, attention.model, attention.model + again * attention.forward),
        not_counted=() if shape is not None else ("attention",),
        is_estimated=True,
    )


def _with_backward(flops: float, *, gradients: int) -> Flops:
    model = flops * (1 + gradients)
    return Flops(flops, model, model)


def _linear_weights(parts: Any) -> Iterator[Tensor]:
    """Yields the weights of linear layers, of transformers' Conv1D too."""
    for part in parts:
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
            yield part.weight


def _blocks(modules: Sequence[nn.Module]) -> list[nn.Module]:
    holder = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    return [block for stack in find_stacks(holder, skip=lambda _: False) for _, block in stack.blocks]


def _architecture(part: nn.Module) -> Architecture | None:
    config: Any = getattr(part, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else None
    if not isinstance(values, dict):
        return None
    try:
        return from_transformers(values, source="model.config")  # pyright: ignore[reportUnknownArgumentType]
    except ModelError:
        return None
