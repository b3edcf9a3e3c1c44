"""The engine's whole weights, in and out: state dicts as torch has them, and files other programs read.

Optimizer states and counters are a checkpoint's business.

[Note: one unit at a time] At stage 3 each unit is gathered, copied to the host by the ranks that want it, and dropped:
one all-gather a unit, and never more than one unit whole on the device. A dict is the whole model on the host; a
safetensors file is written as the units come, so there too is never more than one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsrun.checkpoint_files.storage.registry import place_given
from dsrun.errors import CheckpointError, InputError
from dsrun.files.atomic import sync_folder

from ...checkpoint.export.model_files import StreamedModel
from ...mesh.agree.same import attempt
from ...zero.access.gathered import GatheredParameters
from ...zero.creation.pretrained import Held, assign, persistent_buffers
from ...zero.units.trained import is_trained
from ..parts import EngineParts


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
        parts.torn.check("engine.module_state_dict")
        wanted = all_ranks or parts.mesh.info.rank == 0
        return _collect(parts, frozen=not exclude_frozen_parameters, wanted=wanted)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Sets parameters, with their fp32 masters, and buffers; optimizer states stay as they are.

        Args:
            state_dict: whole tensors, the same on every rank.
            strict: it must have all parameters and persistent buffers, and no others.

        Raises:
            CheckpointError: naming every tensor that is missing, unexpected or of another shape.
            InputError: it is no dict of tensors.
        """
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"load_module_state_dict: state_dict is a {type(state_dict).__name__}; expected a dict of tensors",
                hint="every rank passes the same one; engine.module_state_dict(all_ranks=True) gives it to all ranks",
            )
        sources = {name: Held(value) for name, value in state_dict.items()}
        assign(self._parts.module, lambda: sources, where="load_module_state_dict", strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | os.PathLike[str] = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_bytes: int | None = None,
    ) -> bool:
        """Saves the whole weights for other programs, at every stage; rank 0 writes.

        Args:
            save_dir: folder, made if it is not there.
            save_filename: name in it; one that ends in `.safetensors` gets that format, others torch's, for which rank
                0 holds the whole model in host memory.
            exclude_frozen_parameters: leave parameters out that are not trained.
            max_shard_bytes: write safetensors files of at most so many bytes of tensors, if one does not hold all, with
                an index as Hugging Face's loaders read it; None: one file.

        Returns:
            True.

        Raises:
            InputError: `save_dir` is None, empty, no path or an address, or shards make no sense.
            CheckpointError: on every rank, if rank 0 could not write; nothing was left or replaced.
        """
        folder = place_given(save_dir, who="save_16bit_model: save_dir", to="save the weights in")
        if not isinstance(folder, Path):
            raise InputError(
                f"save_16bit_model: save_dir is {save_dir}; expected a folder",
                hint="save in a folder and copy it there; save_checkpoint takes an address",
            )
        parts, path = self._parts, folder / save_filename
        parts.torn.check("engine.save_16bit_model")
        if max_shard_bytes is not None and (max_shard_bytes < 1 or path.suffix != ".safetensors"):
            raise InputError(
                f"save_16bit_model: max_shard_bytes is {max_shard_bytes}, for {save_filename}",
                hint="give 1 or more, and a name that ends in .safetensors, such as model.safetensors",
            )
        if path.suffix == ".safetensors":
            work = _stream(parts, path, frozen=not exclude_frozen_parameters, shard_bytes=max_shard_bytes)
        else:
            work = partial(_write, path, self.module_state_dict(exclude_frozen_parameters))
        failure = attempt(work, parts.collectives, device=parts.mesh.device, of="save_16bit_model")
        if failure is not None:
            raise CheckpointError(
                f"{path}: rank {failure.rank} could not write: {failure.error or 'see its error'}"
            ) from failure.error
        return True

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str | os.PathLike[str] = "pytorch_model.bin"
    ) -> bool:
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

    def keep(tensor: Tensor) -> None:
        values[id(tensor)] = tensor.detach().to("cpu", copy=True)

    _visit(parts, keep if wanted else None, frozen=frozen)
    return {name: values[id(tensor)] for name, tensor in _named(parts, frozen=frozen).items()} if wanted else None


def _stream(parts: EngineParts, path: Path, *, frozen: bool, shard_bytes: int | None) -> Callable[[], None]:
    """Writes the weights as they come on rank 0; returns what ends the file, or raises what has gone wrong with it."""
    if parts.mesh.info.rank != 0:
        _visit(parts, None, frozen=frozen)
        return lambda: None
    named = _named(parts, frozen=frozen)
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)  # a tied weight has several, and loaders look for any of them
    saving = StreamedModel(path, named, shard_bytes=shard_bytes)

    def put(tensor: Tensor) -> None:
        for name in names.get(id(tensor), ()):
            saving.put(name, tensor)

    try:
        _visit(parts, put, frozen=frozen)
    except BaseException:  # not of the file, whose errors wait for `finish`
        saving.abandon()
        raise
    return saving.finish


def _visit(parts: EngineParts, take: Callable[[Tensor], None] | None, *, frozen: bool) -> None:
    """Hands every parameter, while it is whole, and every persistent buffer to `take`, where there is one."""
    gathered: set[int] = set()
    for unit in (*parts.step.units, *(parts.frozen_units if frozen else ())):
        gathered.update(map(id, unit.params))
        with GatheredParameters(unit.params):
            for param in unit.params if take is not None else ():
                assert take is not None, "else there are none"
                take(param)
    if take is None:
        return
    for param in parts.module.parameters():
        if frozen and not is_trained(param) and id(param) not in gathered:
            take(param)
    for buffer in persistent_buffers(parts.module).values():
        take(buffer)


def _named(parts: EngineParts, *, frozen: bool) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name in the order of torch's state dicts, tied ones by each name."""
    trained = {id(param) for unit in parts.step.units for param in unit.params}
    found: dict[str, Tensor] = {}
    for prefix, module in parts.module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in trained or (frozen and not is_trained(param)):
                found[f"{start}{name}"] = param
        transient: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in transient:
                found[f"{start}{name}"] = buffer
    return found


def _write(path: Path, weights: dict[str, Any] | None) -> None:
    """Writes what rank 0 has collected, in torch's format."""
    if weights is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(weights, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
