"""The engine's whole weights, in and out: state dicts as torch has them, and files other programs read.

Optimizer states and counters are a checkpoint's business.

[Note: one unit at a time] At stage 3 each unit is gathered, copied to the host by the ranks that want it, and dropped:
one all-gather a unit, and never more than one unit whole on the device. A dict is the whole model on the host; a
safetensors file is written as the units come, so there too is never more than one. With pipeline stages the first
rank has the whole model on its host for a file, too.
Of a parameter that is cut over ranks a gathered unit has this rank's part. Its parts are brought together one parameter
at a time, with one all-gather, by the ranks that want it and those that have the other parts for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ...mesh.join.groups import ProcessGroupMesh
from ...zero.access.gathered import GatheredParameters
from ...zero.access.over_axes import PartsOfRanks
from ...zero.access.whole import ParamAccess
from ...zero.creation.pretrained import TensorSource, assign, persistent_buffers
from ...zero.units.trained import is_trained
from ...zero.units.unit import ParamUnit
from ..model.sharded import ShardedModel
from .entries import stored_names
from .over_stages import WholeNames, of_all_stages


class WholeWeights:
    """The weights of an engine's model as a whole, in and out; every rank must call each method.

    Args:
        mesh: Ranks that the model is cut over.
        sharded: The model.
        access: Access to its parameters, and what a failed load has left torn.
        names: Names of the tensors of all pipeline stages.
    """

    def __init__(self, mesh: ProcessGroupMesh, sharded: ShardedModel, access: ParamAccess, names: WholeNames) -> None:
        self._mesh = mesh
        self._sharded = sharded
        self._access = access
        self._names = names
        self._torn = access.torn
        self._parts = PartsOfRanks(sharded.units, mesh.over, device=mesh.device)
        access.elsewhere, access.loading = names.all_names, mesh.world

    def state_dict(self, *, frozen: bool, all_ranks: bool) -> dict[str, Tensor] | None:
        """Returns the whole model's state dict on the CPU, see `Engine.module_state_dict`."""
        self._torn.check("engine.module_state_dict")
        return self._collect(frozen=frozen, all_ranks=all_ranks)

    def _collect(self, *, frozen: bool, all_ranks: bool) -> dict[str, Tensor] | None:
        """Returns the weights of all stages, on rank 0 or on all ranks."""
        # Of the ranks that have the same parts, the first of each stage meet rank 0 along the pipe axis.
        wanted = all_ranks or self._mesh.replicas().rank == 0
        own = self._own(frozen=frozen, wanted=wanted, all_ranks=all_ranks)
        if own is None:
            return None
        stored = stored_names(self._sharded.module, self._sharded.units)
        by_name = {name: stored.get(id(tensor), name) for name, tensor in _named(self._sharded, frozen=frozen).items()}
        whole = of_all_stages(own, by_name, self._mesh.pipe, device=self._mesh.device)
        for name, first in self._names.aliases_of(frozen=frozen).items():
            if first in whole:
                whole.setdefault(name, whole[first])
        return whole if all_ranks or self._mesh.is_first else None

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool) -> None:
        """Sets parameters and buffers, see `Engine.load_module_state_dict`."""
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"load_module_state_dict: state_dict is a {type(state_dict).__name__}; expected a dict of tensors",
                hint="every rank passes the same one; engine.module_state_dict(all_ranks=True) gives it to all ranks",
            )
        sources = {name: TensorSource(value) for name, value in state_dict.items()}
        assign(
            self._sharded.module,
            lambda: sources,
            where="load_module_state_dict",
            strict=strict,
            access=self._access,
        )

    def save(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str | os.PathLike[str],
        *,
        frozen: bool,
        max_shard_bytes: int | None,
        whole: Callable[[], dict[str, Tensor] | None],
    ) -> None:
        """Saves the whole weights for other programs, see `Engine.save_16bit_model`.

        Args:
            save_dir: Folder.
            save_filename: Name of the file in it.
            frozen: Whether parameters that are not trained are saved.
            max_shard_bytes: Most bytes of tensors in one safetensors file; None: one file.
            whole: `module_state_dict` of the engine, which a script may have wrapped.
        """
        folder = place_given(save_dir, who="save_16bit_model: save_dir", to="save the weights in")
        if not isinstance(folder, Path):
            raise InputError(
                f"save_16bit_model: save_dir is {save_dir}; expected a folder",
                hint="save in a folder and copy it there; save_checkpoint takes an address",
            )
        path = folder / save_filename
        self._torn.check("engine.save_16bit_model")
        if max_shard_bytes is not None and (max_shard_bytes < 1 or path.suffix != ".safetensors"):
            raise InputError(
                f"save_16bit_model: max_shard_bytes is {max_shard_bytes}, for {save_filename}",
                hint="give 1 or more, and a name that ends in .safetensors, such as model.safetensors",
            )
        if path.suffix == ".safetensors" and self._mesh.spec.stages > 1:
            weights = self._collect(frozen=frozen, all_ranks=False)
            work = partial(_write_whole, path, weights, shard_bytes=max_shard_bytes)
        elif path.suffix == ".safetensors":
            writes = self._mesh.info.rank == 0
            work = self._stream(path, writes=writes, frozen=frozen, shard_bytes=max_shard_bytes)
        else:
            work = partial(_write, path, whole())
        failure = attempt(work, self._mesh.world, device=self._mesh.device, label="save_16bit_model")
        if failure is not None:
            raise CheckpointError(
                f"{path}: rank {failure.rank} could not write: {failure.error or 'see its error'}"
            ) from failure.error

    def _own(self, *, frozen: bool, wanted: bool, all_ranks: bool) -> dict[str, Tensor] | None:
        """Returns this stage's weights in the order of torch's state dicts, see [Note: one unit at a time].

        Args:
            frozen: whether parameters that are not trained are among them.
            wanted: whether this rank wants them.
            all_ranks: whether every rank does.
        """
        values: dict[int, Tensor] = {}

        def keep(tensor: Tensor, value: Tensor) -> None:
            values[id(tensor)] = value.detach().to("cpu", copy=True)

        self._visit(keep if wanted else None, frozen=frozen, all_ranks=all_ranks)
        return {name: values[id(one)] for name, one in _named(self._sharded, frozen=frozen).items()} if wanted else None

    def _stream(self, path: Path, *, writes: bool, frozen: bool, shard_bytes: int | None) -> Callable[[], None]:
        """Writes the weights as they come, on the rank that writes.

        Returns:
            function that ends the file, or raises what has gone wrong with it.
        """
        if not writes:
            self._visit(None, frozen=frozen)
            return lambda: None
        named = _named(self._sharded, frozen=frozen)
        names: dict[int, list[str]] = {}
        for name, tensor in named.items():
            names.setdefault(id(tensor), []).append(name)  # a tied weight has several, and loaders look for any of them
        saving = StreamedModel(path, _as_whole(named, self._sharded.units), shard_bytes=shard_bytes)

        def put(tensor: Tensor, value: Tensor) -> None:
            for name in names.get(id(tensor), ()):
                saving.put(name, value)

        try:
            self._visit(put, frozen=frozen)
        except BaseException:  # not of the file, whose errors wait for `finish`
            saving.abandon()
            raise
        return saving.finish

    def _visit(self, take: Callable[[Tensor, Tensor], None] | None, *, frozen: bool, all_ranks: bool = False) -> None:
        """Hands every parameter with its whole values, and every persistent buffer, to `take`, where there is one.

        Args:
            take: function that gets a tensor of the model, and its values; None where this rank wants none.
            frozen: whether parameters that are not trained are handed over.
            all_ranks: whether every rank wants them; else the first of those that have the same parts.
        """
        self._parts.exchange()
        sharded = self._sharded
        gathered: set[int] = set()
        for unit in (*sharded.units, *(sharded.frozen if frozen else ())):
            gathered.update(map(id, unit.params))
            with GatheredParameters(unit.params):
                for param, value in self._whole_values(unit, wanted=take is not None, all_ranks=all_ranks):
                    assert take is not None, "else there are none"
                    take(param, value)
        if take is None:
            return
        for param in sharded.module.parameters():
            if frozen and not is_trained(param) and id(param) not in gathered:
                take(param, param)
        for buffer in persistent_buffers(sharded.module).values():
            take(buffer, buffer)

    def _whole_values(self, unit: ParamUnit, *, wanted: bool, all_ranks: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the parameters of a gathered unit with their whole values, where they are wanted.

        Where this rank wants none, it may have parts for one that does.
        """
        cut_over = unit.placement.cut_over
        if not cut_over:
            yield from zip(unit.params, unit.params, strict=True) if wanted else ()
        elif all_ranks or self._mesh.replicas(cut_over).rank == 0:
            for param, extent in zip(unit.params, unit.layout.extents, strict=True):
                value = self._parts.join(unit, extent, param)
                if wanted:
                    yield param, value


def _as_whole(named: Mapping[str, Tensor], units: Sequence[ParamUnit]) -> dict[str, Tensor]:
    """Returns tensors of the shapes and dtypes that the whole ones have, by name; those of parts have no values."""
    shapes = {
        id(param): extent.whole.shape
        for unit in units
        if unit.placement.cut_over
        for param, extent in zip(unit.params, unit.layout.extents, strict=True)
    }
    return {
        name: torch.empty(shapes[id(one)], dtype=one.dtype, device="meta") if id(one) in shapes else one
        for name, one in named.items()
    }


def _named(sharded: ShardedModel, *, frozen: bool) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name in the order of torch's state dicts, tied ones by each name."""
    trained = {id(param) for unit in sharded.units for param in unit.params}
    found: dict[str, Tensor] = {}
    for prefix, module in sharded.module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in trained or (frozen and not is_trained(param)):
                found[f"{start}{name}"] = param
        transient: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in transient:
                found[f"{start}{name}"] = buffer
    return found


def _write_whole(path: Path, weights: dict[str, Tensor] | None, *, shard_bytes: int | None) -> None:
    """Writes what rank 0 has collected, in safetensors."""
    if weights is None:
        return
    saving = StreamedModel(path, weights, shard_bytes=shard_bytes)
    for name, tensor in weights.items():
        saving.put(name, tensor)
    saving.finish()


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
