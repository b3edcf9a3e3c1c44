"""Layers one after the other: what a chunk of a pipeline of layers does forward. Builds and cuts nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .build import Seeds

#: Classes of models for which DeepSpeed recomputes this kind of layer in any case.
_ALWAYS: dict[str, str] = dict.fromkeys(("GPTModelPipe", "GPT2ModelPipe"), "ParallelTransformerLayerPipe")


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer of this rank.

    Attributes:
        index: number of the layer in the model.
        call: module or function.
        label: name by which layers are chosen for recomputation.
        has_params: whether it counts as one with parameters when that is chosen.
    """

    index: int
    call: Callable[[Any], Any]
    label: str
    has_params: bool


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which layers are run again in backward.

    Attributes:
        interval: layers that are run again together; 0: none is run again.
        function: function of (function of tensors, tensors) that calls the former now and in backward.
        layers: names of classes; all layers of an interval must have one. None: one of them must have parameters.
        model: name of the model's class.
    """

    interval: int
    function: Callable[..., Any]
    layers: Sequence[str] | None
    model: str

    def applies(self, layers: Sequence[PlacedLayer]) -> bool:
        """Whether some layers are run again."""
        if not torch.is_grad_enabled():
            return False
        if self.layers is None:
            return any(layer.has_params for layer in layers)
        always = _ALWAYS.get(self.model, "\0")
        return all(layer.label in self.layers or always in layer.label for layer in layers)


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`, whose inside is computed again in backward, with the same random numbers.

    Args:
        function: function of the arguments.
        args: arguments, tensors among them.
    """
    return torch_checkpoint(function, *args, use_reentrant=False)


def run_layers(
    layers: Sequence[PlacedLayer], value: Any, *, recompute: Recompute, seeds: Seeds | None, micro: int
) -> Any:
    """Returns what the last layer makes of it, each layer being given what the one before returned.

    Args:
        layers: layers of a chunk.
        value: tensor, or tuple of them.
        recompute: layers that are run again in backward.
        seeds: seeds that are set before each layer; None: the generators are left as they are.
        micro: number of the chunk's forward, from 1 on.
    """

    def runs(some: Sequence[PlacedLayer]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            value = values[0] if len(values) == 1 else values
            for layer in some:
                if seeds is not None:
                    # By the micro batch, so that masks differ; by the layer, so that they do not depend on the cut.
                    seeds.set(seeds.base * (micro + 1) + layer.index)
                value = layer.call(value)
            return value

        return run

    if recompute.interval == 0:
        return runs(layers)(value)
    for start in range(0, len(layers), recompute.interval):
        some = layers[start : start + recompute.interval]
        values = value if isinstance(value, tuple) else (value,)
        value = recompute.function(runs(some), *values) if recompute.applies(some) else runs(some)(*values)
    return value


def has_own_params(layer: object) -> bool:
    """Whether something is a module with parameters."""
    return isinstance(layer, nn.Module) and any(True for _ in layer.parameters())
