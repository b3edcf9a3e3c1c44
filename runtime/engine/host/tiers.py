"""All memory that an engine keeps state in, as one value: the device's, the host's and drives, and the ways between.

What goes where is decided by the config and, for units that may stay on the device, by `residency.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dsrun.config.config import Config

from ...memory.arenas import Arenas
from ...memory.bus import Bus, bus_for
from ...memory.host_pool import Say
from ...mesh.join.groups import ProcessGroupMesh
from ...offload.disk.states import DiskStates
from ...offload.states.split_masters import SplitMasters
from ...precision.policy import PrecisionPolicy
from ..compose.optimizer import OptimizerLike
from .build import host_tier
from .disk import foreseen_states, states_on_disk, tell_of_drives
from .residency import ChunkOf, ResidencyPolicy, looks_again
from .tier import HostTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Where state may live.

    Attributes:
        memory: Arenas of the long-lived buffers.
        bus: Copies between the device and its host's memory, counted.
        host: Host memory that masters go to; None: they stay on the device.
        disk: Drive that masters and optimizer states go on to; None: they stay in host memory.
        halves: Place of the masters' lower halves, where the upper ones are parameters in host memory; None: masters
            are whole.
        residency: Decision which masters stay on the device although there is a place for them elsewhere; None where
            there is no such place.
        moves: Whether masters in host memory may come to the device after some steps.
    """

    memory: Arenas
    bus: Bus
    host: HostTier | None
    disk: DiskStates | None
    halves: SplitMasters | None
    residency: ResidencyPolicy | None
    moves: bool


def open_tiers(
    model: nn.Module,
    settings: Config,
    mesh: ProcessGroupMesh,
    optimizer: OptimizerLike | None,
    *,
    chunk_of: ChunkOf,
    precision: PrecisionPolicy,
    say: Say,
) -> Tiers:
    """Returns the memory that the config puts state into; nothing is reserved yet.

    Args:
        model: the model whose units will be placed.
        settings: the config.
        mesh: ranks and device.
        optimizer: the script's, if it gave one.
        chunk_of: function that returns the chunks of units; see `ResidencyPolicy`.
        precision: dtypes of parameters and masters.
        say: callback that prints a message once for the whole job, on rank 0.

    Raises:
        OffloadError: no file can be made in a path.
    """
    memory = Arenas()
    bus = bus_for(mesh.device)
    host = host_tier(settings, mesh.device, bus, say=say)
    tell_of_drives(settings, say)
    zero = settings.zero_optimization
    splits = settings.cutting_stage == 3 and zero.offload_optimizer.split_master
    disk = states_on_disk(settings, optimizer, memory, rank=mesh.info.rank)
    residency = None
    if host is not None:
        residency = ResidencyPolicy(
            model,
            settings,
            mesh,
            precision=precision,
            states=foreseen_states(settings, optimizer),
            bus=bus,
            pool=host.pool,
            chunk_of=chunk_of,
            say=say,
        )
    return Tiers(
        memory=memory,
        bus=bus,
        host=host,
        disk=disk,
        halves=None if host is None or not splits else SplitMasters(memory, host.pool_of(copied=False)),
        residency=residency,
        moves=looks_again(settings),
    )
