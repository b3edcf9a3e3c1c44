"""The update of a sharded model put together: its optimizer, the schedule, and where the step is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import optim

from dsrun.config.config import Config

from ..mesh.join.groups import ProcessGroupMesh
from ..optim.sharded import ShardOptimizer
from ..optim.states.format import FP32_STATES, STATE_FORMATS
from ..parallel.tensor.same_steps import StepWatch
from ..precision.configured import loss_scale_of, skips_non_finite
from ..precision.loss_scale import LossScale
from ..protocols import ChangeFence, Scheduler
from ..zero.access.script_writes import ScriptWrites
from .compose.optimizer import make_optimizer, make_scheduler
from .compose.request import Request
from .host.build import update_on_host
from .host.migration import moving_update
from .host.tiers import Tiers
from .model.sharded import ShardedModel
from .step import DeferredUpdate, StepParts, spread_of


@dataclass(slots=True, kw_only=True)
class Update:
    """What changes the parameters. A script may give its engine another schedule, or take the optimizer away.

    Attributes:
        shards: Optimizer of the masters that this rank owns.
        optimizer: torch's, over the shards; None for an engine that only evaluates.
        scheduler: Schedule that is stepped after each applied update.
        away: Update that is taken where masters do not lie beside the parameters; None: they do.
        loss_scale: Factor of losses before their backward.
        clipping: Largest norm of the gradients of all ranks; 0 for none.
        skip_non_finite: Whether an update is left out where a gradient is inf or nan.
        is_scripts: Whether the script has given the optimizer, or a function that makes it; else the config has.
    """

    shards: ShardOptimizer
    optimizer: optim.Optimizer | None
    scheduler: Scheduler | None
    away: DeferredUpdate | None
    loss_scale: LossScale
    clipping: float
    skip_non_finite: bool
    is_scripts: bool = False

    def learning_rates(self) -> list[float]:
        """Returns the learning rate of each group; none where there is no optimizer."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]


def make_update(
    request: Request,
    settings: Config,
    mesh: ProcessGroupMesh,
    sharded: ShardedModel,
    tiers: Tiers,
    *,
    fence: ChangeFence,
    say: Callable[[str], None],
) -> Update:
    """Returns what changes the parameters; states get their places.

    Args:
        request: the script's optimizer and schedule, and the groups of parameters.
        settings: the config.
        mesh: ranks that the optimizer is sharded over.
        sharded: the model.
        tiers: memory of the device, the host and drives that masters and states live in.
        fence: fence that keeps state unchanged while a checkpoint copies it.
        say: callback that prints a message once for the whole job, on rank 0.

    Raises:
        ModelError: optimizer, schedule and model do not go together.
    """
    shards = ShardOptimizer(
        [unit.owned_range(request.assignment.group_of) for unit in sharded.units],
        group_count=len(request.assignment.options),
        axis=mesh.replicas() if sharded.plan.shard_optimizer else None,
        stays=[not unit.steps_on_host for unit in sharded.units],
        fence=fence,
    )
    optimizer = make_optimizer(request.optimizer, shards, settings, request.assignment)
    away = None
    if optimizer is not None:
        _house_states(shards, settings, sharded, tiers)
        away = _update_away(shards, settings, mesh, sharded, tiers, fence=fence, say=say)
    return Update(
        shards=shards,
        optimizer=optimizer,
        scheduler=make_scheduler(request.lr_scheduler, optimizer, settings),
        away=away,
        loss_scale=loss_scale_of(settings),
        clipping=settings.gradient_clipping,
        skip_non_finite=skips_non_finite(settings),
        is_scripts=request.optimizer is not None,
    )


def step_parts(
    sharded: ShardedModel,
    update: Update,
    mesh: ProcessGroupMesh,
    *,
    writes: ScriptWrites,
    same: StepWatch | None,
) -> StepParts:
    """Returns what an optimizer step works on; every rank must call, see `spread_of`.

    Args:
        sharded: the model.
        update: the optimizer of its masters.
        mesh: ranks that state is cut over.
        writes: values that the script writes to parameters.
        same: watch over what ranks that share each layer do; None for none.
    """
    return StepParts(
        units=sharded.units,
        plan=sharded.plan,
        world=mesh.world,
        spread=spread_of(sharded.units, sharded.plan, mesh.world, stages=mesh.spec.stages, device=mesh.device),
        pipeline=(mesh.spec.stage_of(mesh.info.rank), mesh.spec.stages),
        device=mesh.device,
        reducer=sharded.reducer,
        optimizer=update.shards,
        store=sharded.store,
        writes=writes,
        away=update.away,
        same=same,
    )


def _house_states(shards: ShardOptimizer, settings: Config, sharded: ShardedModel, tiers: Tiers) -> None:
    host = tiers.host if sharded.leaving else None
    form = STATE_FORMATS[settings.zero_optimization.offload_optimizer.state_format]
    shards.house_states(
        tiers.memory,
        None if host is None else host.pool_of(copied=False),
        away=sharded.disk,
        form=form if sharded.leaving else FP32_STATES,
        moves=tiers.moves,
    )


def _update_away(
    shards: ShardOptimizer,
    settings: Config,
    mesh: ProcessGroupMesh,
    sharded: ShardedModel,
    tiers: Tiers,
    *,
    fence: ChangeFence,
    say: Callable[[str], None],
) -> DeferredUpdate | None:
    """Returns the update of units whose masters have left the device; None where none have."""
    if tiers.host is None or tiers.residency is None or not sharded.leaving:
        return None
    on_host = partial(
        update_on_host,
        optimizer=shards,
        host=tiers.host,
        settings=settings,
        memory=tiers.memory,
        say=say,
        fence=fence,
    )
    if not tiers.moves:
        return on_host(sharded)
    return moving_update(sharded, tiers.residency, shards, tiers.memory, tiers.bus, on_host)
