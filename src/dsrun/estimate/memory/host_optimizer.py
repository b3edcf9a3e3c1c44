"""Bytes of an optimizer that steps in host memory: there, and what of its gradients stays on the device.

As the runtime reserves it, to the byte: `offload/host_gradients.py` and `offload/step/cpu_optimizer.py` say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsrun.estimate.memory.model_state import FP32_BYTES, PaddedUnit, split_units
from dsrun.estimate.run.settings import RunSettings

#: Of the lower half of a master, where the upper one is the parameter.
_HALF_BYTES = 2
#: Buffers of a ring: one is worked on while another is copied.
_RING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptimizerBytes:
    """What a rank holds.

    Attributes:
        masters: fp32, in host memory, or lower halves of them; 0 where slices of fp32 parameters lie there, which they
            are.
        states: bytes of optimizer states in host memory, in their own format.
        gradients: bytes of gradients from the device, in host memory: all in compute format, or, with accumulation, a
            ring of fp32 sums (all sums with `steps_ahead`).
        parameters: bytes of parameters in host memory on their way to the device, where they do not take the place of
            the gradients.
        device_sums: fp32, on the device: of units that stay, and of all where micro steps are added up.
        device_masters: bytes of masters on the device, of units that stay there; 0 where the parameters are the
            masters.
        device_states: bytes of optimizer states on the device, of units that stay there.
        second_masters: bytes of the second masters in host memory, for steps that are taken before the gradient norm is
            known.
        second_states: bytes of the second optimizer states in host memory, for steps that are taken before the gradient
            norm is known.
    """

    masters: int
    states: int
    gradients: int
    parameters: int
    device_sums: int
    device_masters: int = 0
    device_states: int = 0
    second_masters: int = 0
    second_states: int = 0

    @property
    def host(self) -> int:
        """All that lies in host memory."""
        return self.masters + self.states + self.gradients + self.parameters + self.second_masters + self.second_states


def host_optimizer_bytes(units: Sequence[PaddedUnit], settings: RunSettings) -> HostOptimizerBytes:
    """Returns the bytes of an optimizer of which all or a share is in host memory, at stage 1 or above.

    Args:
        units: units of the model, padded for the ranks.
        settings: formats, states and accumulation.
    """
    split = split_units(units, settings)
    trained, staying = split.leaving, split.staying_numel
    owned = sum(unit.shard for unit in trained)
    largest = max((unit.shard for unit in trained), default=0)
    adds_up = settings.accumulation_steps > 1
    sixteen = settings.compute_bytes < FP32_BYTES
    ranks = trained[0].padded // trained[0].shard if trained and trained[0].shard else 1
    # A mean over a number of ranks that is no power of two is taken in fp32 on the host.
    wide = FP32_BYTES * largest if sixteen and not adds_up and ranks & (ranks - 1) else 0
    ring = _RING * FP32_BYTES * largest
    through_ring = adds_up and sixteen and not settings.trained_leave
    # In fp32, slices in host memory are the masters.
    masters = 0 if settings.trained_leave and not settings.has_master else owned * FP32_BYTES
    if settings.split_master:
        masters = owned * _HALF_BYTES
    found = HostOptimizerBytes(
        masters=masters,
        states=sum(settings.away_states_of(unit.shard) for unit in trained),
        gradients=ring if adds_up else owned * settings.compute_bytes + wide,
        parameters=_RING * settings.compute_bytes * largest if through_ring else 0,
        device_sums=(staying + (owned if adds_up else 0)) * FP32_BYTES,
        device_masters=staying * FP32_BYTES if settings.has_master else 0,
        device_states=settings.states_of(staying),
    )
    if not settings.steps_ahead or settings.offload_optimizer != "cpu":
        return found
    # Gradients outlive a step that may not count, so parameters have a place of their own.
    return replace(
        found,
        gradients=owned * FP32_BYTES if adds_up else found.gradients,
        parameters=owned * settings.compute_bytes if sixteen else 0,
        second_masters=owned * FP32_BYTES,
        second_states=found.states,
    )
