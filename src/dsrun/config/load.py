"""The way in: a path, text or dict becomes a checked `Config`, or one error with all that is wrong. Never prints.

[Note: configs of programs] Where a script takes dsrun for DeepSpeed, a dict that it hands over was made by a program,
and whoever runs that cannot mend it. Its odd forms are read with a note each (`programs.py`), and sections that would
only tell about the run are left out with one (`Section.only_tells`). Samples that it counts on every rank of a layer
count once. Keys that nobody knows, and what this version cannot do, are refused as in a file. A checkpoint is complete
when its save returns, for a dict and a file alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsrun.config.axes import axes_of, misfit, open_axes, wide_keys
from dsrun.config.batch import MICRO_KEY, STEPS_KEY, TRAIN_KEY
from dsrun.config.build import Build, build_section, is_comment
from dsrun.config.config import Config, Facts, is_left_to_script
from dsrun.config.findings import Code, Finding, Report, Severity, errors_of
from dsrun.config.legacy import translate
from dsrun.config.programs import fold_idle_keys, rewrite_program_forms
from dsrun.config.provenance import Kind, Provenance, Source
from dsrun.config.rules.all import check_rules
from dsrun.config.rules.pipeline import check_micro_batches, is_offload_refused
from dsrun.config.status import judge
from dsrun.config.suggest import suggest_key
from dsrun.config.text.source import ConfigSource, read_source
from dsrun.config.text.tree import Node, Position, show
from dsrun.errors import ConfigError

_ASYNCHRONOUS = "checkpoint.asynchronous"
_STAGES = "pipeline.stages"
_TENSOR_SIZE = "tensor_parallel.autotp_size"
_TENSOR_DTYPE = "tensor_parallel.dtype"
_BY_PLAN = "the fastest that fits, by the plan of the launch"
#: By axis: who says its size where a config leaves it open, and what is counted until then.
_WHO_SAYS = {
    "pipe": "the script: counted as 1, which is so unless it has a PipelineModule, or a launch plans more",
    "tensor": "the plan of a launch: counted as 1",
}


class NotAConfigError(ConfigError):
    """The file is readable and none of its keys belongs to a training config."""


@dataclass(frozen=True, slots=True)
class ScriptTensorParallel:
    """What a script has said of tensor parallelism by `tp_model_init`, before the config is read.

    Attributes:
        size: ranks that share a layer.
        dtype: format of the model: `fp32`, `fp16` or `bf16`.
    """

    size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """A config with everything there is to say about it.

    Attributes:
        config: the config; None where there are errors.
        findings: errors, warnings and notes, in the order of their places.
    """

    config: Config | None
    findings: tuple[Finding, ...]


def load(
    source: ConfigSource,
    *,
    world_size: int | None = None,
    as_deepspeed: bool = False,
    pipeline_stages: int | None = None,
    tensor_parallel: ScriptTensorParallel | None = None,
    planned: Mapping[str, int] | None = None,
) -> Config:
    """Loads and checks a config.

    Args:
        source: path of a file (JSON, or YAML by its ending), inline JSON, urlsafe base64 of JSON, or a dict.
        world_size: ranks of the job, where known: the batch sizes are solved with it.
        as_deepspeed: whether the script takes dsrun for DeepSpeed, see [Note: configs of programs].
        pipeline_stages: stages that the script's model has been cut into; None where it has been cut into none. The
            config may leave them out, and may say no other number.
        tensor_parallel: arguments of the script's `tp_model_init`; None where it has not called it. The config may
            leave the size out, and may say nothing else.
        planned: sizes of axes that a plan has found, by name of the axis: for those that the config and the script
            leave open.

    Raises:
        ConfigError: everything that is wrong, each with its place; with a world size also batch values and
            `tensor_parallel.autotp_size` where they are `"auto"` and follow from nothing.
    """
    inspection = inspect(
        source,
        world_size=world_size,
        as_deepspeed=as_deepspeed,
        pipeline_stages=pipeline_stages,
        tensor_parallel=tensor_parallel,
        planned=planned,
    )
    if inspection.config is None:
        error = errors_of(inspection.findings)
        assert error is not None, "a config is missing only where an error says why"
        raise error
    if world_size is None:
        return inspection.config
    if inspection.config.tensor_parallel.autotp_size == "auto":
        raise _unplanned(inspection.config)
    if inspection.config.batch is None:
        return inspection.config.with_world_size(world_size)  # says what `"auto"` left open
    return inspection.config


def inspect(
    source: ConfigSource,
    *,
    world_size: int | None = None,
    keep_planned: bool = False,
    as_deepspeed: bool = False,
    pipeline_stages: int | None = None,
    tensor_parallel: ScriptTensorParallel | None = None,
    planned: Mapping[str, int] | None = None,
) -> Inspection:
    """Checks a config without raising for what is wrong inside it.

    Args:
        source: path of a file (JSON, or YAML by its ending), inline JSON, urlsafe base64 of JSON, or a dict; see
            `load`.
        world_size: ranks of the job, if known, to solve the batch sizes as in `load`; a batch left to the script by
            `"auto"` is only a warning.
        keep_planned: return the config also where its only errors are keys of a later version, to plan with.
        as_deepspeed: whether the script takes dsrun for DeepSpeed, see [Note: configs of programs].
        pipeline_stages: stages that the script's model has been cut into, as for `load`.
        tensor_parallel: arguments of the script's `tp_model_init`, as for `load`.
        planned: sizes of axes that a plan has found, as for `load`.

    Raises:
        ConfigError: the source cannot be read or parsed at all.
    """
    root, name = read_source(source)
    given = source if isinstance(source, Mapping) else None
    return inspect_tree(
        root,
        name,
        world_size=world_size,
        keep_planned=keep_planned,
        as_deepspeed=as_deepspeed,
        given=given,
        pipeline_stages=pipeline_stages,
        tensor_parallel=tensor_parallel,
        planned=planned,
    )


def inspect_tree(
    root: Node,
    name: str,
    *,
    world_size: int | None = None,
    keep_planned: bool = False,
    as_deepspeed: bool = False,
    given: Mapping[str, Any] | None = None,
    pipeline_stages: int | None = None,
    tensor_parallel: ScriptTensorParallel | None = None,
    planned: Mapping[str, int] | None = None,
) -> Inspection:
    """Checks a config that has been read already.

    Args:
        root: root of the config as it was read; old forms in it are rewritten in place.
        name: name of the config in messages.
        world_size: ranks of the job, if known, to solve the batch sizes; see `inspect`.
        keep_planned: whether to return the config also where its only errors are keys of a later version; see
            `inspect`.
        as_deepspeed: whether the script takes dsrun for DeepSpeed, see [Note: configs of programs].
        given: dict that the config was read from; None where it was a file or text.
        pipeline_stages: stages that the script's model has been cut into, as for `load`.
        tensor_parallel: arguments of the script's `tp_model_init`, as for `load`.
        planned: sizes of axes that a plan has found, as for `load`.

    Raises:
        ConfigError: it is no object, or no config at all.
    """
    raw = root.plain()
    if root.members is None:
        kind = "a list" if isinstance(root.value, list) else show(raw)
        raise ConfigError(f"{root.at}: the config is {kind}; expected an object, `{{ ... }}`")
    _require_a_config(root, name)
    report = Report()
    by_program = as_deepspeed and given is not None
    sources = rewrite_program_forms(root, Config, report) if by_program else {}
    translate(root, report)
    build = Build(Config, report, sources)
    config = build_section(Config, root, "", build)
    if isinstance(config, Config):
        if as_deepspeed:
            config = _saves_like_deepspeed(config, build.sources, report, root.at)
        if pipeline_stages is not None:
            config = _with_stages(config, pipeline_stages, build.sources, report, root.at)
        if tensor_parallel is not None:
            config = _with_tensor_parallel(config, tensor_parallel, build.sources, report, root.at)
        config = config.with_facts(Facts(source=name, raw=raw, given=given, provenance=Provenance(build.sources)))
        if planned:
            config = _with_planned(config, planned)
        _check_whole(config, root, report, by_program=by_program)
        refused = [finding.key for finding in _refusals(report, keep_planned)]
        if world_size is None or _check_division(config, world_size, refused, report):
            if by_program and world_size is not None:
                config = _with_samples_once(config, world_size, report)
            config = _check_batch(config, world_size, report)
            check_micro_batches(config, config.batch, report)
    findings = fold_idle_keys(report.findings, root.at) if by_program else report.findings
    if _refusals(report, keep_planned) or not isinstance(config, Config):
        return Inspection(None, findings)
    return Inspection(config.with_facts(replace(config.facts, findings=findings)), findings)


def _require_a_config(root: Node, name: str) -> None:
    """Refuses a file of some other kind in one line, not with one complaint per key."""
    keys = [key for key in root.members or {} if not is_comment(key)]
    known = {*Config.model_fields, *Config.renamed, *Config.removed}
    # A single key may be a slip of the pen; one that is like none of ours is not.
    slip = len(keys) == 1 and suggest_key(keys[0], Config, "", Config) is not None
    if not keys or slip or any(key in known for key in keys):
        return
    shown = ", ".join(f"`{key[:30]}`" for key in keys[:3]) + (", ..." if keys[3:] else "")
    raise NotAConfigError(
        f"{name}: this is no dsrun config: {_none_of(len(keys))} known ({shown})",
        hint="if the file is for the script, put `--` before the script: `dsrun -- train.py --config FILE`",
    )


def _none_of(count: int) -> str:
    return "its only key is not" if count == 1 else f"none of its {count} keys is"


def _saves_like_deepspeed(config: Config, sources: dict[str, Source], report: Report, at: Position) -> Config:
    """Makes a save complete before it returns, unless the config says otherwise.

    Scripts of DeepSpeed remove older checkpoints, or end, as soon as `save_checkpoint` has returned.
    """
    if _ASYNCHRONOUS in sources and sources[_ASYNCHRONOUS].kind is Kind.FILE:
        return config
    reason = "a script of DeepSpeed takes a checkpoint for complete once `save_checkpoint` has returned"
    sources[_ASYNCHRONOUS] = Source(Kind.DERIVED, None, reason)
    message = f"`{_ASYNCHRONOUS}` is not set; read as false, for {reason}"
    report.note(Code.DIFFERENT_DEFAULT, _ASYNCHRONOUS, message, at, "set it to true to write beside training")
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": False})})


def _with_stages(config: Config, stages: int, sources: dict[str, Source], report: Report, at: Position) -> Config:
    """Takes the number of pipeline stages from the script's model where the config leaves it open."""
    written = config.pipeline.stages
    if written == "auto":
        sources[_STAGES] = Source(Kind.DERIVED, None, "from the script's PipelineModule")
        return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": stages})})
    if written != stages:
        message = f"`{_STAGES}` is {written}, and the script's PipelineModule has {stages}; expected the same number"
        place = sources[_STAGES].position or at
        hint = f'leave it out, or give PipelineModule "num_stages={written}"'
        report.error(Code.COMBINATION, _STAGES, message, place, hint)
    return config


