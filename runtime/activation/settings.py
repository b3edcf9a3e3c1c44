"""From the config's section to what calls are kept by: keepers inside one another, options, contexts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsrun.config.rules.activation import clashes
from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.errors import ConfigError, Problem

from ..mesh.collectives import Collectives
from .keep.contiguous import Contiguous
from .keep.keeper import AsItIs, Keeper, KeptOnce, Ticket
from .keep.packing import PackingKeeper
from .keep.partition import PartitionKeeper
from .keep.rings import Rings


def check_section(section: ActivationCheckpointing, *, tensor_parallel: bool, source: str) -> None:
    """Refuses keys that do not go together.

    Args:
        section: requested `activation_checkpointing` settings.
        tensor_parallel: whether there are ranks that hold the same activations.
        source: name of the place that the section came from, for messages.

    Raises:
        ConfigError: with all of them.
    """
    found = [Problem(f"{source}: {c.message}", c.hint) for c in clashes(section, tensor_parallel=tensor_parallel)]
    if found:
        raise ConfigError(found[0].message, hint=found[0].hint, more=found[1:])


def keeper_of_inputs(section: ActivationCheckpointing, axis: Collectives | None, *, rings: Rings) -> Keeper:
    """Returns what keeps the inputs of recomputed calls.

    Args:
        section: requested `activation_checkpointing` settings.
        axis: ranks that hold the same activations, where they are cut.
        rings: factory of rings: the keepers for tensors that do not stay on the device.
    """
    if section.cpu_checkpointing:
        keeper: Keeper = OnItsDevice(rings.ring_of)
    elif section.contiguous_memory_optimization:
        assert section.number_checkpoints is not None, "checked with the section"
        keeper = Contiguous(section.number_checkpoints)
    else:
        keeper = AsItIs()
    if section.packing == "int8":
        keeper = PackingKeeper(keeper)
    if section.partition_activations and axis is not None:
        keeper = PartitionKeeper(axis, keeper)
    return KeptOnce(keeper)


class OnItsDevice:
    """A keeper of its own for each device that tensors come from.

    Args:
        make: function that makes the keeper of a device.
    """

    def __init__(self, make: Callable[[torch.device], Keeper]) -> None:
        self._make = make
        self._keepers: dict[torch.device, Keeper] = {}

    @property
    def device_bytes(self) -> int:
        """See `Keeper`."""
        return sum(keeper.device_bytes for keeper in self._keepers.values())

    def put(self, tensor: Tensor, *, label: str = "") -> Ticket:
        """See `Keeper`."""
        keeper = self._keepers.get(tensor.device)
        if keeper is None:
            keeper = self._keepers[tensor.device] = self._make(tensor.device)
        return keeper.put(tensor, label=label)
