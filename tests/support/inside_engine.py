"""What tests look at inside an engine: the one place outside of `runtime/engine` that knows its private names."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.runtime.checkpoint.save.saver import Saver
from dsrun.runtime.engine.components import Components
from dsrun.runtime.engine.compose.hooks import Hooks
from dsrun.runtime.engine.engine import Engine
from dsrun.runtime.engine.host.tiers import Tiers
from dsrun.runtime.engine.model.sharded import ShardedModel
from dsrun.runtime.engine.step import DeferredUpdate, StepParts
from dsrun.runtime.engine.update import Update, step_parts
from dsrun.runtime.mesh.join.groups import ProcessGroupMesh
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.zero.params.store import ParamStore
from dsrun.runtime.zero.units.unit import ParamUnit

# pyright: reportPrivateUsage=false


def components_of(engine: Engine) -> Components:
    return engine._components


def records_of(engine: Engine) -> RecordWriter:
    return engine._observation.records


def sharded_of(engine: Engine) -> ShardedModel:
    return engine._sharded


def update_of(engine: Engine) -> Update:
    return engine._update


def hooks_of(engine: Engine) -> Hooks:
    return engine._hooks


def mesh_of(engine: Engine) -> ProcessGroupMesh:
    return engine._mesh


def tiers_of(engine: Engine) -> Tiers:
    return engine._tiers


def units_of(engine: Engine) -> Sequence[ParamUnit]:
    """Units of trained parameters, in order."""
    return engine._sharded.units


def store_of(engine: Engine) -> ParamStore:
    return engine._sharded.store


def deferred_update_of(engine: Engine) -> DeferredUpdate | None:
    """The update that is taken where masters do not lie beside the parameters."""
    return engine._update.away


def shards_of(engine: Engine) -> ShardOptimizer:
    """The optimizer of the masters that this rank owns."""
    return engine._update.shards


def step_of(engine: Engine) -> StepParts:
    """What an optimizer step works on."""
    return step_parts(
        engine._sharded, engine._update, engine._mesh, writes=engine._hooks.access.writes, same=engine._hooks.same
    )


def saver_of(engine: Engine) -> Saver:
    return engine._components.checkpoints._saver


def predicted_bytes(engine: Engine) -> int:
    """Bytes of model state that a rank should hold between steps."""
    return engine._components.memory.predicted_bytes


def predicted_host_bytes(engine: Engine) -> int:
    """Bytes of model state that should lie in host memory, apart from the device's."""
    return engine._components.memory.predicted_host_bytes