def _with_tensor_parallel(
    config: Config, script: ScriptTensorParallel, sources: dict[str, Source], report: Report, at: Position
) -> Config:
    """Takes the ranks that share a layer from the script's `tp_model_init` where the config leaves them out."""
    dtype = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if script.dtype != dtype:
        said = "neither `bf16` nor `fp16` is enabled" if dtype == "fp32" else f"`{dtype}.enabled` is true"
        message = f"the script's tp_model_init has dtype {script.dtype}, and {said}: the model is in {dtype}"
        hint = f"give tp_model_init the dtype {dtype}" + (
            "" if script.dtype == "fp32" else f", or enable `{script.dtype}`"
        )
        report.error(Code.COMBINATION, _TENSOR_DTYPE, message, at, hint)
    written = config.tensor_parallel.autotp_size
    if written == "auto" or _TENSOR_SIZE not in sources or sources[_TENSOR_SIZE].kind is not Kind.FILE:
        sources[_TENSOR_SIZE] = Source(Kind.DERIVED, None, "from the script's tp_model_init")
        section = config.tensor_parallel.model_copy(update={"autotp_size": script.size})
        return config.model_copy(update={"tensor_parallel": section})
    if written != script.size:
        message = (
            f"`{_TENSOR_SIZE}` is {written}, and the script's tp_model_init has {script.size}; expected the same number"
        )
        place = sources[_TENSOR_SIZE].position or at
        report.error(Code.COMBINATION, _TENSOR_SIZE, message, place, "say it in one of the two places")
    return config


