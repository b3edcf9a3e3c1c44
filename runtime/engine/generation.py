"""Generation inside training: at stage 3 the weights are gathered once, and then each rank generates on its own.

How a model generates is the model's business: its own `generate` runs, with what the script gave it, and without
gradients.

[Note: who waits for whom] A forward at stage 3 gathers its units, so all ranks must run as many forwards. Libraries
know that: transformers' `generate(synced_gpus=True)` has ranks that are done go on with the others. Where the whole
weights fit beside the training state, they are gathered before the first token, forwards enter no collective, and ranks
with short answers are done early.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsrun.errors import ModelError
from dsrun.units import format_bytes

from ..memory.host_pool import available_bytes
from ..memory.room import free_bytes
from ..mesh.join.groups import ProcessGroupMesh
from ..zero.access.gathered import GatheredParameters
from ..zero.hooks.modules import UnitHooks
from .model.sharded import ShardedModel

#: Part of the free memory that the weights may take: the rest is for what generation keeps of each token.
_PART_FOR_WEIGHTS = 0.5
#: Argument by which transformers has ranks that are done go on with those that are not.
_IN_STEP = "synced_gpus"


class Generation:
    """The model's `generate`, with whole weights where they fit.

    Args:
        sharded: Model, and what of it each rank has.
        mesh: Ranks and device.
        hooks: Hooks of the units, which let go of what a forward has left in use.
    """

    def __init__(self, sharded: ShardedModel, mesh: ProcessGroupMesh, hooks: UnitHooks) -> None:
        self._sharded = sharded
        self._mesh = mesh
        self._hooks = hooks

    def run(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Generates; every rank must call. See [Note: who waits for whom].

        At stage 3 enters an all-reduce of 8 bytes, and an all-gather of each unit; where the weights do not fit, those
        of each forward instead, and ranks stay in step.

        Args:
            generate: the model's own function.
            args: positional arguments of it.
            kwargs: keyword arguments of it; `synced_gpus` is set unless the script has set it.

        Raises:
            ModelError: the weights do not fit, and `generate` has no `synced_gpus` by which ranks stay in step.
        """
        self._hooks.find_failed()
        with torch.no_grad():  # else each forward would gather, for a backward that may come
            if not self._sharded.plan.shard_parameters:
                return generate(*args, **kwargs)
            knows_word = _IN_STEP in inspect.signature(generate).parameters
            fits = self._check_fits(must=self._mesh.info.world_size > 1 and not knows_word)
            said = {_IN_STEP: not fits} if knows_word and kwargs.get(_IN_STEP) is None else {}
            with GatheredParameters(self._sharded.module.parameters(), enabled=fits):
                return generate(*args, **{**kwargs, **said})

    def _check_fits(self, *, must: bool) -> bool:
        """Returns whether the whole weights fit into half of what is free, on every rank; refused if they must."""
        units = (*self._sharded.units, *self._sharded.frozen)
        wanted = sum(unit.layout.padded_numel * unit.dtype.itemsize for unit in units)
        # The least of all ranks, as the largest of the negated.
        least = torch.tensor([-self._room()], dtype=torch.int64, device=self._mesh.device)
        self._mesh.world.all_reduce(least, op="max", label="room for weights").wait()
        with self._mesh.world.reading("room for weights"):
            free = -int(least.item())
        fits = wanted <= free * _PART_FOR_WEIGHTS
        if must and not fits:
            raise ModelError(
                f"engine.generate: the whole weights take {format_bytes(wanted)}, and a rank has {format_bytes(free)} "
                f"free, half of it for weights; and the model's `generate` has no `{_IN_STEP}`",
                hint="free memory with engine.offload_states(), or have all ranks take as many steps in "
                "engine.module.generate(...)",
            )
        return fits

    def _room(self) -> int:
        """Bytes that this rank may take."""
        device = self._mesh.device
        if device.type != "cpu":
            return free_bytes(device)
        return available_bytes() // self._mesh.info.local_world_size
