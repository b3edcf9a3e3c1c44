"""Bytes of model state on a rank, as this runtime allocates it. No activations.

The runtime's part follows its layout to the byte: slices of 256 elements, slots shared by units, gradients summed in
fp32, masters that are the parameters themselves in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dsrun.choices.gather_plan import (
    USUAL_SLOTS,
    GatherBudgets,
    GatherPlan,
    UnitElements,
    choose_staying,
    plan_chunks,
    plan_gathering,
    plan_slots,
    sets_of_chunks,
    slots_of_chunks,
)
from dsrun.choices.resident_units import room_at_ratio, units_that_stay
from dsrun.estimate.model.units import UnitGroup
from dsrun.estimate.run.settings import RunSettings

#: Slices are cut at multiples of this many elements.
SHARD_ALIGN = 256
FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model state of one rank, wherever they lie.

    Attributes:
        parameters: bytes of trained parameters in compute format (units kept in fp32: in fp32): whole, or this rank's
            slice at stage 3.
        gather_slots: bytes of the slots in which gathered units take turns at stage 3; 0 below it.
        gradients: bytes of gradients in compute format, one buffer for each unit; 0 from stage 2 on.
        gradient_slots: bytes of the slots in which the gradients of units take turns from stage 2 on; 0 below it.
        gradient_sums: bytes of the gradient sums of the range that the rank owns.
        local_sums: bytes of fp32 sums of whole gradients, where these are reduced once an update; 0 where the rank owns
            them whole.
        masters: bytes of masters of the range that the rank owns; 0 for parameters that are the masters themselves.
        states: bytes of the optimizer states of the range that the rank owns.
        window: bytes of the window through which the optimizer sees one unit's range at a time, where it computes in a
            wider format.
        frozen: parameters that are not trained, in compute format: whole, or this rank's slice at stage 3.
        frozen_slices: bytes of the part of `frozen` that consists of slices.
    """

    parameters: int
    gather_slots: int
    gradients: int
    gradient_slots: int
    gradient_sums: int
    masters: int
    states: int
    frozen: int
    local_sums: int = 0
    window: int = 0
    frozen_slices: int = 0

    @property
    def trained(self) -> int:
        """What the runtime itself allocates for trained parameters; `frozen` is left out."""
        return self.total - self.frozen

    @property
    def total(self) -> int:
        """All of it."""
        slots = self.gather_slots + self.gradient_slots
        owned = self.gradient_sums + self.local_sums + self.masters + self.states + self.window
        return self.parameters + self.gradients + slots + owned + self.frozen


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """One unit on a number of ranks.

    Attributes:
        padded: elements of the whole buffer of its trained parameters.
        shard: elements of one rank's slice of the buffer of trained parameters.
        has_module: whether it shares slots.
        numel: trained elements without padding.
        frozen: elements of its module's frozen parameters.
        frozen_padded: elements of the whole buffer of the frozen parameters of its module.
        frozen_shard: elements of one rank's slice of the buffer of frozen parameters.
        frozen_numel: frozen parameters, without gaps between them.
        kept: its parameters stay in fp32.
        chunk: position of its chunk among those of a pipeline stage.
        role: role of the ranks that share it: `shard`, or `replica` where tensor parallelism leaves it whole.
        ranks: ranks that share it.
        stages: pipeline stages that have it.
    """

    padded: int
    shard: int
    has_module: bool
    numel: int
    frozen: int
    frozen_padded: int
    frozen_shard: int
    frozen_numel: int
    kept: bool = False
    chunk: int = 0
    role: Literal["shard", "replica"] = "shard"
    ranks: int = 1
    stages: int = 1

    @property
    def elements(self) -> UnitElements:
        """What decides how the unit is gathered."""
        return UnitElements(self.numel, self.padded, self.frozen, self.frozen_padded, self.has_module)

    @property
    def trains(self) -> bool:
        """Whether it has gradients."""
        return self.numel > 0 or not self.frozen


