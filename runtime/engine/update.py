"""The update of a sharded model put together: its optimizer, the schedule, and where the step is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import optim

from dsrun.config.config import Config

from ..mesh.join.groups import ProcessGroupMesh
from ..mesh.spec import DATA_AXIS
from ..optim.sharded import ShardOptimizer
from ..optim.states.format import FP32_STATES, STATE_FORMATS
from ..protocols import ChangeFence
from .compose.optimizer import make_optimizer, make_scheduler
from .compose.request import Request
from .host.build import update_on_host
from .host.migration import moving_update
from .host.tiers import Tiers
from .parts import Scheduler
from .sharded_model import ShardedModel
from .step import UpdateAway


@dataclass(frozen=True, slots=True)
class Update:
    """What changes the parameters.

    Attributes:
        shards: Optimizer of the masters that this rank owns.
        optimizer: torch's, over the shards; None for an engine that only evaluates.
        scheduler: Schedule that is stepped after each applied update.
        away: Update that is taken where masters do not lie beside the parameters; None: they do.
    """

    shards: ShardOptimizer
    optimizer: optim.Optimizer | None
    scheduler: Scheduler | None
    away: UpdateAway | None


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
        tiers: where masters and states live.
        fence: keeps state as it is while a checkpoint copies it.
        say: says something once for the whole job.

    Raises:
        ModelError: optimizer, schedule and model do not go together.
    """
    shards = ShardOptimizer(
        [unit.owned_range(request.assignment.group_of) for unit in sharded.units],
        group_count=len(request.assignment.options),
        axis=mesh.axes[DATA_AXIS] if sharded.plan.shard_optimizer else None,
        stays=[not unit.is_away for unit in sharded.units],
        fence=fence,
    )
    optimizer = make_optimizer(request.optimizer, shards, settings, request.assignment)
    away = None
    if optimizer is not None:
        _house_states(shards, settings, sharded, tiers)
        away = _update_away(shards, settings, mesh, sharded, tiers, fence=fence, say=say)
    return Update(shards, optimizer, make_scheduler(request.lr_scheduler, optimizer, settings), away)


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
) -> UpdateAway | None:
    """Returns the update of units whose masters have left the device; None where none have."""
    if tiers.host is None or tiers.residency is None or not sharded.leaving:
        return None
    on_host = partial(
        update_on_host,
        optimizer=shards,
        host=tiers.host,
        collectives=mesh.axes[DATA_AXIS],
        settings=settings,
        memory=tiers.memory,
        say=say,
        fence=fence,
    )
    if not tiers.moves:
        return on_host(sharded)
    return moving_update(sharded, tiers.residency, shards, tiers.memory, tiers.bus, on_host)
