"""What is placed on a sharded model: hooks of its units, its blocks' activations, and access to its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from dsrun.config.config import Config
from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.direct_io.configured import io_settings
from dsrun.pipeline_schedules.live import LiveMoment, live_moments

from ...activation.activate import Activations, activate
from ...activation.configured import is_configured, named_generators
from ...memory.pages import give_freed_pages_back
from ...mesh.agree.same import largest
from ...mesh.join.groups import ProcessGroupMesh
from ...optim.sharded import ShardOptimizer
from ...parallel.pipeline.stages import Stages
from ...parallel.tensor.cut import AXIS
from ...parallel.tensor.same_steps import StepWatch
from ...protocols import ChangeFence
from ...zero.access.state_dicts import watch_state_dicts
from ...zero.access.whole import ParamAccess
from ...zero.hooks.modules import UnitHooks
from ...zero.units.leaves import is_leaf
from ..model.schedules import computations
from ..model.sharded import ShardedModel
from ..step import DeferredUpdate
from .start_report import say_once_a_stage


@dataclass(frozen=True, slots=True)
class Hooks:
    """What stands on the module of an engine.

    Attributes:
        units: Hooks that gather parameters and reduce gradients, a unit at a time.
        activations: Treatment of the blocks' activations; None where they are kept.
        access: Whole parameters, masters and states for who asks.
        same: Watch over what ranks that share each layer do; None where none do, or nothing is to be compared.
    """

    units: UnitHooks
    activations: Activations | None
    access: ParamAccess
    same: StepWatch | None


def attach(
    sharded: ShardedModel,
    settings: Config,
    mesh: ProcessGroupMesh,
    *,
    optimizer: ShardOptimizer,
    away: DeferredUpdate | None,
    fence: ChangeFence,
    say: Callable[[str], None],
) -> Hooks:
    """Places hooks on a sharded model; enters the agreement on measured blocks at stage 3.

    Args:
        sharded: the model.
        settings: the config.
        mesh: ranks and device.
        optimizer: sharded optimizer of the master parameters.
        away: the update, where it goes on behind its step.
        fence: fence that keeps state unchanged while a checkpoint copies it.
        say: callback that prints a message once for the whole job, on rank 0.
    """
    axis = mesh.replicas()
    hooks = UnitHooks(sharded.acquired, sharded.store, sharded.reducer)
    agreed = partial(largest, collectives=axis, device=mesh.device, label="measured blocks")
    activations = activate(  # after the units' hooks, which stand within its own
        sharded.module,
        _activation_section(settings),
        skip=is_leaf,
        script_chooses=is_configured(),
        tracker=named_generators(),
        say=say_once_a_stage(mesh, say),
        io=io_settings(settings.aio),
        rank=mesh.info.rank,
        agree=agreed if sharded.plan.shard_parameters else list,
        chunk_of=_chunk_of(sharded.chunks.stages),
        moments=partial(_live_moments, settings, sharded.chunks.stages.rank_of, mesh.pipe.rank),
    )
    access = ParamAccess(
        [*sharded.units, *sharded.frozen],
        sharded.plan,
        axis,
        device=mesh.device,
        store=sharded.store,
        reducer=sharded.reducer,
        optimizer=optimizer,
        running=hooks.running_unit,
        read_released=hooks.read_released,
        settle=lambda: None if away is None else away.settle(),
        fence=fence,
        compares=settings.zero_optimization.enable_sanity_checks,
    )
    access.settle(sharded.module)
    watch_state_dicts(sharded.module)
    give_freed_pages_back()  # of the tensors that the model was built with
    return Hooks(hooks, activations, access, _watch_steps(sharded.module, settings, mesh))


def _watch_steps(model: nn.Module, settings: Config, mesh: ProcessGroupMesh) -> StepWatch | None:
    if mesh.spec.size((AXIS,)) == 1 or not settings.tensor_parallel.check:
        return None
    ranks = mesh.spec.peers(mesh.info.rank, mesh.spec.role_axes("tensor"))
    watch = StepWatch(ranks, mesh.tensor.rank, mesh.device, draws=mesh.spec.stages == 1)
    watch.follow(model)
    return watch


def _chunk_of(stages: Stages) -> Callable[[nn.Module], int]:
    """Returns what tells a module's chunk; of what no chunk says that it has, the one that is held the longest."""
    positions = {
        module: position
        for position, chunk in enumerate(stages.own)
        for part in stages.modules_of(chunk)
        for module in part.modules()
    }
    return lambda module: positions.get(module, 0)


def _live_moments(settings: Config, rank_of: tuple[int, ...], rank: int) -> tuple[LiveMoment, ...]:
    """Returns when most is kept on a rank of the pipeline, for a global batch as the config has it."""
    assert settings.batch is not None, "the config was loaded with a world size"
    schedule = computations(settings.pipeline.schedule_name, rank_of, settings.batch.accumulation_steps)
    return live_moments(schedule, rank)


def _activation_section(settings: Config) -> ActivationCheckpointing:
    """Returns how blocks are recomputed: `pipeline.activation_checkpoint_interval` says it in DeepSpeed's way."""
    section, interval = settings.activation_checkpointing, settings.pipeline.activation_checkpoint_interval
    return section.model_copy(update={"policy": "interval", "interval": interval}) if interval else section