def pad_units(
    units: Sequence[UnitGroup], ranks: int, *, tensor_parallel: int = 1, by_block: bool = False
) -> list[PaddedUnit]:
    """Returns every unit with its padding, what tensor parallelism leaves whole as units of their own behind the rest.

    Args:
        units: units of the model.
        ranks: number of ranks that have the same part of a layer.
        tensor_parallel: ranks that share each layer, which divides what it cuts first.
        by_block: whether what is left whole of each block is a unit of its own, as in pipelines; else all of it is one.
    """
    padded: list[PaddedUnit] = []
    whole: list[PaddedUnit] = []
    together = [0, 0]
    for unit in units:
        # Gradients of what is repeated are summed up over the ranks first, so that it is no unit with the rest.
        kinds = (unit.uncut, unit.repeated) if tensor_parallel > 1 else (0, 0)
        uncut = sum(kinds)
        sharing = ranks * unit.stages
        cut = _padded(replace(unit, numel=unit.numel - uncut), sharing, tensor_parallel, "shard")
        parts = [replace(unit, numel=numel, frozen=0, frozen_numel=0) for numel in kinds]
        left = [_padded(part, sharing * tensor_parallel, 1, "replica") for part in parts]
        if kinds[0] == unit.numel and uncut and (unit.has_module or by_block):
            padded += [left[0]] * unit.count
            continue
        padded += [cut] * unit.count if unit.numel > uncut or not uncut else []
        for kind, numel in enumerate(kinds):
            if numel and by_block:
                whole += [replace(left[kind], has_module=False)] * unit.count
            elif numel:
                together[kind] += numel * unit.count
    rests = [UnitGroup("rest", numel, has_module=False) for numel in together if numel]
    return [*padded, *whole, *(_padded(rest, ranks * tensor_parallel, 1, "replica") for rest in rests)]


