"""A model over all its pipeline stages: names of its tensors, and weights brought together on a host.

How a stage collects its own weights: `export.py`.

[Note: names of the whole model]
A tensor is stored under the name that it has in the whole model, whichever stage has it. A parameter that several
stages use is stored once, under the name of its first use; its other names are aliases, as those of tied weights are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ...mesh.agree.texts import gather_texts
from ...mesh.collectives import Collectives
from ...mesh.join.groups import ProcessGroupMesh
from ...zero.creation.pretrained import persistent_buffers
from ...zero.units.unit import ParamUnit
from .entries import stored_names, tied_names

_LABEL = "weights of all stages"


@dataclass(frozen=True, slots=True)
class WholeNames:
    """Names of the tensors of all stages; the same on every rank.

    Attributes:
        tensors: (name, role) of each parameter and persistent buffer, by the name that it is stored under.
        aliases: further names of parameters, each with the name that it is stored under.
        frozen: those of the aliases that are names of frozen parameters.
    """

    tensors: frozenset[tuple[str, str]]
    aliases: Mapping[str, str]
    frozen: frozenset[str]

    def aliases_of(self, *, frozen: bool) -> dict[str, str]:
        """Returns the aliases for a checkpoint.

        Args:
            frozen: whether frozen parameters are in it.
        """
        return {name: stored for name, stored in self.aliases.items() if frozen or name not in self.frozen}

    @property
    def all_names(self) -> frozenset[str]:
        """Every name of every tensor."""
        return frozenset(name for name, _ in self.tensors) | frozenset(self.aliases)


def names_over_stages(
    model: nn.Module,
    units: Sequence[ParamUnit],
    mesh: ProcessGroupMesh,
    *,
    further: Mapping[str, str] = MappingProxyType({}),
    frozen: Mapping[str, str] = MappingProxyType({}),
) -> WholeNames:
    """Returns the names of all stages' tensors; every rank must call. Enters collectives over the pipe axis.

    Args:
        model: the model, or this rank's stages of it.
        units: units of its trained parameters.
        mesh: ranks of the job.
        further: names of further uses on this rank that are no parameters of `model` any more, each with the name that
            the parameter is stored under.
        frozen: names of frozen parameters of `model` that another stage stores, each with the name it is stored under.
    """
    stored = stored_names(model, units)
    aliases, trained = tied_names(model, units), tied_names(model, units, frozen=False)
    aliases = {**{name: frozen.get(first, first) for name, first in aliases.items()}, **frozen}
    tensors = [(frozen.get(name, name), "param") for name in (stored[id(param)] for param in model.parameters())]
    tensors += [(name, "buffer") for name in persistent_buffers(model)]
    mine = json.dumps([tensors, {**aliases, **further}, sorted(set(aliases) - set(trained))])
    everyone = [
        json.loads(text) for text in gather_texts(mine, mesh.pipe, device=mesh.device, label="names of tensors")
    ]
    return WholeNames(
        frozenset((name, role) for found, _, _ in everyone for name, role in found),
        {alias: name for _, found, _ in everyone for alias, name in found.items()},
        frozenset(name for _, _, found in everyone for name in found),
    )


def of_all_stages(
    own: Mapping[str, Tensor], stored: Mapping[str, str], pipe: Collectives, *, device: torch.device
) -> dict[str, Tensor]:
    """Returns the weights of all stages on the CPU, stage after stage; a broadcast a tensor along the pipe axis.

    What is stored under one name is one tensor: its further names have the same.

    Args:
        own: this stage's weights by name, on the CPU.
        stored: name that each of them is stored under.
        pipe: ranks of the other stages with the same place in them; every one must call.
        device: device of the collectives' tensors.
    """
    if pipe.size == 1:
        return dict(own)
    listed = [(name, stored[name], list(value.shape), str(value.dtype)) for name, value in own.items()]
    values: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for stage, text in enumerate(gather_texts(json.dumps(listed), pipe, device=device, label=_LABEL)):
        for name, under, shape, dtype in json.loads(text):
            if under not in values:
                values[under] = _from_stage(stage, own.get(name), tuple(shape), dtype, pipe, device=device)
            found[name] = values[under]
    return found


def _from_stage(
    stage: int, mine: Tensor | None, shape: tuple[int, ...], dtype: str, pipe: Collectives, *, device: torch.device
) -> Tensor:
    """Returns a tensor of one stage on every stage's host."""
    if stage == pipe.rank:
        assert mine is not None, "a stage has what it has listed"
        sent = mine.to(device, copy=True).contiguous()
    else:
        sent = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
    if sent.numel():
        # As bytes, for a buffer may have any dtype.
        pipe.broadcast(sent.reshape(-1).view(torch.uint8), source=stage, label=_LABEL).wait()
    return sent.cpu()
