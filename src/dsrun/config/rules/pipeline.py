"""What the sections of a pipeline say together: schedules and chunks, ZeRO inside a stage, micro batches to fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dsrun.choices.gather_plan import sets_of_chunks
from dsrun.config.batch import STEPS_KEY, BatchSizes
from dsrun.config.findings import Code, Report
from dsrun.config.sections.parallel import Pipeline
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule, misfit_of_micros
from dsrun.pipeline_schedules.simulate import equal_costs, simulate

if TYPE_CHECKING:
    from dsrun.config.config import Config

_VIRTUAL = "pipeline.virtual_stages"
_SCHEDULE = "pipeline.schedule"
_ZERO = "zero_optimization.stage"
_OFFLOAD = "zero_optimization.offload_param.device"
_TURNS = (
    f'write `{_SCHEDULE}` "breadth_first" and a larger `{_VIRTUAL}`, where chunks take turns; that keeps the '
    "activations of all micro batches: compare with `dsrun plan`"
)
_ONE_CHUNK: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero_bubble")
#: Keys of DeepSpeed's that change nothing here, with the reason.
_IDLE: Mapping[str, str] = {
    "pipe_partitioned": "what travels between stages is cut over no ranks",
    "grad_partitioned": "what travels between stages is cut over no ranks",
    "use_reentrant": "there is one way of recomputing, with the same results",
}


def check_pipeline(
    config: Training, report: Report, place_of: Callable[[str], Position], is_given: Callable[[str], bool]
) -> None:
    """Reports combinations.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
        is_given: whether a dotted path was written.
    """
    section = config.pipeline
    for name, reason in _IDLE.items():
        if not getattr(section, name):
            key = f"pipeline.{name}"
            report.note(Code.NO_EFFECT, key, f"`{key}` has no effect: {reason}", place_of(key))
    _chunks(config, report, place_of, is_given)
    _recomputation(config, report, place_of)
    if section.count > 1:
        _zero(config, report, place_of)
        _reduction(config, report, place_of)
        _boundary(config, report, place_of)


def check_micro_batches(config: Config, batch: BatchSizes | None, report: Report) -> None:
    """Reports too few micro batches for the stages, a number that the schedule does not take, or too few data ranks.

    Args:
        config: a checked config.
        batch: batch sizes, where they are known.
        report: report that receives the findings.
    """
    section = config.pipeline
    stages, schedule = section.count, section.schedule_name
    micros = batch.accumulation_steps if batch is not None else config.gradient_accumulation_steps
    # What is refused anyhow leads to no number.
    if stages == 1 or micros is None or {"pipeline.stages", _SCHEDULE, _VIRTUAL, STEPS_KEY} & report.broken_keys:
        return
    origin = config.provenance[STEPS_KEY].position
    at = origin or config.provenance[_SCHEDULE].position or config.batch_place()
    said = (
        f"`{STEPS_KEY}` is {micros}"
        if origin is not None
        else f"the batch sizes come to {micros} micro batch{'es' if micros != 1 else ''}"
    )
    if batch is not None and config.gathers_chunks and config.zero_optimization.offload_param.device == "none":
        _compare_turns(config, batch.train_batch_size // (batch.micro_batch * batch.accumulation_steps), report)
    if (problem := misfit_of_micros(schedule, ranks=stages, micros=micros, given=said)) is not None:
        report.error(Code.COMBINATION, STEPS_KEY, problem.message, at, problem.hint)
    elif micros < stages:
        share = _waiting(section, micros)
        message = (
            f"{said} on {stages} pipeline stages: each rank waits for {share:.0%} of a step, under the schedule "
            f"`{schedule}`"
        )
        less = _waiting(section, 4 * stages)
        hint = f"4 micro batches a stage, {4 * stages}, bring that to {less:.0%}"
        report.warning(Code.BATCH, STEPS_KEY, message, at, hint)


def _compare_turns(config: Config, data_ranks: int, report: Report) -> None:
    """Notes chunks that take turns and yet hold no less than whole parameters: few ranks share out the slices."""
    chunks = config.pipeline.chunks_per_rank
    sets = 1 if config.zero_optimization.stage3_prefetch_bucket_size == 0 else sets_of_chunks(chunks)
    share = 1 / data_ranks + sets / chunks
    if share < 1:
        return
    message = (
        f"`{_ZERO}` is 3, with {data_ranks} data rank{'s' if data_ranks != 1 else ''} and {chunks} chunks a rank: "
        f"slices and gathered chunks take {share:.3g} times the parameters of a stage"
    )
    at = config.provenance[_ZERO].position or config.batch_place()
    larger = f"; or a larger `{_VIRTUAL}`" if data_ranks > 1 else ""
    report.note(Code.COMBINATION, _ZERO, message, at, f"write 2, which holds them once{larger}")


def _waiting(section: Pipeline, micros: int) -> float:
    """Returns the part of a step that ranks wait, where the times of all chunks are alike."""
    name, ranks = section.schedule_name, section.count
    schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=section.chunks_per_rank)
    return simulate(schedule, equal_costs(schedule.chunks)).bubble_share


def _chunks(
    config: Training, report: Report, place_of: Callable[[str], Position], is_given: Callable[[str], bool]
) -> None:
    section = config.pipeline
    schedule, virtual = section.schedule_name, section.virtual_stages
    if schedule in _ONE_CHUNK and virtual > 1:
        message = f"`{_VIRTUAL}` is {virtual}, and the schedule `{schedule}` has one chunk a rank"
        hint = f'leave it out, or write `{_SCHEDULE}` "interleaved" or "breadth_first"'
        report.error(Code.COMBINATION, _VIRTUAL, message, place_of(_VIRTUAL), hint)
    elif schedule == "zbv" and virtual != 2 and is_given(_VIRTUAL):
        message = f"`{_VIRTUAL}` is {virtual}, and the schedule `zbv` has two chunks a rank"
        report.error(Code.COMBINATION, _VIRTUAL, message, place_of(_VIRTUAL), "leave it out, or write 2")
    elif isinstance(section.partition, tuple) and section.stages != "auto":
        parts, wanted = len(section.partition) - 1, section.chunks
        if parts != wanted:
            key = "pipeline.partition"
            each = section.chunks_per_rank
            message = (
                f"`{key}`: {list(section.partition)} bounds {parts} {'chunk' if parts == 1 else 'chunks'}; expected "
                f"{wanted}, {'one' if each == 1 else each} for each of {section.count} stages"
            )
            hint = f"write {wanted + 1} numbers: the first layer of each chunk, and the number of layers"
            report.error(Code.COMBINATION, key, message, place_of(key), hint)


def _recomputation(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    interval, policy = config.pipeline.activation_checkpoint_interval, config.activation_checkpointing.policy
    if interval and policy not in (None, "none"):
        key = "pipeline.activation_checkpoint_interval"
        message = f'`{key}` is {interval}, and `activation_checkpointing.policy` "{policy}" chooses layers, too'
        report.error(Code.COMBINATION, key, message, place_of(key), "leave one of them out")


def _zero(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    stage, section = config.zero_optimization.stage, config.pipeline
    stages = section.count
    if stage == 2 and not section.takes_turns:
        message = (
            f"`{_ZERO}` 2 holds the sums of gradients whole, as 1 does, with {stages} pipeline stages: they are summed "
            "over ranks once an update"
        )
        hint = f"keep it: results are the same; for smaller sums, {_TURNS}"
        report.note(Code.NO_EFFECT, _ZERO, message, place_of(_ZERO), hint)
    elif is_offload_refused(config):
        message = (
            f"`{_OFFLOAD}` is {config.zero_optimization.offload_param.device} with {stages} pipeline stages under the "
            f"schedule `{section.schedule_name}`: every micro batch would gather the stage's parameters for forward "
            f"and for backward and cut up its gradients; {_gathering(config)}"
        )
        report.error(Code.COMBINATION, _OFFLOAD, message, place_of(_OFFLOAD), f"leave it out; or {_TURNS}")
    elif stage == 3 and not config.gathers_chunks:
        message = (
            f"`{_ZERO}` 3 holds parameters as 2 does with {stages} pipeline stages under the schedule "
            f"`{section.schedule_name}`: whole from the first micro batch to the last; to gather them for each would "
            f"take {_gathering(config)}"
        )
        hint = f"keep it: results are the same; to hold fewer parameters, {_TURNS}"
        report.note(Code.NO_EFFECT, _ZERO, message, place_of(_ZERO), hint)


def is_offload_refused(config: Training) -> bool:
    """Whether parameters are to leave the device though every micro batch needs all that a rank has."""
    asked = config.zero_optimization.stage == 3 and config.zero_optimization.offload_param.device != "none"
    return asked and config.pipeline.count > 1 and not config.gathers_chunks


def _gathering(config: Training) -> str:
    """Returns what stage 3 costs in bytes, as far as the config tells it."""
    wide = 2 if config.bf16.enabled or config.fp16.enabled else 4
    # Of a layer that ranks share, each gathers its part. Norms and what else is whole on all of them are few.
    parts, micros = config.pipeline.count * config.tensor_parallel.size, config.gradient_accumulation_steps
    formula = f"M x 3 x {wide}N/{parts} bytes a rank and update, of N parameters and M micro batches"
    # Chunks that take turns are gathered twice, and reduced once, in fp32.
    once = 2 * wide + 4
    if micros is None:
        return f"{formula}, where chunks that take turns move {once}N/{parts}"
    each = micros * 3 * wide / parts
    return f"{formula}: {each:.3g} bytes a parameter, where chunks that take turns move {once / parts:.3g}"


def _reduction(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    key = "gradient_reduction"
    if config.gradient_reduction == "micro_step":
        message = (
            f'`{key}` is "micro_step" with {config.pipeline.count} pipeline stages, whose micro batches overlap; '
            'expected "update"'
        )
        report.error(Code.COMBINATION, key, message, place_of(key), "leave it out: it is once an update then")


def _boundary(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    boundary = config.pipeline.boundary_dtype
    if boundary is not None and boundary not in _formats(config):
        key = "pipeline.boundary_dtype"
        message = f'`{key}` "{boundary}" is not the format of the model: results differ from those of one stage'
        report.note(Code.DIFFERENT_DEFAULT, key, message, place_of(key))


def _formats(config: Training) -> Iterator[str]:
    """Yields formats that activations lose nothing in."""
    if config.bf16.enabled:
        yield "bf16"
    if config.fp16.enabled:
        yield "fp16"
    yield "fp32"
