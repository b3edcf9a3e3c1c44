"""What the keys of tensor parallelism say together: one size, one format, rules that can be read and cut something."""

from __future__ import annotations

import re
from collections.abc import Callable

from dsrun.config.findings import Code, Report
from dsrun.config.knob import Status
from dsrun.config.sections.parallel import LayerSpec, PartitionConfig, TensorParallel
from dsrun.config.sections.training import Training
from dsrun.config.text.tree import Position, show

_SECTION = "tensor_parallel"
_SIZE = f"{_SECTION}.autotp_size"
_GROUP_SIZE = f"{_SECTION}.tp.tp_size"
_RULES = f"{_SECTION}.partition_config"
_SIZE_KEYS = ("autotp_size", "tp")


def check_tensor(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports combinations.

    Args:
        config: every key valid on its own.
        report: report that receives the findings.
        place_of: place of a dotted path.
    """
    section = config.tensor_parallel
    _sizes(section, report, place_of)
    _rules(section, report, place_of)
    if section.size > 1 or section.autotp_size == "auto":
        _format(config, report, place_of)
    else:
        _idle(section, report, place_of)


def _sizes(section: TensorParallel, report: Report, place_of: Callable[[str], Position]) -> None:
    inner, outer = section.tp.tp_size, section.autotp_size
    if inner not in (1, outer) and outer:
        message = f"`{_GROUP_SIZE}` is {inner}, and `{_SIZE}` is {show(outer)}; expected one size"
        report.error(Code.COMBINATION, _GROUP_SIZE, message, place_of(_GROUP_SIZE), f"leave out `{_SECTION}.tp`")


def _format(config: Training, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports a format of the model other than that which the sections for it lead to."""
    written = config.tensor_parallel.dtype
    actual = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    if written in (None, actual):
        return
    key = f"{_SECTION}.dtype"
    said = "neither `bf16` nor `fp16` is enabled" if actual == "fp32" else f"`{actual}.enabled` is true"
    message = f'`{key}` is "{written}", and {said}: the model is in {actual}'
    way_out = f"leave out `{key}`" if written == "fp32" else f"leave out `{key}`, or write `{written}.enabled`"
    report.error(Code.COMBINATION, key, message, place_of(key), way_out)


def _idle(section: TensorParallel, report: Report, place_of: Callable[[str], Position]) -> None:
    """Warns of keys that ask for something where no layer is cut."""
    for name, info in TensorParallel.model_fields.items():
        key = f"{_SECTION}.{name}"
        works = TensorParallel.status_of(name) is Status.WORKS and name not in _SIZE_KEYS
        if works and getattr(section, name) != info.get_default(call_default_factory=True):
            message = f"`{key}` has no effect: `{_SIZE}` is {section.autotp_size}, and no layer is cut"
            report.warning(Code.NO_EFFECT, key, message, place_of(key), f"write `{_SIZE}`, or leave it out")


def _rules(section: TensorParallel, report: Report, place_of: Callable[[str], Position]) -> None:
    rules = section.partition_config
    if rules is None or rules == PartitionConfig():  # as DeepSpeed reads an empty object: not there
        return
    specs = f"{_RULES}.layer_specs"
    for place, spec in enumerate(rules.layer_specs):
        _rule(spec, f"{specs}[{place}]", report, place_of)
    has_preset = rules.use_default_specs and section.preset_model is not None
    if not (rules.layer_specs or has_preset or any(key.startswith(specs) for key in report.broken_keys)):
        strict = ", and `strict_mode` is true: every Linear is refused" if rules.strict_mode else ": nothing is cut"
        hint = f"name the layers there, or leave out `{_RULES}`: a model of Hugging Face has a plan of its own"
        report.error(Code.COMBINATION, specs, f"`{specs}` is empty{strict}", place_of(specs), hint)


def _rule(spec: LayerSpec, key: str, report: Report, place_of: Callable[[str], Position]) -> None:
    """Reports what is wrong with one rule."""

    def refuse(name: str, said: str, hint: str | None = None) -> None:
        full = f"{key}.{name}"
        if full not in report.broken_keys:
            report.error(Code.BAD_VALUE, full, f"`{full}` {said}", place_of(full), hint)

    if not spec.patterns:
        refuse("patterns", "is empty; expected a regular expression over names of parameters")
    for pattern in spec.patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            hint = f'write ".{pattern}" for any beginning' if pattern.startswith("*") else None
            refuse("patterns", f"has {show(pattern)}, which is no regular expression: {error}", hint)
    kind = spec.partition_type
    if spec.gather_output and kind != "column":
        refuse("gather_output", f'is true, and `partition_type` is "{kind}"; only outputs of a "column" are cut')
    if spec.grad_allreduce and kind != "skip":
        refuse("grad_allreduce", f'is true, and `partition_type` is "{kind}"; expected "skip", for layers left whole')
    if spec.shape is None:
        if spec.partition_dim not in (None, 0, 1):
            refuse("partition_dim", f"is {spec.partition_dim} without `shape`; a weight has dims 0 and 1")
        return
    dim = dim_of(spec)
    if kind == "skip":
        refuse("shape", 'is set, and `partition_type` is "skip": nothing is cut')
    elif dim >= len(spec.shape):
        refuse("shape", f"has {len(spec.shape)} dims, and dim {dim} is cut", "say which one in `partition_dim`")
    elif any(isinstance(item, tuple) and place != dim for place, item in enumerate(spec.shape)):
        refuse("shape", f"has a list of lengths in a dim other than {dim}, which is cut")


def dim_of(spec: LayerSpec) -> int:
    """Returns the dim that a rule cuts: its own, or what its type leads to."""
    if spec.partition_dim is not None:
        return spec.partition_dim
    return 1 if spec.partition_type == "row" else 0
