"""Settings with something else in them, and what differs between two of them in the words of the config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dsrun.config.knob import Section, Status
from dsrun.config.sections.offload import OffloadOptimizer, OffloadParam
from dsrun.estimate.prediction import Prediction
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings, Tier

#: What a search may change: ranks of an axis, how a pipeline runs, and the rest of what memory and time depend on.
Free = Literal["tensor", "pipe", "schedule", "stage", "batch", "recompute", "offload"]
EVERYTHING: frozenset[Free] = frozenset(get_args(Free))
#: Recomputation that a search tries, the fastest first: each needs less memory than the one before.
Recomputation = Literal["none", "selective", "every_block"]
RECOMPUTATIONS: tuple[Recomputation, ...] = get_args(Recomputation)
#: What offloading puts away: optimizer, parameters; each leaves less on the device than the one before.
OFFLOADS: tuple[tuple[Tier, Tier], ...] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("nvme", "nvme"),
)
#: What stands for the folder on the drives, which only the user can name.
NVME_PATH = "FOLDER"
_OFFLOADING: tuple[tuple[str, type[Section]], ...] = (
    ("zero_optimization.offload_optimizer.device", OffloadOptimizer),
    ("zero_optimization.offload_param.device", OffloadParam),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings with what they come to.

    Attributes:
        prediction: prediction for these settings.
        changes: (key, value) of what differs from the settings asked about, in the words of the config or a flag.
    """

    prediction: Prediction
    changes: tuple[tuple[str, int | str | bool], ...]


def with_offload(settings: RunSettings, optimizer: Tier, param: Tier) -> RunSettings:
    """Returns the settings with another offload, and the keys of it that this version refuses."""
    if (settings.offload_optimizer, settings.offload_param) == (optimizer, param):
        return settings
    others = tuple(key for key in settings.planned if ".offload_" not in key)
    tiers = (optimizer, param)
    asked = tuple(key for (key, section), tier in zip(_OFFLOADING, tiers, strict=True) if _is_planned(section, tier))
    return replace(settings, offload_optimizer=optimizer, offload_param=param, planned=(*others, *asked))


def _is_planned(section: type[Section], tier: Tier) -> bool:
    if tier == "none":
        return False
    return section.status_of("device") is Status.PLANNED or tier in section.knob_of("device").planned


def offloads(machine: Machine) -> tuple[tuple[Tier, Tier], ...]:
    """Returns what can be offloaded: into memory whose size is known, and into host memory only from a GPU's."""
    known = {"none"}
    if machine.host_memory_bytes is not None and not machine.on_cpu:
        known.add("cpu")
    if machine.host_memory_bytes is not None and machine.nvme_bytes is not None:
        known.add("nvme")
    return tuple(pair for pair in OFFLOADS if known.issuperset(pair))


def takes_offload(settings: RunSettings, optimizer: Tier, param: Tier) -> bool:
    """Whether the runtime takes an offload at a stage: parameters at stage 3 only, nothing at stage 0."""
    return settings.stage == 3 or (param == "none" and (settings.stage > 0 or optimizer == "none"))


def recomputation_of(settings: RunSettings) -> str:
    """Returns the policy, `none` where nothing is recomputed."""
    return "none" if settings.recompute == "none" else settings.policy


def with_recomputation(settings: RunSettings, policy: Recomputation) -> RunSettings:
    """Returns the settings with another policy of recomputation."""
    if recomputation_of(settings) == policy:
        return settings
    return replace(
        settings,
        recompute="none" if policy == "none" else "blocks",
        policy="every_block" if policy == "none" else policy,
        interval=None,
        ratio=None,
        memory_budget=None,
        kept_segments=None,
    )


