"""What of a config decides memory, traffic and time, as plain numbers. Configs are read here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal

from dsrun.choices.gather_plan import GatherBudgets
from dsrun.config.axes import axes_of, divide, divides, sizes_of
from dsrun.config.batch import MICRO_KEY, BatchSizes, solve
from dsrun.config.buckets import gather_budgets
from dsrun.config.config import Config, is_left_to_script
from dsrun.config.findings import Code, Severity
from dsrun.config.sections.activation import Policy
from dsrun.config.sections.optimizer_table import row_of
from dsrun.estimate.run.recomputation import RecomputationPlan, recomputed
from dsrun.mesh_spec import MeshSpec, Role
from dsrun.pipeline_schedules.generate import ScheduleName

Tier = Literal["none", "cpu", "nvme"]
Recompute = Literal["none", "blocks"]

_ADAM_STATES = 2.0
#: Elements of a block of codes; scales of blocks that two runs share; elements that places are multiples of.
_CODE_BLOCK, _SHARED_SCALES, _PLACE_NUMEL = 256, 64, 256
_SAMPLE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that cost something.

    Attributes:
        stage: ZeRO stage.
        compute_bytes: bytes of a parameter in forward and backward, and of its gradient: 4 or 2.
        master_bytes: bytes of a master: 4, or 2 with 16-bit masters.
        sum_bytes: bytes of a sum of gradients; None: as of a master.
        state_bytes: bytes of an optimizer state's value, and of what the optimizer computes in; None: as of a master.
        states_per_element: optimizer states of each element, counted in values of `state_bytes`: 2 for Adam, 0.51 in 8
            bits.
        offload_optimizer: tier of masters and optimizer states; `none` is the memory where the rank computes.
        offload_ratio: share of masters and optimizer states that leaves for there, in whole units.
        offload_param: tier of parameter shards between uses; `none` is the memory where the rank computes.
        steps_ahead: the optimizer in host memory steps before the norm is known, into a second set of states.
        state_format: format of optimizer states off the device.
        split_master: masters lie in halves there, of which the upper one is the parameter.
        state_buffers: units whose masters and states may be in host memory, where they live on NVMe.
        param_buffers: number of parameter slices that may be on their way through host memory, where parameters live on
            NVMe.
        params_in_memory: elements of parameter slices that stay in host memory, where parameters live on NVMe.
        pin_memory: host memory that copies touch is page-locked.
        recompute: parts of the model with activations that backward computes again: `none` or `blocks`.
        policy: rule that picks the blocks to recompute, where `recompute` is `blocks`.
        interval: blocks that are recomputed together, for policy `interval`.
        ratio: share of the blocks, for policy `ratio`.
        memory_budget: bytes that activations of the blocks may take, for policy `memory_budget`.
        kept_segments: block inputs that are kept with recomputation; None for one a block.
        cut_activations: whether activations that are kept with recomputation are cut over the tensor-parallel ranks.
        activations_on_cpu: whether activations that are kept with recomputation move to host memory.
        activation_buffers: number of kept block inputs that host memory has room for, where the rest goes on to a disk;
            None for all.
        packed_activations: whether activations that are kept with recomputation are packed to 8 bits.
        sequence_slices: norms between cut layers work on slices of the sequence, so that what they keep is cut, too.
        tensor_overlaps: gradients of inputs are summed over ranks while those of weights are computed.
        axis_sizes: ranks along the axes that have a size of their own, by name of the axis; 1 where one is not named.
        schedule: order of forwards and backwards of pipeline stages.
        chunks_per_rank: chunks of layers on each stage.
        partition: way in which blocks become chunks, in the words of `pipeline.partition`.
        boundary_bytes: bytes of an activation's element between stages; None: as in the model.
        once_an_update: whether gradients are summed up over the ranks once an update, not after every micro step.
        stages: pipeline stages; follows from `axis_sizes`.
        tensor_parallel: ranks that share each layer; follows from `axis_sizes`.
        sequence_parallel: ranks that share each sequence; follows from `axis_sizes`.
        micro_batch: samples of one rank in one forward.
        accumulation_steps: forwards of one rank in one optimizer step.
        sequence: tokens of a sample.
        gather: limits on what stage 3 may keep gathered, in elements.
        memory_copies: the state is copied to host memory every few steps.
        saves_beside: checkpoints are written from a copy, while training goes on.
        planned: keys of the config that this version refuses, because it does not do them yet.
        notes: assumptions that were made, in words.
    """

    stage: int = 0
    compute_bytes: int = 4
    master_bytes: int = 4
    sum_bytes: int | None = None
    state_bytes: int | None = None
    states_per_element: float = _ADAM_STATES
    offload_optimizer: Tier = "none"
    offload_ratio: float = 1.0
    offload_param: Tier = "none"
    steps_ahead: bool = False
    state_format: Literal["fp32", "bf16", "int8"] = "fp32"
    split_master: bool = False
    state_buffers: int = 4
    param_buffers: int = 5
    params_in_memory: int = 0
    pin_memory: bool = True
    recompute: Recompute = "none"
    policy: Policy = "every_block"
    interval: int | None = None
    ratio: float | None = None
    memory_budget: int | None = None
    kept_segments: int | None = None
    cut_activations: bool = False
    activations_on_cpu: bool = False
    activation_buffers: int | None = None
    packed_activations: bool = False
    sequence_slices: bool = False
    tensor_overlaps: bool = False
    axis_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    schedule: ScheduleName = "1f1b"
    chunks_per_rank: int = 1
    partition: str | tuple[int, ...] = "cost"
    boundary_bytes: int | None = None
    once_an_update: bool = False
    stages: int = field(init=False)
    tensor_parallel: int = field(init=False)
    sequence_parallel: int = field(init=False)
    micro_batch: int = 1
    accumulation_steps: int = 1
    sequence: int = _SAMPLE_TOKENS
    gather: GatherBudgets = field(default_factory=GatherBudgets)
    memory_copies: bool = False
    saves_beside: bool = False
    planned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fewest = prod(self.axis_sizes.values())
        object.__setattr__(self, "stages", self.ranks_of("pipe", fewest))
        object.__setattr__(self, "tensor_parallel", self.ranks_of("tensor", fewest))
        object.__setattr__(self, "sequence_parallel", self.ranks_of("context", fewest))

    def recomputed(self, layers: int) -> RecomputationPlan:
        """Returns what becomes of `layers` blocks."""
        policy = self.policy if self.recompute == "blocks" else "none"
        return recomputed(policy, layers, interval=self.interval, ratio=self.ratio, kept=self.kept_segments)

    def states_of(self, numel: int) -> int:
        """Returns the bytes of all optimizer states of `numel` elements."""
        return round((self.state_bytes or self.master_bytes) * self.states_per_element * numel)

    def away_states_of(self, numel: int) -> int:
        """Returns the bytes of the optimizer states of a unit's slice of `numel` elements, off the device."""
        if self.state_format == "int8":
            scales = -(-(numel // _CODE_BLOCK + _SHARED_SCALES) // _PLACE_NUMEL) * _PLACE_NUMEL
            return round(self.states_per_element * (numel + 4 * scales))
        return self.states_of(numel) // (2 if self.state_format == "bf16" else 1)

    def sums_of(self, numel: int) -> int:
        """Returns the bytes of the gradient sums of `numel` elements."""
        return (self.sum_bytes or self.master_bytes) * numel

    def window_of(self, numel: int) -> int:
        """Returns the bytes through which the optimizer sees a range of `numel` elements in another format."""
        seen = self.state_bytes or self.master_bytes
        narrower = [self.master_bytes != seen, self.sums_of(1) != seen or self.master_bytes != seen]
        return sum(narrower) * seen * numel

    @property
    def has_master(self) -> bool:
        """Whether masters are tensors of their own: in one format the optimizer updates the parameters themselves."""
        return self.compute_bytes != self.master_bytes

    @property
    def trained_leave(self) -> bool:
        """Whether slices of trained parameters lie off the device: not where an optimizer updates these themselves."""
        return self.frozen_leave and (self.has_master or self.offload_optimizer != "none")

    @property
    def frozen_leave(self) -> bool:
        """Whether slices of frozen parameters lie off the device."""
        return self.stage == 3 and self.offload_param != "none"

    @property
    def chunks_take_turns(self) -> bool:
        """Whether a pipeline stage is through with all micro batches of a chunk before its next one begins."""
        return self.stages > 1 and self.schedule == "breadth_first" and self.chunks_per_rank > 1

    @property
    def tokens_per_micro_step(self) -> int:
        """Tokens that one rank holds activations of."""
        return -(-self.micro_batch * self.sequence // self.sequence_parallel)

    def fits_ranks(self, ranks: int) -> bool:
        """Whether so many ranks divide by the parallel sizes."""
        return divides(ranks, self.axis_sizes)

    def ranks_of(self, role: Role, ranks: int) -> int:
        """Returns how many of the job's ranks are peers in a role.

        Args:
            role: the role.
            ranks: ranks of the job.
        """
        return _peers(ranks, tuple(self.axis_sizes.items()), role)

    def grid(self, ranks: int) -> MeshSpec:
        """Returns the grid of the job's ranks.

        Args:
            ranks: ranks of the job.
        """
        return _grid(ranks, tuple(self.axis_sizes.items()))

    @property
    def sequence_parts(self) -> int:
        """Slices of the sequence that norms and kept inputs of blocks are cut into."""
        return self.tensor_parallel if self.sequence_slices else 1

    @property
    def can_run(self) -> bool:
        """Whether this version runs it."""
        return not self.planned


# A search asks thousands of times about a few grids.
@cache
def _grid(ranks: int, sizes: tuple[tuple[str, int], ...]) -> MeshSpec:
    return divide(ranks, dict(sizes))


@cache
def _peers(ranks: int, sizes: tuple[tuple[str, int], ...], role: Role) -> int:
    return _grid(ranks, sizes).role_size(role)


def read_settings(
    config: Config,
    *,
    ranks: int,
    sequence: int | None = None,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
    longest: int | None = None,
) -> RunSettings:
    """Takes from a config what costs something.

    Args:
        config: a checked config; keys that this version refuses as planned may be set.
        ranks: ranks of the job.
        sequence: tokens of a sample; None assumes 4096, or `longest` where that is less.
        micro_batch: samples of one micro batch, in place of the config's; the accumulation steps follow. None for the
            config's.
        recompute: choice of the activations to recompute, in place of the config's; None for the config's.
        longest: tokens of a sample that the model is made for; None where that is not known.

    Raises:
        ConfigError: the ranks do not divide by the parallel sizes, or the batch does not fit them.
    """
    zero, activations = config.zero_optimization, config.activation_checkpointing
    mesh = axes_of(config, ranks)
    notes: list[str] = []
    if sequence is None:
        sequence = min(_SAMPLE_TOKENS, longest or _SAMPLE_TOKENS)
        notes.append(f"`--seq` is not given: {sequence} tokens a sample")
    if longest is not None and sequence > longest:
        notes.append(f"the model is made for samples of up to {longest:,} tokens")
    planned = tuple(
        dict.fromkeys(
            finding.key
            for finding in config.findings
            if finding.code is Code.PLANNED and finding.severity is Severity.ERROR
        )
    )
    asked = activations.chosen_policy not in ("none", "compiler")
    interval, boundary = config.pipeline.activation_checkpoint_interval, config.pipeline.boundary_dtype
    if recompute == "blocks" and not asked:
        notes.append('blocks are recomputed by the script, or with `activation_checkpointing.policy` "every_block"')
    if activations.keep_operations:
        notes.append("`activation_checkpointing.keep_operations` is counted as matrix products and attention")
    if activations.chosen_policy == "memory_budget":
        notes.append(
            "`activation_checkpointing.memory_budget` is solved from what a run measures; counted as the budget"
        )
    if activations.chosen_policy == "compiler":
        notes.append("what torch.compile recomputes is not known before: counted as nothing recomputed")
    if config.data_types.keep_in_fp32_modules not in ("auto", ()):
        notes.append("what stays in fp32 is counted where a run has told which parameters that are, else in 16 bits")
    if config.fp8.enabled:
        notes.append(
            "`fp8` keeps the bytes of its 16-bit format, which is counted; its products are faster than counted"
        )
    if config.cutting_stage != zero.stage:
        notes.append(
            f"`zero_optimization.stage` {zero.stage} holds parameters as 2 does under the schedule "
            f"`{config.pipeline.schedule_name}`: counted as 2"
        )
    batch = _batch(config, mesh.role_size("batch"), micro_batch, notes)
    away = zero.offload_param if zero.offload_optimizer.device == "none" else zero.offload_optimizer
    half = config.bf16.enabled or config.fp16.enabled
    return RunSettings(
        stage=config.cutting_stage,
        compute_bytes=2 if half else 4,
        **_owned_bytes(config),
        states_per_element=_states(config, notes),
        offload_optimizer=zero.offload_optimizer.device,
        offload_ratio=_offload_ratio(config, notes),
        offload_param=zero.offload_param.device,
        steps_ahead=zero.offload_optimizer.super_offload and zero.offload_optimizer.device == "cpu",
        state_format=zero.offload_optimizer.state_format,
        split_master=config.cutting_stage == 3 and zero.offload_optimizer.split_master,
        state_buffers=zero.offload_optimizer.buffer_count,
        param_buffers=zero.offload_param.buffer_count,
        params_in_memory=zero.offload_param.max_in_cpu,
        pin_memory=away.pin_memory,
        recompute=recompute or ("blocks" if asked or interval else "none"),
        policy=activations.chosen_policy if asked else "interval" if interval else "every_block",
        interval=activations.interval if asked else interval or None,
        ratio=activations.ratio,
        memory_budget=activations.memory_budget if recompute != "none" else None,
        # With a written policy the key is the room of a buffer, and says nothing of segments.
        kept_segments=activations.number_checkpoints if activations.policy is None else None,
        cut_activations=activations.partition_activations,
        activations_on_cpu=activations.cpu_checkpointing,
        activation_buffers=activations.nvme_buffer_count if activations.nvme_path else None,
        packed_activations=activations.packing == "int8",
        sequence_slices=config.tensor_parallel.sequence_parallel and config.tensor_parallel.size > 1,
        tensor_overlaps=config.tensor_parallel.tp_overlap_comm,
        axis_sizes=sizes_of(config),
        schedule=config.pipeline.schedule_name,
        chunks_per_rank=config.pipeline.chunks_per_rank if config.pipeline.count > 1 else 1,
        partition=config.pipeline.partition,
        boundary_bytes=None if boundary is None else 4 if boundary == "fp32" else 2,
        once_an_update=config.reduces_once_an_update,
        micro_batch=batch.micro_batch,
        accumulation_steps=batch.accumulation_steps,
        sequence=sequence,
        gather=gather_budgets(config),
        memory_copies=config.checkpoint.memory_copy.every is not None,
        saves_beside=config.checkpoint.asynchronous,
        planned=planned,
        notes=tuple(notes),
    )


def _offload_ratio(config: Config, notes: list[str]) -> float:
    """Returns the share that leaves; the largest where only a run can tell what is free."""
    optimizer = config.zero_optimization.offload_optimizer
    if optimizer.ratio != "auto":
        return optimizer.ratio
    if optimizer.device != "none":
        notes.append('`offload_optimizer.ratio` is "auto", which a run decides by free memory: counted as 1')
    return 1.0


def _owned_bytes(config: Config) -> dict[str, int]:
    """Returns the bytes of masters, sums of gradients and values of states."""
    bf16, fp16, sums = config.bf16, config.fp16, config.data_types.grad_accum_dtype
    has_half_masters = (bf16.enabled and bf16.bf16_master_weights_and_grads) or (
        fp16.enabled and fp16.fp16_master_weights_and_grads
    )
    master = 2 if has_half_masters else 4
    return {
        "master_bytes": master,
        "sum_bytes": master if sums is None else 4 if sums == "fp32" else 2,
        "state_bytes": 2 if has_half_masters and bf16.enabled and bf16.bf16_optimizer_states else 4,
    }


def _batch(config: Config, data_ranks: int, micro_batch: int | None, notes: list[str]) -> BatchSizes:
    train, steps = config.train_batch_size, config.gradient_accumulation_steps
    micro = config.train_micro_batch_size_per_gpu
    place = f"{config.batch_place()}: "
    if micro_batch is not None:
        steps = None if train is not None else steps
        return solve(train, micro_batch, steps, data_parallel_size=data_ranks, place=place)
    if train is None and micro is None:
        reason = 'is "auto"' if is_left_to_script(config) else "is not set"
        notes.append(f"`{MICRO_KEY}` {reason}: 1 sample")
        return BatchSizes((steps or 1) * data_ranks, 1, steps or 1)
    return solve(train, micro, steps, data_parallel_size=data_ranks, place=place)


def _states(config: Config, notes: list[str]) -> float:
    section = config.optimizer
    if section is None:
        notes.append("no `optimizer` in the config: two states an element, as Adam has")
        return _ADAM_STATES
    return row_of(section.type).states_with(section.params.model_dump())
