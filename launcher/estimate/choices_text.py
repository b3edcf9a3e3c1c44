"""Tables of other settings than those asked about, and the nearest that fit. Computes nothing but percentages."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dsrun.estimate.memory.tiers import Tier
from dsrun.estimate.prediction import Prediction
from dsrun.estimate.search.changes import Choice, recomputation_of
from dsrun.units import format_bytes, format_duration

from .config_changes import format_value
from .text import batch_text, floor_text, head_table, model_row, offload_text, taken_speeds_text

_GIB = 1 << 30
_WIDTH = 80
#: Rows of the table of layouts; `--json` has all.
_MOST_LAYOUTS = 24
#: Lines of a tier that are named where it is too small.
_LARGEST = 3


def describe_choices(predictions: Sequence[Prediction]) -> list[str]:
    """Returns a table of stages and offloads: memory, shortest step, whether they fit and whether this version runs."""
    first = predictions[0]
    columns = _memory_columns(first)
    header = f"{'stage':<6}{'offload':<33}" + "".join(f"{name:>8}" for name in columns) + "   step >=  fits"
    head = [model_row(first), ("on", first.machine.label), ("batch", batch_text(first))]
    lines = [*head_table(head), "", header]
    for prediction in predictions:
        settings = prediction.settings
        sizes = "".join(f"{_column(prediction, name) / _GIB:>8.1f}" for name in columns)
        lines.append(
            f"{settings.stage:<6}{offload_text(settings):<33}{sizes}{_time(prediction):>10}  {_fits(prediction)}"
        )
    return [*lines, "memory in GiB a rank", *_marks(predictions)]


def describe_layouts(layouts: Sequence[Sequence[Prediction]]) -> list[str]:
    """Returns a table of layouts, each with the recomputation that is the fastest of those that fit."""
    if len(layouts) < 2:
        return []
    best = [rows[0] for rows in layouts]
    on = "CPU" if best[0].machine.on_cpu else "GPU"
    header = "tensor  pipe  data  recomputed   micros" + f"{on:>9}{'waits':>8}{'step >=':>10}  fits"
    stages = sorted({row.settings.stage for row in best})
    in_pipelines = f" ({stages[0]} in a pipeline)" if len(stages) > 1 else ""
    said = f"layouts at stage {stages[-1]}{in_pipelines}, the best first"
    taken = max((taken_speeds_text(row) for row in best), key=len)
    lines = [*textwrap.wrap(f"{said}{taken}", _WIDTH), header]
    for prediction in best[:_MOST_LAYOUTS]:
        settings, pipeline = prediction.settings, prediction.pipeline
        waits = "" if pipeline is None else f"{pipeline.bubble:.1%}"
        data = settings.ranks_of("batch", prediction.machine.ranks)
        lines.append(
            f"{settings.tensor_parallel:>6}{settings.stages:>6}{data:>6}  {recomputation_of(settings):<12}"
            f"{settings.accumulation_steps:>7}{_column(prediction, on) / _GIB:>9.1f}{waits:>8}"
            f"{_time(prediction):>10}  {_fits(prediction)}"
        )
    if len(best) > _MOST_LAYOUTS:
        lines.append(f"and {len(best) - _MOST_LAYOUTS} more, see `--json`")
    return [*lines, *_marks(best)]


def describe_misfit(prediction: Prediction, choices: Sequence[Choice]) -> list[str]:
    """Returns what does not fit and by how much, and the nearest settings that do; nothing of what fits."""
    if prediction.fits is not False:
        return []
    lines = ["does not fit"]
    for tier in prediction.tiers:
        if tier.limit_bytes is not None and tier.total_bytes > tier.limit_bytes:
            over = format_bytes(tier.total_bytes - tier.limit_bytes)
            lines += _wrapped(f"{tier.name}: {over} a rank too much; the largest are {_largest(tier)}")
    limit = prediction.machine.host_memory_bytes
    if limit is not None and prediction.host_bytes > limit:
        lines += _wrapped(f"host memory: {format_bytes(prediction.host_bytes - limit)} a host too much")
    if not choices:
        hint = "more ranks, a shorter `--seq`, or `--host-memory SIZE` to offload into"
        if prediction.machine.on_cpu:  # all lies in host memory, whatever is offloaded
            hint = "more hosts, or a shorter `--seq`"
        return [*lines, *_wrapped(f"nothing near it fits: {hint}")]
    lines.append("nearest that fits")
    for choice in choices:
        found = choice.prediction
        changed = ", ".join(f"`{key}` {format_value(value)}" for key, value in choice.changes)
        tier = found.tiers[0]
        room = "" if tier.limit_bytes is None else f" of {format_bytes(tier.limit_bytes)}"
        lines += _wrapped(f"{changed}: {tier.name} {format_bytes(tier.total_bytes)}{room}{floor_text(found)}")
    taken = dict.fromkeys(text for choice in choices if (text := taken_speeds_text(choice.prediction)))
    return [*lines, *(line for text in taken for line in _wrapped(f"chosen with{text.removeprefix(',')}"))]


def nearest_json(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Returns the nearest settings as plain JSON values."""
    return [
        {
            "changes": dict(choice.changes),
            "bytes": choice.prediction.tiers[0].total_bytes,
            "floor_s": choice.prediction.step.seconds,
        }
        for choice in choices
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _largest(tier: Tier) -> str:
    lines = sorted(tier.lines, key=lambda line: -(line.size_bytes or 0))[:_LARGEST]
    return ", ".join(f"{line.name} {format_bytes(line.size_bytes or 0)}" for line in lines)


def _memory_columns(prediction: Prediction) -> tuple[str, ...]:
    return ("CPU", "NVMe") if prediction.machine.on_cpu else ("GPU", "CPU", "NVMe")


def _column(prediction: Prediction, name: str) -> int:
    return sum(tier.total_bytes for tier in prediction.tiers if tier.name.split()[0] == name)


def _time(prediction: Prediction) -> str:
    seconds = prediction.step.seconds
    if seconds is None:
        return "?"
    return format_duration(seconds) + ("" if prediction.step.complete else "+")


def _fits(prediction: Prediction) -> str:
    said = {True: "yes", False: "no", None: "?"}[prediction.fits]
    return said if prediction.settings.can_run else f"{said} *"


def _marks(predictions: Sequence[Prediction]) -> list[str]:
    """Returns what the marks of a table mean, of those that are in it."""
    lines: list[str] = []
    if any(not prediction.settings.can_run for prediction in predictions):
        lines.append("* planned: this version cannot run it")
    if any(not prediction.step.complete and prediction.step.seconds is not None for prediction in predictions):
        lines.append("+ and a path whose speed is not known")
    return lines