def with_axes(settings: RunSettings, *, tensor: int, stages: int) -> RunSettings:
    """Returns the settings with other sizes of two axes; what makes no sense with these goes back to its default.

    Args:
        settings: settings to change.
        tensor: ranks that share each layer.
        stages: pipeline stages.
    """
    if (tensor, stages) == (settings.tensor_parallel, settings.stages):
        return settings
    changed = replace(settings, axis_sizes={**settings.axis_sizes, "tensor": tensor, "pipe": stages})
    if tensor != settings.tensor_parallel:
        changed = replace(changed, sequence_slices=tensor > 1 and settings.sequence % tensor == 0)
    if stages == settings.stages:
        return changed
    if stages == 1:
        return replace(changed, schedule="1f1b", chunks_per_rank=1, partition="cost", once_an_update=False)
    return replace(changed, partition="cost", once_an_update=True)


def with_samples(settings: RunSettings, samples: int, micro_batch: int, machine: Machine) -> RunSettings | None:
    """Returns the settings with so many samples in an optimizer step of all ranks; None where these do not divide."""
    each, rest = divmod(samples, micro_batch * settings.ranks_of("batch", machine.ranks))
    if rest or not each:
        return None
    changed = replace(settings, micro_batch=micro_batch, accumulation_steps=each)
    return changed if takes_micro_batches(changed) else None


def takes_micro_batches(settings: RunSettings) -> bool:
    """Whether the schedule takes that many micro batches."""
    return settings.schedule != "interleaved" or settings.accumulation_steps % settings.stages == 0


def stages_of_zero(settings: RunSettings) -> tuple[int, ...]:
    """Returns the ZeRO stages that differ: stage 3 is 2 in a pipeline, but where chunks take turns."""
    return (0, 1, 2, 3) if settings.stages == 1 or settings.chunks_take_turns else (0, 1, 2)


def stage_in(settings: RunSettings, stage: int) -> int:
    """Returns what a ZeRO stage that a config has comes to in the layout of the settings."""
    return min(stage, max(stages_of_zero(settings)))


def changes(
    asked: RunSettings, changed: RunSettings, *, ranks: int, asked_ranks: int
) -> Iterator[tuple[str, int | str | bool]]:
    """Yields (key, value) of what differs, in the words of the config or a flag.

    Args:
        asked: settings that were asked about.
        changed: other settings.
        ranks: ranks of the job with these.
        asked_ranks: ranks of the job that was asked about.
    """
    if changed.stage != stage_in(changed, asked.stage):
        yield "zero_optimization.stage", changed.stage
    if changed.tensor_parallel != asked.tensor_parallel:
        yield "tensor_parallel.autotp_size", changed.tensor_parallel
    if changed.tensor_parallel > 1 and changed.sequence_slices != asked.sequence_slices:
        yield "tensor_parallel.sequence_parallel", changed.sequence_slices
    if changed.stages != asked.stages:
        yield "pipeline.stages", changed.stages
    if changed.stages > 1 and changed.schedule != asked.schedule:
        yield "pipeline.schedule", changed.schedule
    if changed.stages > 1 and changed.chunks_per_rank != asked.chunks_per_rank and changed.schedule != "zbv":
        yield "pipeline.virtual_stages", changed.chunks_per_rank
    if changed.stages > 1 and changed.partition != asked.partition and isinstance(changed.partition, str):
        yield "pipeline.partition", changed.partition
    if changed.compute_bytes != asked.compute_bytes:
        yield "bf16.enabled", True
    if recomputation_of(changed) != recomputation_of(asked):
        yield "activation_checkpointing.policy", recomputation_of(changed)
    before, after = (asked.offload_optimizer, asked.offload_param), (changed.offload_optimizer, changed.offload_param)
    for (key, _), tier, other in zip(_OFFLOADING, after, before, strict=True):
        if tier != other:
            yield key, tier
        if tier == "nvme" != other:
            yield key.replace(".device", ".nvme_path"), NVME_PATH
    if (changed.micro_batch, changed.accumulation_steps) != (asked.micro_batch, asked.accumulation_steps):
        yield "train_micro_batch_size_per_gpu", changed.micro_batch
        yield "gradient_accumulation_steps", changed.accumulation_steps
    if ranks != asked_ranks:
        yield "-n", ranks


def rounded(seconds: float) -> float:
    """Returns a time in which floors that differ by less than one part in a thousand are equal."""
    return float(f"{seconds:.3g}")
