"""An optimizer in host memory put together, as the config's `offload_optimizer` says: memory, the way there, the step.

What each part does stands in `offload`; who waits for what, in `update.py`; which units stay on the device all the
same, in `residency.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dsrun.config.config import Config
from dsrun.errors import ModelError

from ...memory.arenas import Arenas
from ...memory.bus import Bus
from ...memory.host_pool import host_pool_for
from ...offload.ahead.double_buffer import DoubleBuffer
from ...offload.params.on_disk import DiskShards
from ...offload.states.host_range import HostRange
from ...offload.states.split_masters import UnitHalves
from ...offload.step.cpu_optimizer import CpuOptimizer, share_of_cores
from ...offload.step.ways import BlockStep, block_step_for
from ...optim.registry import states_per_element
from ...optim.sharded import ShardOptimizer
from ...optim.structure.base import StructuredOptimizer
from ...protocols import ChangeFence
from ..model.sharded import ShardedModel
from .tier import HostTier
from .update import OffloadedUpdate


def host_tier(settings: Config, device: torch.device, bus: Bus, *, say: Callable[[str], None]) -> HostTier | None:
    """Returns the host memory that the config puts the optimizer into; None where it stays on the device.

    Args:
        settings: the config.
        device: device that the model computes on.
        bus: bus that copies between the device and its host's memory.
        say: callback that prints a message once for the whole job, on rank 0.
    """
    section = settings.zero_optimization.offload_optimizer
    if section.device == "none":
        return None
    return HostTier(host_pool_for(device, pin=section.pin_memory, say=say), bus)


def update_on_host(
    sharded: ShardedModel,
    optimizer: ShardOptimizer,
    host: HostTier,
    *,
    settings: Config,
    memory: Arenas,
    say: Callable[[str], None],
    fence: ChangeFence | None = None,
    timed: Callable[[BlockStep], BlockStep] | None = None,
) -> OffloadedUpdate:
    """Returns the update of a model of which masters lie in host memory, of all units or some.

    Args:
        sharded: the model, with its gradients on their way there.
        optimizer: sharded optimizer that drives torch's optimizer.
        host: the memory.
        settings: the config.
        memory: arenas that buffers are reserved in.
        say: callback that prints a message once for the whole job, on rank 0.
        fence: fence that keeps ranges unchanged while a checkpoint copies them; None where nothing does.
        timed: function that wraps a `BlockStep` in one that counts the time of each range's step; None where nobody
            counts it.

    Raises:
        ModelError: the optimizer needs whole tensors, which no rank's host memory has.
    """
    assert sharded.away is not None, "the model was cut for it"
    assert optimizer.torch_optimizer is not None, "an engine without one has nothing to update"
    if isinstance(optimizer.torch_optimizer, StructuredOptimizer):
        raise ModelError(
            f"optimizer: {type(optimizer.torch_optimizer).__name__} needs whole tensors, and "
            "`zero_optimization.offload_optimizer` steps flat ranges in host memory",
            hint="choose an elementwise optimizer (AdamW, Lion, SGD), or set `offload_optimizer.device` to none",
        )
    sinks = [unit.tier.sink_of(unit.index) if isinstance(unit.tier, DiskShards) else None for unit in sharded.leaving]
    ranges = [
        HostRange(
            label=unit.label,
            runs=optimizer.runs_of(unit.index),
            master_N=unit.master,
            halves=unit.halves if isinstance(unit.halves, UnitHalves) else None,
            target_N=unit.shard,
            stays=unit.tier is not None and sink is None,
            sink=sink,
        )
        for unit, sink in zip(sharded.leaving, sinks, strict=True)
    ]
    section = settings.zero_optimization.offload_optimizer
    second = None
    if section.super_offload:
        second = DoubleBuffer(
            ranges,
            [math.ceil(states_per_element(optimizer.torch_optimizer))] * len(ranges),
            state_dtype=torch.float32,
            copied=host.pool,
            own=host.pool_of(copied=False),
            memory=memory,
        )
    block_step = block_step_for(optimizer.torch_optimizer)
    steps = CpuOptimizer(
        ranges,
        optimizer,
        sharded.away,
        block_step if timed is None else timed(block_step),
        order=range(len(ranges)),
        bus=host.bus,
        pool=host.pool,
        memory=memory,
        cores=share_of_cores(section.cpuadam_cores_perc),
        keeper=sharded.disk,
        second=second,
        say=say,
        before_change=None if fence is None else lambda position: fence.wait(sharded.leaving[position].index),
    )
    update = OffloadedUpdate(
        sharded.units,
        sharded.plan,
        sharded.reducer,
        sharded.store,
        steps,
        overlaps=True,
        leaving=sharded.leaving,
    )

    def settle(*_: object) -> None:
        update.settle()

    # Whoever asks for the states reads them, or puts others in their place.
    optimizer.torch_optimizer.register_state_dict_pre_hook(settle)
    optimizer.torch_optimizer.register_load_state_dict_pre_hook(settle)
    return update
