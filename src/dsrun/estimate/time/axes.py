"""What one rank moves over each axis of ranks in one update, and which of it leaves its host.

Counts buffers as the runtime's collectives do; what a ring of ranks sends of them is told beside. Single numbers (loss,
norm, agreement) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from dsrun.estimate.memory.model_state import FP32_BYTES, PaddedUnit
from dsrun.estimate.model.activations import forwards_again
from dsrun.estimate.model.architecture import Architecture
from dsrun.estimate.model.stages import StageSize
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.collectives import collective_bytes
from dsrun.mesh_spec import MeshSpec

AxisName = Literal["data", "tensor", "context", "pipe"]
#: Numbers of each token that the loss over a cut vocabulary sums over ranks: the largest logit, the sum of all, the
#: target's.
_LOSS_NUMBERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """What one rank moves among its peers on some axes in one update.

    Attributes:
        name: axis as tables call it; what keeps replicas equal is `data`, whoever holds them.
        axes: axes with several ranks on which the peers differ, the slowest first.
        ranks: ranks that take part.
        peers_per_host: ranks that take part and share a host.
        buffers: bytes of whole buffers that enter collectives, and of messages that are sent, by kind.
    """

    name: AxisName
    axes: tuple[str, ...]
    ranks: int
    peers_per_host: int
    buffers: Mapping[str, int]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends with ring algorithms, and receives as well.

        Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009: S(D-1)/D for a reduce-scatter or an
        all-gather of S bytes over D ranks, twice that for an all-reduce.
        """
        around = sum(self.buffers.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_to_all"))
        around += 2 * self.buffers.get("all_reduce", 0)
        return around * (self.ranks - 1) // self.ranks + self.buffers.get("send", 0)

    @property
    def crosses_hosts(self) -> bool:
        """Whether some of the peers are on other hosts."""
        return self.ranks > self.peers_per_host


def axis_traffic(
    stage: StageSize, units: Sequence[PaddedUnit], settings: RunSettings, machine: Machine, *, boundary_bytes: int = 0
) -> tuple[AxisTraffic, ...]:
    """Returns what a rank of a pipeline stage moves over each axis; axes with nothing to do are left out.

    Args:
        stage: part of the model that the stage has.
        units: units of the stage, padded for the ranks.
        settings: settings of the run.
        machine: ranks of the job and of a host.
        boundary_bytes: bytes that it sends to neighbouring stages.
    """
    spec = settings.grid(machine.ranks)
    found = [*_state_traffic(units, settings, spec, machine)]
    shape = stage.model.architecture
    if shape is not None:
        found.append(_of(spec, machine, "tensor", spec.role_axes("tensor"), tensor_buffers(stage, shape, settings)))
        for axis in ("ring", "ulysses"):
            found.append(_of(spec, machine, "context", (axis,), _context_buffers(axis, shape, settings)))
    found.append(_of(spec, machine, "pipe", spec.role_axes("pipe"), {"send": boundary_bytes}))
    return tuple(one for one in found if one.ranks > 1 and one.sent_bytes)


def _of(
    spec: MeshSpec,
    machine: Machine,
    name: AxisName,
    axes: Collection[str],
    buffers: Mapping[str, int],
    *,
    ranks: int | None = None,
) -> AxisTraffic:
    wide = spec.wide(axes)
    kinds = {kind: size for kind, size in buffers.items() if size}
    return AxisTraffic(
        name=name,
        axes=wide,
        ranks=spec.size(wide) if ranks is None else ranks,
        peers_per_host=_peers_per_host(spec, wide, machine.ranks_per_host),
        buffers=kinds,
    )


def _peers_per_host(spec: MeshSpec, axes: Sequence[str], ranks_per_host: int) -> int:
    """Returns how many of some peers are on one host: of the set that is spread most, where sets differ.

    Axes have strides, so peers need not be listed, unless a set begins within a host and ends in the next.
    """
    count, stride = 1, 1
    for axis in reversed(spec.axes):
        reach = stride * axis.size
        if axis.name in axes:
            count *= max(1, min(axis.size, ranks_per_host // stride))
            if not all(_divides(ranks_per_host, length) for length in (stride, reach)):
                on_hosts = (Counter(rank // ranks_per_host for rank in group) for group in spec.groups(axes))
                return min(max(found.values()) for found in on_hosts)
        stride = reach
    return count


def _divides(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0


def _state_traffic(
    units: Sequence[PaddedUnit], settings: RunSettings, spec: MeshSpec, machine: Machine
) -> list[AxisTraffic]:
    """Returns what keeps parameters and gradients of replicas equal, for each set of ranks that share units."""
    found: list[AxisTraffic] = []
    for kind in dict.fromkeys(_kind(unit) for unit in units):
        role, stages = kind
        alike = [unit for unit in units if _kind(unit) == kind]
        moved = collective_bytes(units, settings, counted=partial(_is_of, kind))
        buffers = {
            "all_gather": moved.all_gather,
            "reduce_scatter": moved.reduce_scatter,
            "all_reduce": moved.all_reduce,
        }
        axes = spec.role_axes(role) if stages == 1 else (*spec.role_axes(role), *spec.role_axes("pipe"))
        found.append(_of(spec, machine, "data", axes, buffers, ranks=alike[0].ranks))
        if stages > 1 and alike[0].ranks > stages:
            # Uses of a tied weight are added up over its stages first, in fp32.
            tied = FP32_BYTES * sum(unit.padded for unit in alike)
            found.append(_of(spec, machine, "pipe", spec.role_axes("pipe"), {"all_reduce": tied}, ranks=stages))
    return found


def _kind(unit: PaddedUnit) -> tuple[Literal["shard", "replica"], int]:
    return unit.role, unit.stages


def _is_of(kind: tuple[str, int], unit: PaddedUnit) -> bool:
    return _kind(unit) == kind


def tensor_buffers(stage: StageSize, shape: Architecture, settings: RunSettings) -> dict[str, int]:
    """Returns the bytes that enter collectives among ranks that share layers, in one update.

    A block sums two activations over the ranks in forward and two in backward; slices of the sequence are gathered and
    reduce-scattered in their place, and gathered at either end of a row of blocks. What is computed again sums nothing
    again, and gathers slices for its columns once more.
    An output layer that is cut over the vocabulary sums the gradient of its input, and three numbers of a token in the
    loss; an embedding that it is tied to sums its outputs.

    Args:
        stage: part of the model that a pipeline stage has.
        shape: shape of its blocks.
        settings: settings of the run.

    Source: Megatron-LM (Shoeybi et al., 2019), section 3; Korthikanti et al., 2022, section 4.2.
    """
    if settings.tensor_parallel == 1:
        return {}
    micros = settings.accumulation_steps
    activation = shape.hidden * settings.tokens_per_micro_step * settings.compute_bytes * micros
    blocks = sum(stage.blocks)
    ends = int(stage.has_head) + int(stage.has_embedding and shape.tied)
    loss = _LOSS_NUMBERS * FP32_BYTES * settings.tokens_per_micro_step * micros if stage.has_head else 0
    if not settings.sequence_slices:
        return {"all_reduce": (4 * blocks + ends) * activation + loss}
    stack = settings.recomputed(blocks)
    again = stack.blocks if stack.products else round(forwards_again(replace(shape, layers=blocks), settings) * blocks)
    return {
        "all_gather": (4 * blocks + 2 * stage.rows + 2 * again) * activation,
        "reduce_scatter": 4 * blocks * activation,
        "all_reduce": ends * activation + loss,
    }


def _context_buffers(axis: Literal["ring", "ulysses"], shape: Architecture, settings: RunSettings) -> dict[str, int]:
    """Returns the bytes that ranks which share sequences move in one update.

    Ulysses exchanges queries, keys, values and outputs of attention for heads, forward and backward. A ring gathers
    keys and values of the whole sequence, again in backward, and reduce-scatters their gradients.

    Args:
        axis: the axis; a ring is counted as its all-gather form.
        shape: shape of the blocks of a stage.
        settings: settings of the run.

    Source: DeepSpeed-Ulysses (Jacobs et al., 2023), section 3; Llama 3 (Dubey et al., 2024), section 3.3.2.
    """
    ranks = settings.axis_sizes.get(axis, 1)
    if ranks == 1:
        return {}
    per_token = settings.compute_bytes * settings.accumulation_steps * shape.layers
    tokens = settings.tokens_per_micro_step
    queries, keys = shape.widths_on_rank(settings.tensor_parallel)
    if axis == "ulysses":
        return {"all_to_all": 2 * 2 * (queries + keys) * tokens * per_token}
    whole = 2 * keys * tokens * ranks * per_token
    return {"all_gather": 2 * whole, "reduce_scatter": whole}
