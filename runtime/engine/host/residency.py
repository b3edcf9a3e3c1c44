"""Which units keep their masters and states on the device, where an optimizer in host memory leaves room for some.

Only whose they are is decided here, on all ranks alike; where each kind lies is `engine/shard.py`'s and the optimizer's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dsrun.choices.gather_plan import LEAVING_COUNT, leaving_numel
from dsrun.choices.resident_units import room_at_ratio, units_that_stay
from dsrun.config.buckets import gather_budgets, resolve_buckets
from dsrun.config.config import Config
from dsrun.direct_io.configured import io_settings
from dsrun.units import format_bytes, format_count, format_duration

from ...memory.bus import Bus
from ...memory.host_pool import HostPool, available_bytes
from ...memory.room import free_bytes
from ...mesh.agree.same import largest
from ...mesh.collectives import Collectives
from ...mesh.join.groups import ProcessGroupMesh
from ...observe.memory import HostOptimizer, StatePrediction
from ...offload.place.speeds import measure_buses
from ...offload.place.tiers import AllowedTiers, Budgets, Buses, ElementBytes, Tier, UnitSize, place
from ...precision.policy import DTYPES, PrecisionPolicy
from ...zero.params.slots import turns_of
from ...zero.units.plan import ZeroPlan
from ...zero.units.trained import is_trained
from ...zero.units.unit import ParamUnit
from ..compose.describe import hidden_size
from .step_watch import ObservedSteps

#: Share of what was free at the peak of some steps that is filled then: later ones may need a little more.
_FILLED = 0.9
#: Says of units that are laid out whether each stays; alike on every rank.
Stays = Callable[[Sequence[ParamUnit]], Sequence[bool]]
Say = Callable[[str], None]
#: Returns the position of the chunk of each unit, by its index; None where it is units that take turns.
ChunkOf = Callable[[Sequence[ParamUnit]], Mapping[int, int] | None]

_NO_BUDGET = (
    'dsrun: `offload_optimizer.ratio` is "auto", and ranks on the CPU have no memory of their own to fill: all masters '
    "and optimizer states leave; `offload_placement.device_memory` says how much may stay"
)


def looks_again(settings: Config) -> bool:
    """Whether units may come to the device after some steps, see `ResidencyPolicy.reconsider`."""
    zero = settings.zero_optimization
    return zero.offload_optimizer.ratio == "auto" and zero.offload_placement.remeasure_after is not None


class ResidencyPolicy:
    """Decides by the config, once units are laid out, and says what came of it where only a part leaves.

    Args:
        model: model that the units belong to.
        settings: the config, whose optimizer leaves the device.
        mesh: ranks and device.
        precision: dtypes of parameters and masters.
        states: optimizer states of each element.
        bus: bus that copies between the device and its host's memory.
        pool: pool of the host memory that optimizer states move to.
        chunk_of: function that returns the chunks of units, where chunks take turns in memory; see `turns_of`.
        say: callback that prints a message once for the whole job, on rank 0.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Config,
        mesh: ProcessGroupMesh,
        *,
        precision: PrecisionPolicy,
        states: int,
        bus: Bus,
        pool: HostPool,
        chunk_of: ChunkOf,
        say: Say,
    ) -> None:
        self._chunk_of = chunk_of
        self._model = model
        self._settings = settings
        self._mesh = mesh
        self._precision = precision
        self._states = states
        self._bus = bus
        self._pool = pool
        self._say = say
        self._buses = Buses()
        self._plan = ZeroPlan.of_stage(settings.cutting_stage)

    @property
    def collectives(self) -> Collectives:
        """All ranks of the job: they place the same units."""
        return self._mesh.world

    def __call__(self, units: Sequence[ParamUnit]) -> Sequence[bool]:
        """See `Stays`; with "auto" one all-reduce of a few numbers, after measuring.

        Raises:
            OffloadError: a drive that states shall go to cannot be read or written.
        """
        ratio = self._settings.zero_optimization.offload_optimizer.ratio
        numels = [unit.layout.shard_numel for unit in units]
        modules = [unit.module is not None for unit in units]
        if ratio == "auto":
            room, buses = self._agreed(self._room(units), self._measure())
            stays = units_that_stay(numels, modules, room)
        else:
            buses = Buses()
            stays = units_that_stay(numels, modules, room_at_ratio(numels, ratio))
        self._buses = buses
        if ratio == "auto" or any(stays) != all(stays):
            self._tell(units, stays, f"placement of {len(units)} units")
        return stays

    def reconsider(self, units: Sequence[ParamUnit], observed: ObservedSteps, *, held_bytes: int) -> Sequence[bool]:
        """Decides anew after some steps, and says what was observed: units come to the device as far as there is room.

        One all-reduce of a few numbers; every rank must call, between steps.

        Args:
            units: all units.
            observed: mean times of the steps so far.
            held_bytes: bytes of the arenas on the device.
        """
        mine = int(self._free_bytes(held_bytes) * _FILLED // self._each)
        least, seconds, waited, stepping = largest(
            [-mine, observed.seconds, observed.waited, observed.stepping],
            collectives=self.collectives,
            device=self._mesh.device,
            label="room and seconds of steps",
        )
        room = -int(least)
        self._say(
            f"dsrun: after {observed.steps} updates: {format_duration(seconds)} each, of which "
            f"{format_duration(waited)} waited for the update; the host stepped for {format_duration(stepping)}"
        )
        before = [not unit.steps_on_host for unit in units]
        leaving = [unit for unit in units if unit.steps_on_host]
        come = units_that_stay(
            [unit.layout.shard_numel for unit in leaving], [unit.module is not None for unit in leaving], room
        )
        names = [unit.name for unit, one in zip(leaving, come, strict=True) if one]
        coming = {unit.index for unit, one in zip(leaving, come, strict=True) if one}
        after = [stays or unit.index in coming for unit, stays in zip(units, before, strict=True)]
        if not names:
            self._say(f"dsrun: no unit comes to the device: there was room for {format_count(room)} elements")
            return after
        moved = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        numel = sum(unit.layout.shard_numel for unit in leaving)
        if stepping:
            self._buses = replace(self._buses, host=numel * self._bytes_of().host_pass / stepping)
        self._tell(
            units,
            after,
            f"{moved} come to the device, where {format_count(room)} elements have room",
            compute_s=max(0.0, seconds - waited),
        )
        return after

    def _free_bytes(self, held_bytes: int) -> int:
        """Returns what was free on the device at the peak; of a budget, what nothing was reserved of."""
        budget = self._settings.zero_optimization.offload_placement.device_memory
        if budget is not None:
            return max(0, budget - held_bytes)
        device = self._mesh.device
        if device.type == "cpu":
            return 0
        return free_bytes(device, at_peak=True)

    def _agreed(self, room: int, buses: Buses) -> tuple[int, Buses]:
        """Returns the least room of any rank, and the slowest buses."""
        mine = (room, buses.out, buses.back, buses.host, buses.disk_read, buses.disk_write)
        found = largest(
            [-(one or 0.0) for one in mine],
            collectives=self.collectives,
            device=self._mesh.device,
            label="room and buses",
        )
        least = [-one or None for one in found]
        return int(least[0] or 0), Buses(
            out=least[1], back=least[2], host=least[3], disk_read=least[4], disk_write=least[5]
        )

    def _measure(self) -> Buses:
        section = self._settings.zero_optimization.offload_optimizer
        drives = section.nvme_path if section.device == "nvme" else ()
        io = io_settings(self._settings.aio)
        return measure_buses(self._bus, self._pool, self._mesh.device, drives=drives or (), io=io)

    def _room(self, units: Sequence[ParamUnit]) -> int:
        """Returns the elements for whose masters, states and sums the device has room beside all else of a model."""
        budget = self._device_bytes()
        if budget is None:
            self._say(_NO_BUDGET)
            return 0
        return max(0, int((budget - self._needed(units)) // self._each))

    @property
    def _each(self) -> float:
        """Bytes of an element that stays; in fp32 it is its own master, in the slices that would leave."""
        return self._bytes_of().owned + (self._precision.compute.itemsize if self._masters_in_slices else 0)

    def _device_bytes(self) -> int | None:
        section = self._settings.zero_optimization.offload_placement
        if section.device_memory is not None:
            return section.device_memory
        device = self._mesh.device
        if device.type == "cpu":
            return None
        return int(free_bytes(device) * (1 - section.activation_share))

    def _needed(self, units: Sequence[ParamUnit]) -> int:
        """Returns the bytes of model state on the device with all masters away; frozen parameters as if whole."""
        hidden = hidden_size(self._model, units)
        resolved = self._settings if hidden is None else resolve_buckets(self._settings, hidden)
        policy, zero = self._precision, self._settings.zero_optimization
        everything = StatePrediction(
            layouts=[unit.layout for unit in units],
            has_module=[unit.module is not None for unit in units],
            compute=policy.compute,
            master=policy.master,
            sums=policy.sums,
            states=policy.states,
            states_per_element=self._states,
            shard_optimizer=self._plan.shard_optimizer,
            shard_gradients=self._plan.shard_gradients,
            shard_parameters=self._plan.shard_parameters,
            gathering=turns_of(units, gather_budgets(resolved), chunk_of=self._chunk_of(units)),
            whole_frozen_bytes=sum(
                p.numel() * min(p.itemsize, policy.compute.itemsize)
                for p in self._model.parameters()
                if not is_trained(p)
            ),
            trained_on_host=self._plan.shard_parameters and zero.offload_param.device != "none",
            host_optimizer=HostOptimizer(self._travels, adds_up=self._adds_up, widens=False),
        )
        needed = everything.total_bytes() - everything.host_bytes()
        if everything.trained_on_host and policy.has_separate_master:
            largest_numel = max(unit.layout.shard_numel for unit in units)
            needed += LEAVING_COUNT * leaving_numel(largest_numel) * policy.compute.itemsize
        return needed

    @property
    def _adds_up(self) -> bool:
        assert self._settings.batch is not None, "the config was loaded with a world size"
        return self._settings.batch.accumulation_steps > 1

    @property
    def _travels(self) -> torch.dtype:
        wire = self._settings.communication_data_type
        return DTYPES[wire] if wire is not None and self._mesh.replicas().size > 1 else self._precision.compute

    @property
    def _masters_in_slices(self) -> bool:
        zero = self._settings.zero_optimization
        leave = self._plan.shard_parameters and zero.offload_param.device != "none"
        return leave and not self._precision.has_separate_master

    def _bytes_of(self) -> ElementBytes:
        policy = self._precision
        master = policy.master.itemsize
        return ElementBytes(
            parameter=policy.compute.itemsize,
            gradient=self._travels.itemsize,
            master=0 if self._masters_in_slices else master,
            master_here=master if policy.has_separate_master else 0,
            states=self._states * policy.states.itemsize,
            sum=policy.sums.itemsize,
            adds_up=self._adds_up,
        )

    def _tell(
        self, units: Sequence[ParamUnit], stays: Sequence[bool], title: str, *, compute_s: float | None = None
    ) -> None:
        """Says where units live, what they take, and what a step takes as far as buses are known."""
        assert self._settings.batch is not None, "the config was loaded with a world size"
        zero = self._settings.zero_optimization
        tiers: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}
        parameters = tiers[zero.offload_param.device] if self._plan.shard_parameters else "device"
        sizes = [UnitSize(unit.name, unit.layout.shard_numel, unit.module is not None) for unit in units]
        placement = place(
            sizes,
            self._bytes_of(),
            Budgets(device=None),
            self._buses,
            allowed=AllowedTiers((parameters,), ("device", tiers[zero.offload_optimizer.device])),
            micro_batches=self._settings.batch.accumulation_steps,
            staying=stays,
            compute_s=compute_s,
        )
        away = placement.bytes_in("host")
        lines = [
            f"{title}: {placement.ratio:.0%} of masters and optimizer states leave the device",
            *(f"  {line}" for line in placement.lines()),
            *([f"  measured: {self._buses.line()}"] if self._buses.line() else []),
        ]
        free = available_bytes()
        if away > free:
            lines.append(f"  {format_bytes(away)} of each rank go to host memory; this host has {format_bytes(free)}")
        self._say("dsrun: " + "\n".join(lines))
