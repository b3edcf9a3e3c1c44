"""What became of a model's parameters, as one value; `shard.py` makes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn, optim

from dsrun.choices.gather_plan import GatherPlan
from dsrun.config.config import Config

from ...observe.memory import HostOptimizer, StatePrediction
from ...offload.disk.states import DiskStates
from ...offload.host_gradients import HostGradients
from ...offload.params.on_disk import DiskShards
from ...optim.registry import states_per_element
from ...optim.states.format import STATE_FORMATS
from ...precision.fp32_modules import Fp32Modules
from ...precision.policy import PrecisionPolicy
from ...zero.creation.frozen import whole_bytes
from ...zero.grads.reducer import GradReducer
from ...zero.grads.sums import GradSums, ResidentSums, SplitSums
from ...zero.params.store import ParamStore
from ...zero.units.plan import ZeroPlan
from ...zero.units.unit import ParamUnit
from .stages import CutModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """What became of a model's parameters.

    Attributes:
        chunks: the model's chunks on this rank.
        module: the model; its parameters are views of the units' buffers.
        plan: plan of what is sharded.
        precision: dtypes of parameters and masters.
        units: units of trained parameters, in order.
        acquired: units that forward gathers, of trained parameters or frozen ones.
        frozen: units of frozen parameters; empty where every rank has them whole.
        gathering: plan of the parameters that stay gathered, and of the slots that the others share in turn.
        store: parameter store, which holds a unit's parameters while they are used.
        reducer: reducer of the units' gradients.
        kept: parameters and buffers of a 16-bit model that stay in fp32.
        settings: the config, with numbers for sizes that were `"auto"` and go by the model's width.
        leaving: trained units that are stepped in host memory, in order; `away` and `disk` know them by their position.
        gradients_of: function that makes a new `away` for the units it gets; None where none are stepped in host
            memory.
        away: gradients on their way to the optimizer, where that steps in host memory; None: it steps on the device.
        disk: masters and optimizer states on a disk; None where they lie in memory.
    """

    chunks: CutModel
    module: nn.Module
    plan: ZeroPlan
    precision: PrecisionPolicy
    units: Sequence[ParamUnit]
    acquired: Sequence[ParamUnit]
    frozen: Sequence[ParamUnit]
    gathering: GatherPlan
    store: ParamStore
    reducer: GradReducer
    settings: Config
    kept: Fp32Modules
    leaving: Sequence[ParamUnit]
    gradients_of: Callable[[Sequence[ParamUnit]], HostGradients | None]
    away: HostGradients | None
    disk: DiskStates | None

    def without(self, moved: Collection[int]) -> ShardedModel:
        """Returns the model with fewer units that leave; gradients go where they are wanted from now on.

        Args:
            moved: numbers of units whose masters are on the device now; between steps.
        """
        leaving = [unit for unit in self.leaving if unit.index not in moved]
        away = self.gradients_of(leaving)
        self.reducer.sums = ResidentSums(self.units) if away is None else sums_of(self.units, leaving, away)
        return replace(self, leaving=leaving, away=away)

    def prediction(self, optimizer: optim.Optimizer | None) -> StatePrediction:
        """Predicts the model state that a rank holds between steps.

        Args:
            optimizer: optimizer with the states to count; None for an engine that only evaluates.
        """
        return StatePrediction(
            layouts=[unit.layout for unit in self.units],
            has_module=[unit.module is not None for unit in self.units],
            compute=self.precision.compute,
            master=self.precision.master,
            sums=self.precision.sums,
            states=self.precision.states,
            states_per_element=states_per_element(optimizer),
            shard_optimizer=self.plan.shard_optimizer,
            shard_gradients=self.plan.shard_gradients,
            shard_parameters=self.plan.shard_parameters,
            gathering=self.gathering,
            frozen_layouts=[unit.layout for unit in self.frozen],
            whole_frozen_bytes=whole_bytes(self.module, cut=self.frozen),
            trained_on_host=any(unit.tier is not None for unit in self.units),
            frozen_on_host=any(unit.tier is not None for unit in self.frozen),
            host_optimizer=self._host_optimizer(),
            slice_bytes=None if self.slices_on_disk is None else self.slices_on_disk.host_bytes(),
            kept=[unit.dtype != self.precision.compute for unit in self.units],
            summed_here_bytes=self.reducer.bytes_summed_here + sum(one.nbytes for one in self.chunks.ties.buffers()),
        )

    @property
    def slices_on_disk(self) -> DiskShards | None:
        """What has slices of parameters on a disk; None where none are there."""
        tiers = (unit.tier for unit in (*self.units, *self.frozen))
        return next((tier for tier in tiers if isinstance(tier, DiskShards) and tier.has_files), None)

    def _host_optimizer(self) -> HostOptimizer | None:
        away = self.away
        if away is None:
            return None
        frames = None if self.disk is None else sum(memory.nbytes for memory in self.disk.buffers())
        return HostOptimizer(
            away.travels,
            adds_up=away.accumulates,
            widens=away.widens,
            frame_bytes=frames,
            stays=[not unit.steps_on_host for unit in self.units],
            form=STATE_FORMATS[self.settings.zero_optimization.offload_optimizer.state_format],
            splits=any(unit.halves is not None for unit in self.units),
            ahead=away.ahead,
        )


def sums_of(units: Sequence[ParamUnit], leaving: Sequence[ParamUnit], away: HostGradients) -> GradSums:
    """Returns where all units' sums go."""
    positions = {unit.index: position for position, unit in enumerate(leaving)}
    return away if len(leaving) == len(units) else SplitSums(units, away, positions)
