"""Bytes of model state on a rank: by the textbook, and as this runtime allocates it. No activations.

The runtime's part follows its layout to the byte: slices of 256 elements, slots shared by units, gradients summed in
fp32, masters that are the parameters themselves in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.estimate.model import UnitGroup
from dsrun.estimate.settings import RunSettings

#: Slices are cut at multiples of this many elements.
SHARD_ALIGN = 256
#: Slots that units with modules share.
SLOT_COUNT = 2
FP32_BYTES = 4


def textbook_bytes(
    numel: int, ranks: int, stage: int, *, param_bytes: float = 2, grad_bytes: float = 2, state_bytes: float = 12
) -> float:
    """Returns bytes of model state a rank, by the formulas of the ZeRO paper.

    Args:
        numel: parameters of the model.
        ranks: data-parallel ranks.
        stage: what is cut over them: 0 nothing, 1 master and optimizer states, 2 gradients too, 3 parameters too.
        param_bytes: bytes of a parameter in compute format.
        grad_bytes: bytes of a gradient.
        state_bytes: master and optimizer states of an element: 12 for fp32 master and Adam, 4 for bf16 moments alone.

    Source: ZeRO (Rajbhandari et al., 2020), section 3 and figure 1.
    """
    params = param_bytes * numel / (ranks if stage >= 3 else 1)
    grads = grad_bytes * numel / (ranks if stage >= 2 else 1)
    states = state_bytes * numel / (ranks if stage >= 1 else 1)
    return params + grads + states


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of model state of one rank, wherever they lie.

    Attributes:
        parameters: in compute format: whole, or this rank's slice at stage 3.
        gather_slots: where units stand whole in turns at stage 3.
        gradients: in compute format, a buffer a unit; 0 from stage 2 on.
        gradient_slots: where units' gradients stand in turns from stage 2 on.
        gradient_sums: fp32, of the owned range.
        masters: fp32, of the owned range; 0 in fp32, where the parameters are the masters.
        states: fp32, of the owned range.
        frozen: parameters that are not trained, whole, in compute format.
    """

    parameters: int
    gather_slots: int
    gradients: int
    gradient_slots: int
    gradient_sums: int
    masters: int
    states: int
    frozen: int

    @property
    def trained(self) -> int:
        """What the runtime itself allocates for trained parameters; `frozen` is left out."""
        return self.total - self.frozen

    @property
    def total(self) -> int:
        """All of it."""
        slots = self.gather_slots + self.gradient_slots
        owned = self.gradient_sums + self.masters + self.states
        return self.parameters + self.gradients + slots + owned + self.frozen


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """One unit on a number of ranks: elements of its whole buffer and of a slice, and whether it shares slots."""

    padded: int
    shard: int
    has_module: bool


def pad_units(units: Sequence[UnitGroup], ranks: int, *, tensor_parallel: int = 1) -> list[PaddedUnit]:
    """Returns every unit with its padding.

    Args:
        units: of the model.
        ranks: that a unit is cut over.
        tensor_parallel: ranks that share each layer, which divides the unit first.
    """
    padded: list[PaddedUnit] = []
    for unit in units:
        shard = -(-unit.numel // (tensor_parallel * ranks * SHARD_ALIGN)) * SHARD_ALIGN
        padded += [PaddedUnit(shard * ranks, shard, unit.has_module)] * unit.count
    return padded


def slot_numbers(units: Sequence[PaddedUnit], *, count: int = SLOT_COUNT) -> list[int]:
    """Returns the slot of each unit: unit i lies in slot i mod `count`, one without a module in a slot of its own."""
    return [i % count if unit.has_module else count + i for i, unit in enumerate(units)]


def state_bytes(units: Sequence[PaddedUnit], settings: RunSettings, *, frozen_numel: int = 0) -> StateBytes:
    """Returns what a rank holds between two steps.

    Args:
        units: of the model, padded for the ranks.
        settings: stage, formats and states.
        frozen_numel: parameters that are not trained.
    """
    stage, compute = settings.stage, settings.compute_bytes
    whole, shard = sum(unit.padded for unit in units), sum(unit.shard for unit in units)
    owned = shard if stage >= 1 else whole
    slots: Counter[int] = Counter()
    for unit, slot in zip(units, slot_numbers(units), strict=True):
        slots[slot] = max(slots[slot], unit.padded)
    slot_bytes = sum(slots.values()) * compute
    return StateBytes(
        parameters=(shard if stage >= 3 else whole) * compute,
        gather_slots=slot_bytes if stage >= 3 else 0,
        gradients=0 if stage >= 2 else whole * compute,
        gradient_slots=slot_bytes if stage >= 2 else 0,
        gradient_sums=owned * FP32_BYTES,
        masters=owned * FP32_BYTES if settings.has_master else 0,
        states=settings.states_of(owned),
        frozen=frozen_numel * compute,
    )


def reduction_bytes(units: Sequence[PaddedUnit], settings: RunSettings) -> int:
    """Returns the fp32 copy of one unit's reduced gradient that lives while it is added up; none in fp32."""
    if not settings.has_master or not units:
        return 0
    return FP32_BYTES * max(unit.padded if settings.stage == 0 else unit.shard for unit in units)
