"""The engine's whole weights, in and out: state dicts as torch has them, and files other programs read.

Optimizer states and counters are a checkpoint's business.

[Note: one unit at a time] At stage 3 each unit is gathered, copied to the host by the ranks that want it, and dropped:
one all-gather a unit, and never more than one unit whole on the device. The dict itself is the whole model on the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsrun.atomic import sync_folder
from dsrun.errors import CheckpointError, InputError

from ..checkpoint.tensor_file import write_tensor_file
from ..mesh.agreement import attempt
from ..zero.gathered import GatheredParameters
from ..zero.pretrained import Held, assign, persistent_buffers
from .parts import EngineParts


class WholeWeights:
    """What an engine offers of its weights as a whole; every rank must call each method."""

    _parts: EngineParts

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, *, all_ranks: bool = False
    ) -> dict[str, Tensor] | None:
        """Returns what `state_dict` of the plain model would, on the CPU, in the dtypes that forward reads.

        Args:
            exclude_frozen_parameters: leave parameters out that are not trained.
            all_ranks: every rank gets it, and needs the memory for it.

        Returns:
            names to tensors, tied ones shared; on rank 0 only, and None elsewhere, unless `all_ranks`.
        """
        parts = self._parts
        wanted = all_ranks or parts.mesh.info.rank == 0
        return _collect(parts, frozen=not exclude_frozen_parameters, wanted=wanted)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Sets parameters, with their fp32 masters, and buffers; optimizer states stay as they are.

        Args:
            state_dict: whole tensors, the same on every rank.
            strict: it must have all parameters and persistent buffers, and no others.

        Raises:
            CheckpointError: naming every tensor that is missing, unexpected or of another shape.
        """
        sources = {name: Held(value) for name, value in state_dict.items()}
        assign(self._parts.module, sources, where="load_module_state_dict", strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves the whole weights for other programs, at every stage; rank 0 writes.

        Args:
            save_dir: folder, made if it is not there.
            save_filename: name in it; one that ends in `.safetensors` gets that format, others torch's.
            exclude_frozen_parameters: leave parameters out that are not trained.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is empty.
            CheckpointError: on every rank, if rank 0 could not write; nothing was left or replaced.
        """
        if not str(save_dir):
            raise InputError("save_16bit_model: save_dir is empty", hint="pass the folder to save the weights in")
        parts = self._parts
        weights = self.module_state_dict(exclude_frozen_parameters)
        path = Path(save_dir) / save_filename

        def work() -> None:
            if weights is not None:
                _write(path, weights)

        failure = attempt(work, parts.collectives, device=parts.mesh.device, of="save_16bit_model")
        if failure is not None:
            raise CheckpointError(
                f"{path}: rank {failure.rank} could not write: {failure.error or 'see its error'}"
            ) from failure.error
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Saves as `save_16bit_model` does, whose older name this is."""
        return self.save_16bit_model(save_dir, save_filename)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether whole weights can be saved: always."""
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """See `module_state_dict`: a private name of DeepSpeed's that scripts call."""
        return self.module_state_dict(exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """See `module_state_dict`: a private name of DeepSpeed's that scripts call."""
        return self.module_state_dict(exclude_frozen_parameters)


def _collect(parts: EngineParts, *, frozen: bool, wanted: bool) -> dict[str, Tensor] | None:
    """Returns the weights in the order of torch's state dicts, see [Note: one unit at a time]."""
    values: dict[int, Tensor] = {}

    def take(params: list[nn.Parameter]) -> None:
        with GatheredParameters(params):
            if wanted:
                values.update((id(param), _to_host(param)) for param in params)

    for unit in (*parts.step.units, *(parts.frozen_units if frozen else ())):
        take(unit.params)
    if not wanted:
        return None
    for param in parts.module.parameters():
        if frozen and not param.requires_grad and id(param) not in values:
            values[id(param)] = _to_host(param)
    buffers = {id(buffer): _to_host(buffer) for buffer in persistent_buffers(parts.module).values()}
    found: dict[str, Tensor] = {}
    for prefix, module in parts.module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in values:
                found[f"{start}{name}"] = values[id(param)]
        transient: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in transient:
                found[f"{start}{name}"] = buffers[id(buffer)]
    return found


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _write(path: Path, weights: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".safetensors":
            # Loaders that know a model's ties need one of the names; those that do not need all of them.
            write_tensor_file(unfinished, weights, metadata={"format": "pt"})
        else:
            torch.save(weights, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
