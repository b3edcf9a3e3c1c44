"""Runs the chunks of a cut model one after the other in one thread, as a schedule without ranks. Checks nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.runtime.parallel.pipeline.cut import ModelStages, cut_model

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Chunks:
    """A model cut on each rank.

    Attributes:
        stages: chunks of each rank.
        rank_of: rank of each chunk.
    """

    stages: list[ModelStages]
    rank_of: tuple[int, ...]

    def run(self, batch: Batch, *, loss_of: Callable[[Any], Tensor] | None) -> Any:
        """Returns the model's output; with a loss, gradients are added to those of the parameters."""
        args, kwargs = batch
        received: Any = None
        handed: list[tuple[Tensor, Tensor]] = []
        output: Any = None
        for chunk, rank in enumerate(self.rank_of):
            output = self.stages[rank].run(chunk, args, kwargs, received)
            if chunk < len(self.rank_of) - 1:
                hidden: Tensor = output["hidden"]
                leaf = hidden.detach().clone().requires_grad_(hidden.requires_grad)
                handed.append((hidden, leaf))
                received = {**output, "hidden": leaf}
        if loss_of is not None:
            loss_of(output).backward()
            for hidden, leaf in reversed(handed):
                hidden.backward(leaf.grad)
        return output

    def named_parameters(self) -> dict[str, list[nn.Parameter]]:
        """Returns the parameters of all ranks by their names in the whole model; several of those that ends share."""
        found: dict[str, list[nn.Parameter]] = {}
        for stages in self.stages:
            tied = {id(param.param): param.name for param in stages.tied}
            for name, param in stages.module.named_parameters():
                found.setdefault(tied.get(id(param), name), []).append(param)
        return found

    def grads(self) -> dict[str, Tensor | None]:
        """Returns gradients by name; those of the ends that share a parameter are summed up."""
        found: dict[str, Tensor | None] = {}
        for name, params in self.named_parameters().items():
            grads = [param.grad for param in params if param.grad is not None]
            found[name] = torch.stack(grads).sum(0) if grads else None
        return found


def cut_on_ranks(model: nn.Module, rank_of: Sequence[int], **given: Any) -> Chunks:
    """Returns a model cut on each rank, of copies; the model itself stays whole."""
    ranks = range(max(rank_of) + 1)
    return Chunks(
        [cut_model(copy.deepcopy(model), rank=rank, rank_of=rank_of, **given) for rank in ranks], tuple(rank_of)
    )


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Returns the gradients of a whole model by name."""
    return {name: param.grad for name, param in model.named_parameters()}


def different(one: Mapping[str, Tensor | None], two: Mapping[str, Tensor | None]) -> list[str]:
    """Returns the names by which two sets of gradients differ in any bit."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return [
        name for name in sorted({*one, *two}) if name not in one or name not in two or not same(one[name], two[name])
    ]