def _with_planned(config: Config, planned: Mapping[str, int]) -> Config:
    """Takes sizes of axes from a plan where config and script leave them open; one stage is no pipeline at all."""
    sizes = {axis: size for axis, size in planned.items() if axis in open_axes(config)}
    changed: dict[str, Any] = {}
    sources = dict(config.provenance)
    if sizes.get("pipe", 1) > 1:
        changed["pipeline"] = config.pipeline.model_copy(update={"stages": sizes["pipe"]})
        sources[_STAGES] = Source(Kind.DERIVED, config.provenance[_STAGES].position, _BY_PLAN)
    if "tensor" in sizes:
        changed["tensor_parallel"] = config.tensor_parallel.model_copy(update={"autotp_size": sizes["tensor"]})
        sources[_TENSOR_SIZE] = Source(Kind.DERIVED, config.provenance[_TENSOR_SIZE].position, _BY_PLAN)
    return config.model_copy(update=changed).with_facts(replace(config.facts, provenance=Provenance(sources)))


def _unplanned(config: Config) -> ConfigError:
    place = config.provenance[_TENSOR_SIZE].position or Position(config.source)
    return ConfigError(
        f'{place}: `{_TENSOR_SIZE}` is "auto", and no plan has been made for this job',
        hint="`dsrun --model MODEL --config FILE SCRIPT` makes one for the config that it is given; or write the "
        "number that `dsrun plan MODEL --fit` prints; 1 cuts no layer",
    )


