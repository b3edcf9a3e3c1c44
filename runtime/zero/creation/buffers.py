"""The memory of all units' parameters, masters and gradient sums: an arena a kind, in which each unit gets its part.

Where first values come from is decided in `values.py`; slots and gradients are the store's and the reducer's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...memory.arena import STAYING, Arena, room_for
from ...memory.arenas import Arenas
from ...memory.pages import fresh_zeros
from ...mesh.collectives import own_slice
from ...precision.policy import PrecisionPolicy
from ...protocols import Window
from ..partition_parameters import set_memory
from ..units.plan import ZeroPlan
from ..units.unit import ParamUnit
from .placement import ON_DEVICE, Placement
from .values import take_values


class UnitBuffers:
    """Reserves parameters and masters at once; they are filled unit by unit, so the model's first tensors make room.

    Args:
        units: all units with the same replicas; their layouts say how much there is of each kind.
        plan: plan of what is sharded.
        precision: dtypes of parameters and masters.
        device: device of the buffers.
        memory: arenas that the buffers are reserved in.
        suffix: behind the names of arenas, where there are others of the same kind in another dtype.
        placement: Place of slices and masters; room for masters that are not always in memory has been reserved.
        positions: position of each unit among all units with masters that leave the device, by the unit's number; None
            where no masters leave.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plan: ZeroPlan,
        *,
        precision: PrecisionPolicy,
        device: torch.device,
        memory: Arenas,
        suffix: str = "",
        placement: Placement = ON_DEVICE,
        positions: Mapping[int, int] | None = None,
    ) -> None:
        tier = placement.tier if plan.shard_parameters else None
        masters_host, masters_away = placement.masters_host, placement.masters_away
        self._masters_away = masters_away
        self._units = units
        self._positions = {} if positions is None else positions
        self._going = [unit for unit in units if unit.steps_on_host]
        self._staying = [unit for unit in units if not unit.steps_on_host]
        self._suffix_of_staying = (STAYING if self._going else "") + suffix
        self._plan = plan
        self._precision = precision
        self._device = device
        self._memory = memory
        self._suffix = suffix
        # An optimizer on the device that updates the very parameters has them there.
        in_tier = units if masters_host is None or precision.has_separate_master else self._going
        self._in_tier = {unit.index for unit in in_tier} if tier is not None else set[int]()
        self._tier = tier
        self._has_masters_in_tier = tier is not None and not precision.has_separate_master
        self._params = self._reserve_params()
        self._masters: Arena | None = None
        self._hosted: Arena | None = None
        if masters_host is not None and masters_away is None and self._going and not self._has_masters_in_tier:
            zeros = partial(masters_host.zeros, dtype=precision.master)
            numel = self._owned_numel(self._going)
            self._hosted = memory.reserve("masters" + suffix, numel, zeros, tier="host", apart=placement.moves)
        if precision.has_separate_master and self._staying:
            name = "masters" + self._suffix_of_staying
            self._masters = memory.reserve(name, self._owned_numel(self._staying), self._own, leaves=True)
        # The first values of one unit, where no buffer of its own can take them whole and in fp32.
        in_parameters = self._masters is None and self._hosted is None and not (masters_away and self._going)
        needs_scratch = plan.shard_parameters if in_parameters else plan.shard_optimizer
        padded = (unit.layout.padded_numel for unit in units)
        self._scratch = self._own(max(padded, default=0) if needs_scratch else 0)

    def fill(self, unit: ParamUnit) -> None:
        """Gives a unit its parameters and masters, with their first values; enters the collectives of `take_values`."""
        layout, replicas = unit.layout, unit.replicas
        size, rank = replicas.size, replicas.rank
        flat = None if self._plan.shard_parameters else self._take_params(layout.padded_numel)
        whole = self._place_of_values(layout.padded_numel, flat)
        mine = own_slice(whole, rank=rank, size=size)
        promised = take_values(unit, whole, device=self._device)
        if flat is None:
            if self._tier is not None and unit.index in self._in_tier:
                unit.tier, unit.shard = self._tier, self._tier.admit(unit.index, mine)
            else:
                unit.shard = self._take_params(layout.shard_numel).copy_(mine)
            # The model's first tensors must not live on until the slots exist.
            for param in unit.params:
                set_memory(param, torch.empty(0, dtype=self._precision.compute, device=self._device))
        else:
            if promised:
                replicas.all_gather(whole, mine, label=unit.label).wait()
            if whole is not flat:
                flat.copy_(whole)
            unit.shard = own_slice(flat, rank=rank, size=size)
            unit.bind_params(flat)
        unit.owned = layout.shard_range(rank) if self._plan.shard_optimizer else (0, layout.padded_numel)
        masters = self._hosted if unit.steps_on_host else self._masters
        if unit.steps_on_host and self._masters_away is not None:
            unit.master = self._masters_away.admit(self._positions[unit.index], mine)
        elif masters is None:
            unit.master = unit.shard if self._plan.shard_optimizer else unit.flat_param
        else:
            unit.master = masters.take(layout.shard_numel).copy_(mine) if self._plan.shard_optimizer else whole

    def add_sums(self) -> None:
        """Gives units whose masters stay their gradient sums; last, when the model's first tensors are gone."""
        self._scratch = self._own(0)  # as much as the largest unit takes in fp32
        if self._going and not self._staying:
            return
        sums = self._precision.sums
        name, zeros = "gradient sums" + self._suffix_of_staying, partial(self._zeros, dtype=sums)
        arena = self._memory.reserve(name, self._owned_numel(self._staying), zeros, leaves=True)
        window = self._window()
        for unit in self._staying:
            unit.grad_sum = arena.take(unit.owned[1] - unit.owned[0])
            unit.window = window

    def _window(self) -> Window | None:
        """Reserves what the optimizer sees ranges of other dtypes through: as much as the longest of them."""
        count, states = self._precision.window_count, self._precision.states
        if not count or not self._staying:
            return None
        numel = max(unit.owned[1] - unit.owned[0] for unit in self._staying)
        room = room_for([numel] * count)
        name = "optimizer window" + self._suffix
        arena = self._memory.reserve(name, room, lambda numel: self._zeros(numel, states))
        return Window(arena.take(numel), arena.take(numel) if count > 1 else None)

    def _reserve_params(self) -> Arena | None:
        """Makes room for parameters, in the tier and on the device; None where nothing of them is there."""
        kind = "parameter shards" if self._plan.shard_parameters else "parameters"
        if self._tier is not None:
            inside = [unit for unit in self._units if unit.index in self._in_tier]
            numels, labels = [unit.layout.shard_numel for unit in inside], [unit.label for unit in inside]
            if numels:
                self._tier.reserve(kind + self._suffix, numels, self._precision.compute, labels=labels)
        here = [unit.layout for unit in self._units if unit.index not in self._in_tier]
        if self._tier is not None and not here:
            return None
        name = kind + (STAYING if self._in_tier else "") + self._suffix
        numels = [layout.shard_numel if self._plan.shard_parameters else layout.padded_numel for layout in here]
        return self._memory.reserve(name, sum(numels), self._shared)

    def _owned_numel(self, units: Sequence[ParamUnit]) -> int:
        whole = not self._plan.shard_optimizer
        return sum(unit.layout.padded_numel if whole else unit.layout.shard_numel for unit in units)

    def _take_params(self, numel: int) -> Tensor:
        assert self._params is not None, "a tier holds the parameters"
        return self._params.take(numel)

    def _place_of_values(self, numel: int, flat: Tensor | None) -> Tensor:
        """Returns zeroed fp32 memory for the first values of a unit: what they will stay in, or the scratch buffer."""
        if self._scratch.numel():
            return self._scratch.narrow(0, 0, numel).zero_()
        if self._masters is not None:
            return self._masters.take(numel)
        assert flat is not None, "parameters that are sharded have a scratch buffer"
        return flat

    def _shared(self, numel: int) -> Tensor:
        return self._units[0].replicas.zeros(numel, dtype=self._precision.compute, device=self._device)

    def _own(self, numel: int) -> Tensor:
        return self._zeros(numel, self._precision.master)

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return fresh_zeros(numel, dtype=dtype, device=self._device)
