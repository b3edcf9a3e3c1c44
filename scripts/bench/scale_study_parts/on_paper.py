"""All that a job of 4,096 ranks is, counted: grid, groups, schedule, bytes and memory. It needs no torch."""

from __future__ import annotations

import sys
import time
from typing import Any

from dsrun.config.axes import divide
from dsrun.estimate.memory.model_state import pad_units, state_bytes
from dsrun.estimate.model.stages import cut_into_stages
from dsrun.estimate.time.axes import axis_traffic
from dsrun.estimate.time.pipeline import pipeline_estimate, schedule_of
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.simulate import equal_costs, simulate
from dsrun.pipeline_schedules.validate import validate
from dsrun.pipeline_schedules.zero_actions import with_zero

from .predictions import MODEL, PAPER_RANKS, llama3_settings, machine_of

#: Groups of a pipeline's messages under NCCL, all ranks in one call each: activations and gradients, either way. See
#: `make_links` in runtime/mesh/point_to_point/make.py.
_LANES = 4


def counted() -> dict[str, Any]:
    """Returns what was counted, and what counting took of time and memory from the begin of the process on."""
    settings = llama3_settings(64)
    spec = divide(PAPER_RANKS, settings.axis_sizes)
    groups = {view: spec.groups(view) for view in spec.views() if view}
    group_of = {view: {rank: group for group in found for rank in group} for view, found in groups.items()}
    schedule = with_zero(with_communication(schedule_of(settings)), parameters="never")
    validate(schedule, capacity=1)
    seconds = simulate(schedule, equal_costs(schedule.chunks)).seconds
    stages = cut_into_stages(MODEL, settings)
    pipeline = pipeline_estimate(stages, settings)
    assert pipeline is not None
    machine = machine_of("H200-141G", PAPER_RANKS, 5e14)
    moved: list[dict[str, int]] = []
    held: list[int] = []
    for stage, estimate in zip(stages, pipeline.stages, strict=True):
        units = pad_units(stage.model.units, settings.ranks_of("shard", PAPER_RANKS), tensor_parallel=8, by_block=True)
        traffic = axis_traffic(stage, units, settings, machine, boundary_bytes=estimate.sent_bytes)
        moved.append({f"{axis.name} {axis.ranks}": axis.sent_bytes for axis in traffic})
        held.append(state_bytes(units, settings).total)
    return {
        "ranks": spec.world_size,
        "groups": sum(map(len, groups.values())),
        "ranks with all groups": sum(all(rank in found for found in group_of.values()) for rank in range(PAPER_RANKS)),
        "group calls": _group_calls(spec.views(), spec.replica_views(), spec.role_axes("world")),
        "actions": sum(map(len, schedule.actions)),
        "units of time": seconds,
        "bytes of stages": moved,
        "state of stages": held,
        "seconds": time.process_time(),
        "megabytes": _most_memory_mb(),
        "torch": "torch" in sys.modules,
    }


def _most_memory_mb() -> float:
    """Returns the most memory that this program has held; `ru_maxrss` is the parent's too, for it outlives an exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        (kilobytes,) = (line.split()[1] for line in status if line.startswith("VmHWM:"))
    return int(kilobytes) / 1024


def _group_calls(views: list[tuple[str, ...]], replicas: list[tuple[str, ...]], axes: tuple[str, ...]) -> int:
    """Returns the calls that all ranks make together under NCCL: views, reductions beside gathers, messages.

    The world's group is there already. See `make_mesh` and `separate_reductions` in runtime/mesh/join/groups.py.
    """
    world = max(views, key=len)
    assert set(world) <= set(axes)
    own = [view for view in views if view and view != world]
    return len(own) + sum(bool(view) for view in replicas) + _LANES