def _check_whole(config: Config, root: Node, report: Report, *, by_program: bool) -> None:
    # What a rule refuses is not told to be without effect, too.
    stage = 3 if is_offload_refused(config) else config.cutting_stage
    stage = None if "zero_optimization.stage" in report.broken_keys else stage
    is_other = stage not in (None, config.zero_optimization.stage)
    judge(config, root, "", zero_stage=stage, report=report, by_program=by_program, is_other_stage=is_other)

    def place_of(path: str) -> Position:
        node, at = root, root.at
        for part in path.split("."):
            key, _, place = part.partition("[")
            members = node.members
            if members is None or key not in members:
                return at
            node, at = members[key], node.keys_at.get(key, members[key].at)
            if place and isinstance(node.value, list):
                node = node.value[int(place.rstrip("]"))]
                at = node.at
        return at

    check_rules(config, report, place_of, lambda path: path in config.provenance)


def _refusals(report: Report, keep_planned: bool) -> list[Finding]:
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    return [finding for finding in errors if not (keep_planned and finding.code is Code.PLANNED)]


def _check_division(config: Config, world_size: int, refused: Sequence[str], report: Report) -> bool:
    """Returns whether the ranks divide by the axes: else nothing can be said of the batch.

    What is wrong is said, unless a key that makes an axis wide is refused anyhow, by itself or with what it lies in.
    """
    finding = misfit(config, world_size)
    if finding is None:
        return True
    if not any(f"{key}.".startswith(f"{other}.") for key in wide_keys(config) for other in refused):
        report.error(finding.code, finding.key, finding.message, finding.position, finding.hint)
    return False


def _with_samples_once(config: Config, world_size: int, report: Report) -> Config:
    """Counts samples of ranks that share each layer once, where a program has counted them on every rank.

    The Trainer of transformers does, and DeepSpeed's own check of the sizes knows no tensor parallelism without an mpu.
    """
    train, micro, steps = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    sharing = config.tensor_parallel.size
    samples = axes_of(config, world_size).role_size("batch")
    if train is None or micro is None or steps is None or sharing == 1 or train != micro * steps * samples * sharing:
        return config
    message = (
        f"`{TRAIN_KEY}` is {train}, which counts the samples of all {world_size} ranks; read as {train // sharing}, "
        f"for {sharing} ranks that share each layer have the same samples"
    )
    report.note(Code.BATCH, TRAIN_KEY, message, config.batch_place())
    return config.model_copy(update={TRAIN_KEY: train // sharing})


def _check_batch(config: Config, world_size: int | None, report: Report) -> Config:
    if report.broken_keys.intersection((TRAIN_KEY, MICRO_KEY, STEPS_KEY)):
        return config
    left_to_script = is_left_to_script(config)
    if world_size is None:
        if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None and not left_to_script:
            message = f"neither `{MICRO_KEY}` nor `{TRAIN_KEY}` is set; a run needs one"
            report.warning(Code.BATCH, "", message, config.batch_place())
        return config
    try:
        solved = config.with_world_size(world_size)
        for axis, key in open_axes(config).items():
            message = f"`{key}` is left to {_WHO_SAYS[axis]}"
            report.note(Code.BATCH, key, message, config.provenance[key].position or Position(config.source))
        return solved
    except ConfigError as error:
        at = config.batch_place()
        for problem in error.problems:
            message = problem.message.removeprefix(f"{at}: ")
            if left_to_script or open_axes(config):
                whose = "left to the plan" if set(open_axes(config)) == {"tensor"} else "left to the script"
                report.warning(Code.BATCH, "", f'{message}; a value is "auto", {whose}', at, problem.hint)
            else:
                report.error(Code.BATCH, "", message, at, problem.hint)
    return config
