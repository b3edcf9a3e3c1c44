"""Bytes of model state on a rank: predicted from layouts, and measured from tensors, without activations; and all
that is in use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsrun.choices.gather_plan import USUAL_SLOTS, GatherPlan, plan_slots

from ..layout.unit_layout import UnitLayout
from ..optim.states.format import FP32_STATES, StateFormat
from ..precision.policy import PrecisionPolicy

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


#: Buffers of a ring in host memory: one is worked on while another is copied.
_RING = 2


@dataclass(frozen=True, slots=True)
class HostOptimizer:
    """How an optimizer steps in host memory, as far as it decides bytes.

    Attributes:
        travels: dtype in which reduced gradients come.
        adds_up: micro steps are added up, in the masters' dtype, on the device.
        widens: gradients are multiplied in the masters' dtype on the host, for no power of two takes their mean.
        frame_bytes: masters and states lie on a disk, and pass through so much memory; None: they lie in memory.
        ahead: steps are taken before the norm is known, into a second set.
        stays: flag for each layout, whether its masters and states stay on the device; empty where none do.
        form: format of the optimizer states.
        splits: masters lie in halves, of which the upper one is the parameter.
    """

    travels: torch.dtype
    adds_up: bool
    widens: bool
    frame_bytes: int | None = None
    ahead: bool = False
    stays: Sequence[bool] = ()
    form: StateFormat = FP32_STATES
    splits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrediction:
    """What decides the bytes of model state.

    Attributes:
        layouts: one a trained unit, in order; `has_module` says for each whether it shares the slots.
        has_module: flag for each layout, whether its unit shares the slots; see `layouts`.
        compute: dtype of parameters and gradients.
        master: dtype of masters.
        sums: dtype of accumulated gradients; None: that of masters.
        states: dtype of optimizer states, and what the optimizer computes in; None: that of masters.
        states_per_element: optimizer states, counted in values of `states` (2 for Adam, 0.51 for Adam in 8 bits).
        shard_optimizer: whether masters, optimizer states and accumulated gradients are sharded; see `ZeroPlan`.
        shard_gradients: whether gradients are sharded between backward and their reduction; see `ZeroPlan`.
        shard_parameters: whether parameters are sharded between uses; see `ZeroPlan`.
        gathering: turns of parameters, where those are sharded; None: two slots, and nothing is frozen.
        frozen_layouts: units of frozen parameters that are sharded.
        whole_frozen_bytes: bytes of the frozen parameters that are not sharded.
        trained_on_host: slices of trained parameters lie in host memory.
        frozen_on_host: those of `frozen_layouts` do.
        host_optimizer: settings of an optimizer that steps in host memory; None where it steps on the device.
        slice_bytes: some slices lie on a disk, and this is the host memory that the others lie in or they pass through;
            None: none does.
        kept: flag for each layout, whether its parameters stay in fp32 where the others have 16 bits; empty where none
            does.
        summed_here_bytes: bytes of gradients of whole units that are summed up until one reduction an update.
    """

    layouts: Sequence[UnitLayout]
    has_module: Sequence[bool]
    compute: torch.dtype
    master: torch.dtype
    states_per_element: float
    shard_optimizer: bool
    shard_gradients: bool
    shard_parameters: bool
    gathering: GatherPlan | None = None
    sums: torch.dtype | None = None
    states: torch.dtype | None = None
    frozen_layouts: Sequence[UnitLayout] = ()
    whole_frozen_bytes: int = 0
    trained_on_host: bool = False
    frozen_on_host: bool = False
    host_optimizer: HostOptimizer | None = None
    kept: Sequence[bool] = ()
    slice_bytes: int | None = None
    summed_here_bytes: int = 0

    def host_bytes(self) -> int:
        """Returns what of `total_bytes` lies in host memory, apart from the device's."""
        return self._slices_on_host() + self._optimizer_on_host()

    def _slices_on_host(self) -> int:
        if self.slice_bytes is not None:
            return self.slice_bytes
        frozen = sum(layout.shard_numel for layout in self.frozen_layouts) if self.frozen_on_host else 0
        return (self._trained_off_device() + frozen) * self.compute.itemsize

    def _trained_off_device(self) -> int:
        """Elements of slices of trained parameters off the device: those that an optimizer there updates stay."""
        if not self.trained_on_host:
            return 0
        leaving, _ = self._leaving_and_staying()
        are_masters = self.host_optimizer is not None and self.compute == self.master
        return sum(layout.shard_numel for layout in (leaving if are_masters else self.layouts))

    def _leaving_and_staying(self) -> tuple[list[UnitLayout], list[UnitLayout]]:
        """Returns the layouts whose masters are off the device, and the others."""
        how = self.host_optimizer
        stays = [how is None] * len(self.layouts) if how is None or not how.stays else how.stays
        pairs = list(zip(self.layouts, stays, strict=True))
        return [layout for layout, one in pairs if not one], [layout for layout, one in pairs if one]

    def total_bytes(self) -> int:
        """Returns the bytes of parameters, gradients, masters and optimizer states that a rank holds between steps."""
        frozen = sum(layout.shard_numel for layout in self.frozen_layouts)
        full = sum(layout.padded_numel for layout in self.layouts)
        shard = sum(layout.shard_numel for layout in self.layouts)
        owned = shard if self.shard_optimizer else full
        slots = self._slot_numel() if self.gathering is None else self.gathering.numel
        parameters = (shard + frozen + slots) if self.shard_parameters else full
        if self.slice_bytes is not None:
            parameters -= self._trained_off_device() + (frozen if self.frozen_on_host else 0)
        gradients = self._slot_numel() if self.shard_gradients else full
        compute_bytes = (parameters + gradients) * self.compute.itemsize + self.whole_frozen_bytes
        compute_bytes += (self.slice_bytes or 0) + self.summed_here_bytes
        sums, states = self.sums or self.master, self.states or self.master
        if self.host_optimizer is not None:
            leaving, staying = (sum(layout.shard_numel for layout in one) for one in self._leaving_and_staying())
            on_device = leaving * sums.itemsize if self.host_optimizer.adds_up else 0
            on_device += staying * (sums.itemsize + (self.master.itemsize if self.compute != self.master else 0))
            on_device += round(staying * self.states_per_element) * states.itemsize
            return compute_bytes + on_device + self._optimizer_on_host()
        masters = (owned if self.compute != self.master else 0) * self.master.itemsize
        state_bytes = round(owned * self.states_per_element) * states.itemsize
        total = compute_bytes + masters + owned * sums.itemsize + state_bytes
        return total + self._kept_bytes() + self._window_numel(sums, states) * states.itemsize

    def _kept_bytes(self) -> int:
        """What units that stay in fp32 take more: they are their own masters, and lie in no slot that others share."""
        kept = [layout for layout, stays in zip(self.layouts, self.kept, strict=True) if stays] if self.kept else []
        full, shard = sum(layout.padded_numel for layout in kept), sum(layout.shard_numel for layout in kept)
        wider = torch.float32.itemsize - self.compute.itemsize
        parameters = shard + full if self.shard_parameters else full
        return (parameters + full) * wider - (shard if self.shard_optimizer else full) * self.master.itemsize

    def _optimizer_on_host(self) -> int:
        """Bytes of masters, states and what gradients and parameters cross the bus through."""
        how = self.host_optimizer
        if how is None:
            return 0
        leaving, _ = self._leaving_and_staying()
        owned = sum(layout.shard_numel for layout in leaving)
        largest = max((layout.shard_numel for layout in leaving), default=0)
        # Slices in the masters' dtype and in host memory are the masters.
        masters = 0 if self.trained_on_host and self.compute == self.master else owned * self.master.itemsize
        if how.splits:
            masters = owned * torch.int16.itemsize
        # Whole ones: those of optimizers whose states are no whole number an element need whole tensors.
        states = sum(how.form.place_bytes(layout.shard_numel) for layout in leaving) * round(self.states_per_element)
        gradients = owned * how.travels.itemsize + how.widens * largest * self.master.itemsize
        if how.adds_up:
            gradients = _RING * largest * self.master.itemsize
        if how.ahead:
            sums = owned * self.master.itemsize if how.adds_up else gradients
            parameters = owned * self.compute.itemsize if self.compute != self.master else 0
            return masters + sums + owned * self.master.itemsize + 2 * states + parameters
        stays = self.trained_on_host and self.slice_bytes is None
        in_place = stays or self.compute == self.master or how.travels == self.compute
        through_ring = not in_place or (how.adds_up and self.compute != self.master and not stays)
        kept = masters + states if how.frame_bytes is None else how.frame_bytes
        return kept + gradients + through_ring * _RING * largest * self.compute.itemsize

    def _window_numel(self, sums: torch.dtype, states: torch.dtype) -> int:
        """Elements of the memory through which an optimizer sees ranges of other dtypes, one at a time."""
        kept = self.kept or [False] * len(self.layouts)
        total = 0
        for stays in (False, True):
            alike = [layout for layout, one in zip(self.layouts, kept, strict=True) if one is stays]
            owned = [layout.shard_numel if self.shard_optimizer else layout.padded_numel for layout in alike]
            master = torch.float32 if stays else self.master
            total += PrecisionPolicy(self.compute, master, sums, states).window_count * max(owned, default=0)
        return total

    def _slot_numel(self) -> int:
        sizes = [layout.padded_numel for layout in self.layouts]
        return sum(plan_slots(sizes, self.has_module, count=USUAL_SLOTS).numel.values())


def used_bytes(device: torch.device) -> int:
    """Returns the most memory that tensors have taken on a GPU so far, or what the process has resident now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()


def resident_bytes() -> int:
    """Returns what the process has resident now, shared pages included (proc_pid_statm(5))."""
    # By the system's calls: once a step, and a file object takes twice as long. Not kept open, for a fork has its own.
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 100).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def measure(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes behind `tensors`, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())
