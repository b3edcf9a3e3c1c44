"""What an engine holds of its rank's memory, counted and reported. How peaks are found: `observe/memory_watch.py`."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import optim

from ..checkpoint.save.saver import Saver
from ..memory.arenas import ArenaReport, OutsideUse
from ..mesh.join.groups import ProcessGroupMesh
from ..observe.memory import StatePrediction, measure
from ..offload.params.on_disk import DiskShards
from ..zero.partition_parameters import memory_of
from ..zero.units.trained import is_trained
from .host.tiers import Tiers
from .model.sharded import ShardedModel
from .offload_states import OffloadedStates
from .saving.memory_copies import CopiesInMemory
from .update import Update

#: What asynchronous saves copy state to; in host memory, wherever the model computes.
_COPY = "copy of a checkpoint"
#: What `offload_states` copies to next time; page-locked, which only accelerators want.
_SPARE = "kept for states that leave"


class MemoryQueries:
    """What an engine says of its rank's memory; enters no collective.

    Args:
        mesh: Device that training uses.
        tiers: Arenas of the long-lived buffers.
        sharded: The model.
        update: The optimizer and its states.
        predicted: Model state of this rank between steps, as predicted.
        saver: Writer of checkpoints, which may hold a copy of the state.
        copies: Copies in memory.
        states: States that are in host memory for a while.

    Attributes:
        predicted_bytes: Bytes of model state that this rank should hold now.
        predicted_host_bytes: Bytes of them that should lie in host memory apart from the device's.
    """

    def __init__(
        self,
        mesh: ProcessGroupMesh,
        tiers: Tiers,
        sharded: ShardedModel,
        update: Update,
        predicted: StatePrediction,
        *,
        saver: Saver,
        copies: CopiesInMemory,
        states: OffloadedStates,
    ) -> None:
        self._mesh = mesh
        self._arenas = tiers.memory
        self._sharded = sharded
        self._update = update
        self._saver = saver
        self._copies = copies
        self._states = states
        self.expect(predicted)

    def expect(self, predicted: StatePrediction) -> None:
        """Takes over what is predicted from now on: units have moved."""
        self.predicted_bytes = predicted.total_bytes()
        self.predicted_host_bytes = predicted.host_bytes()

    def state_bytes(self) -> int:
        """Returns the bytes of model state that this rank holds now, see `Engine.model_state_bytes`."""
        units = [*self._sharded.units, *self._sharded.frozen]
        buffers = [t for u in units for t in (u.flat_param, u.flat_grad, u.shard, u.grad_sum)]
        buffers += [t for u in units for t in ([u.master] if u.halves is None else u.halves.buffers())]
        buffers += [*self._sharded.reducer.summed_here(), *self._sharded.chunks.ties.buffers()]
        tiers = {id(u.tier): u.tier for u in units if isinstance(u.tier, DiskShards)}.values()
        buffers += [t for tier in tiers for t in tier.buffers()]
        windows = {id(u.window): u.window for u in units if u.window is not None}.values()
        buffers += [t for window in windows for t in (window.grad, window.master) if t is not None]
        buffers += [memory_of(param) for param in self._sharded.module.parameters() if not is_trained(param)]
        states = [] if self._update.optimizer is None else self._update.shards.tensors()
        away = [] if self._update.away is None else self._update.away.buffers()
        return measure(t for t in (*buffers, *states, *away) if self._arenas.takes_memory(t))

    def arenas(self) -> ArenaReport:
        """Returns the arenas and what lies outside of them, see `Engine.memory_arenas`."""
        module = self._sharded.module
        held = {
            "frozen parameters": [param for param in module.parameters() if not is_trained(param)],
            "module buffers": list(module.buffers()),
            "other optimizer states": [] if self._update.optimizer is None else self._update.shards.tensors(),
        }
        outside = {name: measure(t for t in tensors if not self._arenas.holds(t)) for name, tensors in held.items()}
        outside[_COPY] = self._saver.staged_bytes
        outside[_SPARE] = self._states.spare_bytes
        return self._arenas.report([OutsideUse(name, nbytes) for name, nbytes in outside.items() if nbytes])

    def kinds(self) -> tuple[tuple[str, int], ...]:
        """Returns names and bytes of what is held for long where the model computes: on a CPU, the host's part too."""
        report = self.arenas()
        on_cpu = self._mesh.device.type == "cpu"
        counted = ("device", "host") if on_cpu else ("device",)
        inside = [(use.name, use.reserved_bytes) for use in report.arenas if use.tier in counted]
        outside = [(use.name, use.used_bytes) for use in report.outside if on_cpu or use.name not in (_COPY, _SPARE)]
        copies = self._copies.held_bytes if on_cpu else 0
        kept = [("copies in memory", copies)] if copies else []
        return (*inside, *outside, *kept)


def prediction_follower(queries: MemoryQueries, optimizer: optim.Optimizer | None) -> Callable[[ShardedModel], None]:
    """Returns a function that has `queries` expect what a changed model needs; it does not keep `queries` alive.

    Args:
        queries: Comparison of what is held with what was predicted.
        optimizer: Optimizer whose states come with the units.
    """
    weakly = ref(queries)

    def follow(sharded: ShardedModel) -> None:
        found = weakly()
        if found is not None:
            found.expect(sharded.prediction(optimizer))

    return follow
