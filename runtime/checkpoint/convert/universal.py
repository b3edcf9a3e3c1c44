"""DeepSpeed's universal checkpoints: a folder a parameter, a file a state. See [Note: DeepSpeed's files]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.errors import CheckpointError

from .foreign import ForeignCheckpoint, FoundTensor, options_of

_MASTER, _STEP = "fp32", "step"


def add_universal(
    found: ForeignCheckpoint, folder: Path, trained: Mapping[str, tuple[int, ...]], read: Callable[[Path], Any]
) -> None:
    """Adds masters, states and the groups' options.

    Args:
        found: checkpoint contents to which the masters, states and group options are added.
        folder: `zero` of the checkpoint.
        trained: shapes of the trained parameters by name.
        read: function that reads a torch file and returns its content.

    Raises:
        CheckpointError: a file is missing, or has another shape.
    """
    options = read(folder / "optimizer_state.pt")
    found.groups = [options_of(group) for group in options["param_groups"]]
    steps = found.counters["global_steps"] - found.counters["skipped_steps"]
    for name, shape in trained.items():
        if Path(name).name != name:
            raise CheckpointError(f"{folder}: a parameter has the name {name!r}, which is no plain folder name")
        paths = {path.stem: path for path in sorted((folder / name).glob("*.pt"))}
        if _MASTER not in paths:
            raise CheckpointError(f"{folder / name / _MASTER}.pt: it is missing")
        for stem, path in paths.items():
            if stem != _STEP:
                role = "param" if stem == _MASTER else stem
                make = partial(_whole, read, path, shape)
                found.tensors.append(FoundTensor(name, role, shape, torch.float32, make))
        step = float(read(paths[_STEP])) if _STEP in paths else float(_common_step(options, steps))
        number = torch.tensor(step)
        found.tensors.append(FoundTensor(name, f"scalar:{_STEP}", (), torch.float32, lambda number=number: number))


def _whole(read: Callable[[Path], Any], path: Path, shape: tuple[int, ...]) -> Tensor:
    value = read(path)
    tensor = value["param"] if isinstance(value, dict) else value
    # The converter leaves tensors of stage 3 flat.
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) not in (shape, (prod(shape),)):
        raise CheckpointError(f"{path}: it holds no tensor of shape {shape}")
    return tensor.float().view(shape)


def _common_step(options: Mapping[str, Any], default: int) -> Any:
    """Returns the step of all parameters, from where a converter of stage 3 leaves it."""
    states = (options.get("optimizer_state_dict") or {}).get("state") or {}
    return next((state[_STEP] for state in states.values() if _STEP in state), default)