def _padded(unit: UnitGroup, ranks: int, parts: int, role: Literal["shard", "replica"]) -> PaddedUnit:
    """Returns a unit of which each rank has one of so many parts, and a slice of that."""

    def share(numel: int) -> int:
        return -(-numel // parts)

    def slice_of(numel: int) -> int:
        return -(-numel // (parts * ranks * SHARD_ALIGN)) * SHARD_ALIGN

    shard, frozen_shard = slice_of(unit.numel), slice_of(unit.frozen)
    return PaddedUnit(
        padded=shard * ranks,
        shard=shard,
        has_module=unit.has_module,
        numel=share(unit.numel),
        frozen=share(unit.frozen),
        frozen_padded=frozen_shard * ranks,
        frozen_shard=frozen_shard,
        frozen_numel=share(unit.frozen_numel),
        kept=unit.kept,
        chunk=unit.chunk,
        role=role,
        ranks=ranks,
        stages=unit.stages,
    )


@dataclass(frozen=True, slots=True)
class GatheredUnits:
    """Stage 3's turns: the units that are gathered, without frozen parameters that stay, and the plan for these."""

    units: list[PaddedUnit]
    plan: GatherPlan


def gathered_units(
    units: Sequence[PaddedUnit], budgets: GatherBudgets, *, chunks_take_turns: bool = False
) -> GatheredUnits:
    """Returns what stage 3 gathers, as the runtime decides it.

    Args:
        units: units of the model, padded for the ranks.
        budgets: limits on gathering that the config sets, in elements.
        chunks_take_turns: whether the units of a chunk are gathered together.
    """
    taking_part: list[PaddedUnit] = []
    stays: list[bool] = []
    for unit, staying in zip(units, choose_staying([unit.elements for unit in units], budgets), strict=True):
        if staying.frozen and not unit.numel:
            continue
        taking_part.append(_without_frozen(unit) if staying.frozen else unit)
        stays.append(staying.trained)
    elements = [unit.elements for unit in taking_part]
    if chunks_take_turns:
        return GatheredUnits(taking_part, plan_chunks(elements, stays, [unit.chunk for unit in taking_part], budgets))
    return GatheredUnits(taking_part, plan_gathering(elements, stays, budgets))


def state_bytes(units: Sequence[PaddedUnit], settings: RunSettings, *, frozen_numel: int = 0) -> StateBytes:
    """Returns what a rank holds between two steps.

    Args:
        units: units of the model, padded for the ranks.
        settings: stage, formats and states.
        frozen_numel: parameters that are not trained, in a unit or not.
    """
    stage, compute = settings.stage, settings.compute_bytes
    trained = [unit for unit in units if unit.trains]
    whole, shard = sum(unit.padded for unit in trained), sum(unit.shard for unit in trained)
    owned = shard if stage >= 1 else whole
    kept = [unit for unit in trained if unit.kept]
    kept_whole, kept_shard = sum(unit.padded for unit in kept), sum(unit.shard for unit in kept)
    wider = kept_whole * (FP32_BYTES - compute)  # what is whole of parameters that stay in fp32, and of their gradients
    gradient_slots = plan_slots(
        [unit.padded for unit in trained], [unit.has_module for unit in trained], count=USUAL_SLOTS
    )
    gathered = gathered_units(units, settings.gather, chunks_take_turns=settings.chunks_take_turns)
    cut = gathered.units if stage >= 3 else []
    frozen_slices = sum(unit.frozen_shard for unit in cut)
    frozen = max(0, frozen_numel - sum(unit.frozen_numel for unit in cut)) + frozen_slices
    return StateBytes(
        parameters=shard * compute + kept_shard * (FP32_BYTES - compute) if stage >= 3 else whole * compute + wider,
        gather_slots=gathered.plan.numel * compute + wider if stage >= 3 else 0,
        gradients=0 if stage >= 2 else whole * compute + wider,
        gradient_slots=sum(gradient_slots.numel.values()) * compute + wider if stage >= 2 else 0,
        gradient_sums=settings.sums_of(owned),
        local_sums=FP32_BYTES * _summed_numel([unit for unit in trained if _sums_apart(settings, unit)], settings),
        masters=(owned - (kept_shard if stage >= 1 else kept_whole)) * settings.master_bytes
        if settings.has_master
        else 0,
        states=settings.states_of(owned),
        frozen=frozen * compute,
        frozen_slices=frozen_slices * compute,
        window=sum(settings.window_of(_longest(trained, stage, kept=one)) for one in (False, True)),
    )


def zero_paper_bytes(numel: int, settings: RunSettings, *, ranks: int, frozen_numel: int = 0) -> int:
    """Returns the model state of a rank as the ZeRO paper counts it: no sums, no slots, all units alike.

    Args:
        numel: trained parameters of the model.
        settings: stage, formats and the ranks that share layers.
        ranks: ranks that share out the state of a layer's part.
        frozen_numel: parameters that are not trained.

    Source: ZeRO (Rajbhandari et al., 2020), section 5: (2 + 2 + 12) bytes a parameter with Adam, each cut by its stage.
    """
    parts = settings.tensor_parallel * settings.stages
    params = settings.compute_bytes * (numel + frozen_numel) / (ranks if settings.stage >= 3 else 1)
    grads = settings.compute_bytes * numel / (ranks if settings.stage >= 2 else 1)
    owned = numel / (ranks if settings.stage >= 1 else 1)
    states = settings.states_of(1 << 20) / (1 << 20) + (settings.master_bytes if settings.has_master else 0)
    return round((params + grads + owned * states) / parts)


def _sums_apart(settings: RunSettings, unit: PaddedUnit) -> bool:
    """Whether a unit's sums of several micro batches lie beside those that the rank owns, and beside its gradients."""
    owned = settings.stage == 0 and settings.sums_of(1) == FP32_BYTES
    # Autograd itself adds up fp32 gradients that have a buffer of their own.
    kept = settings.stage < 2 and (unit.kept or settings.compute_bytes == FP32_BYTES)
    in_place = settings.offload_optimizer == "none" and (owned or kept)
    return settings.once_an_update and unit.ranks > 1 and not in_place


def _summed_numel(units: Sequence[PaddedUnit], settings: RunSettings) -> int:
    """Returns the elements of the memory of these sums; those of one chunk lie where those of another one did."""
    numels = [unit.padded for unit in units]
    if not settings.chunks_take_turns or settings.stage < 2:
        return sum(numels)
    chunks = [unit.chunk if unit.stages == 1 else None for unit in units]
    sets = sets_of_chunks(len({*chunks} - {None}))
    largest: dict[int, int] = {}
    for slot, numel in zip(slots_of_chunks(numels, chunks, sets), numels, strict=True):
        largest[slot] = max(largest.get(slot, 0), numel)
    return sum(largest.values())


def _longest(units: Sequence[PaddedUnit], stage: int, *, kept: bool) -> int:
    """Returns the elements of the longest range that a rank updates of a unit."""
    return max((unit.shard if stage >= 1 else unit.padded for unit in units if unit.kept is kept), default=0)


def _without_frozen(unit: PaddedUnit) -> PaddedUnit:
    return replace(unit, frozen=0, frozen_padded=0, frozen_shard=0, frozen_numel=0)


@dataclass(frozen=True, slots=True)
class SplitUnits:
    """Trained units by where their masters and optimizer states lie, each list in order.

    Attributes:
        leaving: off the device.
        staying: trained units with masters and optimizer states on the device.
    """

    leaving: list[PaddedUnit]
    staying: list[PaddedUnit]

    @property
    def leaving_numel(self) -> int:
        """Elements of a rank's slices."""
        return sum(unit.shard for unit in self.leaving)

    @property
    def staying_numel(self) -> int:
        """Elements of a rank's slices."""
        return sum(unit.shard for unit in self.staying)


def split_units(units: Sequence[PaddedUnit], settings: RunSettings) -> SplitUnits:
    """Returns which units leave the device with `offload_optimizer`, as the runtime decides it.

    Args:
        units: units of the model, padded for the ranks.
        settings: settings that say what lies off the device, and which share of it.
    """
    trained = [unit for unit in units if unit.trains]
    if settings.offload_optimizer == "none":
        return SplitUnits([], trained)
    numels = [unit.shard for unit in trained]
    room = room_at_ratio(numels, settings.offload_ratio)
    stays = units_that_stay(numels, [unit.has_module for unit in trained], room)
    pairs = list(zip(trained, stays, strict=True))
    return SplitUnits([unit for unit, one in pairs if not one], [unit for unit, one in pairs if one])


def slices_off_device(units: Sequence[PaddedUnit], settings: RunSettings) -> list[PaddedUnit]:
    """Returns the units whose slices of trained parameters lie off the device, with `offload_param`.

    What an optimizer on the device updates itself, in fp32, stays there.

    Args:
        units: units of the model, padded for the ranks.
        settings: settings that say what lies off the device.
    """
    if not settings.trained_leave:
        return []
    if settings.has_master or settings.offload_optimizer == "none":
        return [unit for unit in units if unit.trains]
    return split_units(units, settings).leaving


def bytes_off_device(units: Sequence[PaddedUnit], settings: RunSettings) -> int:
    """Returns the bytes of the slices of trained parameters that lie off the device, as `slices_off_device`."""
    compute = settings.compute_bytes
    return sum(unit.shard * (FP32_BYTES if unit.kept else compute) for unit in slices_off_device(units, settings))


@dataclass(frozen=True, slots=True)
class DriveSlices:
    """Slices of parameters where they lie on NVMe, in elements.

    Attributes:
        staying: elements of the slices that stay in host memory.
        away: each that lies on a drive.
    """

    staying: int
    away: tuple[int, ...]


def slices_on_drives(units: Sequence[PaddedUnit], settings: RunSettings) -> DriveSlices:
    """Returns which slices lie on a drive with `offload_param` nvme: all but the first, as many as may stay.

    Args:
        units: units of the model, padded for the ranks, in order.
        settings: settings that say what lies off the device, and how many elements may stay in host memory.
    """
    left, staying, away = settings.params_in_memory, 0, list[int]()
    trained = [unit.shard for unit in slices_off_device(units, settings)]
    for kind in (trained, [unit.frozen_shard for unit in units]):
        for number, size in enumerate(kind):
            if size > left:
                away += [later for later in kind[number:] if later]
                break
            left, staying = left - size, staying + size
    return DriveSlices(staying, tuple(away))
