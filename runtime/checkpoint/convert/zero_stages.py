"""Masters and optimizer states of DeepSpeed's stages 1 to 3, from what each rank saved: [Note: DeepSpeed's files]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import CheckpointError

from .flat_partitions import of_stage_2, of_stage_3, slice_numel
from .foreign import ForeignCheckpoint, FoundTensor, options_of
from .pickles import Inert

Cut = Callable[[int, tuple[int, ...]], Tensor]


def add_zero(found: ForeignCheckpoint, ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Adds what the ranks' optimizer files hold.

    Args:
        found: checkpoint contents to which the tensors and the options of the optimizer groups are added.
        ranks: each rank's `optimizer_state_dict`.
        groups: shapes of parameters by name, group by group, in the order of the flat partitions.

    Raises:
        CheckpointError: the stage is unknown, or states are not in these files.
    """
    stage = ranks[0]["zero_stage"]
    stage = int(stage.given[0] if isinstance(stage, Inert) else stage)
    match stage:
        case 1 | 2:
            _add_stage_2(found, ranks, groups)
        case 3:
            _add_stage_3(found, ranks, groups)
        case _:
            raise CheckpointError(f"the optimizer files are of ZeRO stage {stage}; expected 1, 2 or 3")


def _add_stage_2(
    found: ForeignCheckpoint, ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    bases = [rank["base_optimizer_state"] for rank in ranks]
    paddings = ranks[0].get("param_alignment_paddings")
    if isinstance(bases[0], Mapping):
        found.groups = [options_of(group) for group in bases[0]["param_groups"]]
    for number, group in enumerate(groups):
        masters = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        # An elastic checkpoint has a list, one entry a group.
        states = [base["state"].get(number, {}) if isinstance(base, Mapping) else base[number] for base in bases]
        roles = {role: [state[role] for state in states] for role in _elementwise(states[0])}
        start = 0
        for place, (name, shape) in enumerate(group.items()):
            cuts: dict[str, Cut] = {"param": partial(of_stage_2, masters)}
            cuts |= {role: partial(of_stage_2, parts) for role, parts in roles.items()}
            _add(found, name, tuple(shape), start, cuts)
            _add_scalars(found, name, states[0])
            start += prod(shape) + (0 if paddings is None else int(paddings[number][place]))


def _add_stage_3(
    found: ForeignCheckpoint, ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    optimizers = [rank["optimizer_state_dict"] for rank in ranks]
    found.groups = [options_of(group) for group in optimizers[0]["param_groups"]]
    masters = [list(rank["fp32_flat_groups"]) for rank in ranks]
    states = [[one["state"].get(number, {}) for number in range(len(masters[0]))] for one in optimizers]
    roles = {role: [[state[role] for state in of_rank] for of_rank in states] for role in _elementwise(states[0][0])}
    start = 0
    for group in groups:
        for name, shape in group.items():
            cuts: dict[str, Cut] = {"param": partial(of_stage_3, masters)}
            cuts |= {role: partial(of_stage_3, parts) for role, parts in roles.items()}
            _add(found, name, tuple(shape), start, cuts)
            _add_scalars(found, name, states[0][0])
            start += slice_numel(prod(shape), len(ranks))


def _add(found: ForeignCheckpoint, name: str, shape: tuple[int, ...], start: int, cuts: Mapping[str, Cut]) -> None:
    for role, cut in cuts.items():
        found.tensors.append(FoundTensor(name, role, shape, torch.float32, partial(_as_fp32, cut, start, shape)))


def _as_fp32(cut: Cut, start: int, shape: tuple[int, ...]) -> Tensor:
    return cut(start, shape).float()


def _add_scalars(found: ForeignCheckpoint, name: str, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0):
            number = torch.as_tensor(value, dtype=torch.float32)
            found.tensors.append(FoundTensor(name, f"scalar:{key}", (), torch.float32, lambda number=number: number))


def _elementwise(state: Mapping[str, Any]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0]
