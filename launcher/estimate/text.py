"""A prediction for people, 80 columns without colour, and for programs as JSON. Computes nothing but percentages."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dsrun.config.axes import AXES
from dsrun.estimate.memory.model_state import FP32_BYTES
from dsrun.estimate.memory.tiers import Tier
from dsrun.estimate.prediction import Prediction
from dsrun.estimate.run.catalogue import ACHIEVABLE
from dsrun.estimate.run.machine import Machine
from dsrun.estimate.run.settings import RunSettings
from dsrun.estimate.time.axes import AxisTraffic
from dsrun.units import format_bytes, format_count, format_duration

from .attention_text import attention_json, describe_attention
from .pipeline_text import describe_pipeline, pipeline_json

SCHEMA_VERSION = 1
_WIDTH = 80
_LABEL = 26
_BAR = 24
_GIB = 1 << 30
_MIB = 1 << 20


def describe_prediction(prediction: Prediction) -> list[str]:
    """Returns the report: what runs where, a table and a bar a tier, one step's paths, what was assumed."""
    lines = [*_head(prediction), ""]
    if prediction.pipeline is not None:
        lines += [*describe_pipeline(prediction), ""]
    for tier in prediction.tiers:
        if tier.lines:
            lines += [*_tier_lines(tier), ""]
    if not prediction.machine.on_cpu or prediction.machine.ranks_per_host > 1:
        lines += [*_host_lines(prediction), ""]
    if prediction.attention is not None:
        lines += [*describe_attention(prediction.attention), ""]
    lines += [*_step_lines(prediction), ""]
    lines += [*_assumed(prediction)]
    return lines


def _head(prediction: Prediction) -> list[str]:
    settings = prediction.settings
    rows = [
        model_row(prediction),
        ("on", prediction.machine.label),
        ("settings", describe_settings(settings)),
        ("batch", batch_text(prediction)),
        ("state", _state(prediction)),
        ("verdict", verdict(prediction)),
    ]
    if settings.planned:
        rows.append(("", f"this version refuses {', '.join(f'`{key}`' for key in settings.planned)}"))
    return head_table(rows)


def model_row(prediction: Prediction) -> tuple[str, str]:
    """Returns the row of a report's head that names the model."""
    model = prediction.model
    frozen = f", {format_count(model.frozen_numel)} of them frozen" if model.frozen_numel else ""
    shape = model.architecture
    layers = "" if shape is None else f", {shape.layers} layers of width {shape.hidden}"
    return "model", f"{model.label}: {format_count(model.numel)} parameters{frozen}{layers}"


def head_table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns rows of label and text as lines."""
    lines: list[str] = []
    for label, text in rows:
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"{label:<10}", subsequent_indent=" " * 10, break_long_words=False
        )
    return lines


def _format_text(settings: RunSettings) -> str:
    if settings.has_master:
        return "16-bit with fp32 masters"
    return "fp32" if settings.compute_bytes == FP32_BYTES else "16-bit without masters"


def describe_settings(settings: RunSettings) -> str:
    """Returns stage, format, offload and recomputation in a few words."""
    parts = [f"ZeRO stage {settings.stage}", _format_text(settings)]
    parts += [offload_text(settings)] if offload_text(settings) != "none" else []
    parts += [f"{row.title} {size}" for row in AXES if (size := settings.axis_sizes.get(row.name, 1)) > 1]
    parts.append(_recomputation_text(settings))
    return ", ".join(parts)


def _recomputation_text(settings: RunSettings) -> str:
    if settings.recompute == "none":
        return "nothing recomputed"
    return "blocks recomputed" if settings.policy == "every_block" else f"blocks recomputed by {settings.policy}"


def offload_text(settings: RunSettings) -> str:
    """Returns what is offloaded where: `none`, `optimizer to cpu`, `optimizer and parameters to nvme`."""
    optimizer, param = settings.offload_optimizer, settings.offload_param
    if optimizer != "none" and settings.offload_ratio < 1:
        share = f"{settings.offload_ratio:.0%} of the optimizer to {optimizer}"
        return share if param == "none" else f"{share}, parameters to {param}"
    if optimizer == param:
        return "none" if optimizer == "none" else f"optimizer and parameters to {optimizer}"
    parts = [f"{name} to {tier}" for name, tier in (("optimizer", optimizer), ("parameters", param)) if tier != "none"]
    return ", ".join(parts)


def batch_text(prediction: Prediction) -> str:
    """Returns micro batch, micro steps and tokens of a step."""
    settings = prediction.settings
    steps = settings.accumulation_steps
    micro = f"{settings.micro_batch} x {settings.sequence:,} tokens a rank"
    return f"{micro}, {steps} micro step{'s' if steps > 1 else ''}: {prediction.tokens_per_step:,} tokens a step"


def _state(prediction: Prediction) -> str:
    """Returns the model state of a rank in the literature's unit, beside the literature's count."""
    here, paper = (size / 1e9 for size in (prediction.state.total, prediction.zero_paper_bytes))
    return f"{here:.1f} GB a rank before activations; {paper:.1f} GB as the ZeRO paper counts it"


def verdict(prediction: Prediction) -> str:
    """Returns whether it fits, with the numbers where it does not."""
    if prediction.fits is True:
        return "fits"
    short = [
        f"{tier.name} needs {format_bytes(tier.total_bytes)} of {format_bytes(tier.limit_bytes)} a rank"
        for tier in prediction.tiers
        if tier.limit_bytes is not None and tier.total_bytes > tier.limit_bytes
    ]
    limit = prediction.machine.host_memory_bytes
    if limit is not None and prediction.host_bytes > limit:
        short.append(f"a host needs {format_bytes(prediction.host_bytes)} of {format_bytes(limit)}")
    if short:
        return f"does not fit: {'; '.join(short)}"
    unknown = [tier.name for tier in prediction.limiting_tiers if tier.fits is None]
    what = " and ".join(dict.fromkeys("host memory" if name.startswith("CPU") else name for name in unknown))
    return f"{'GPU memory fits; ' if _gpu_fits(prediction) else ''}not known for {what}"


def _gpu_fits(prediction: Prediction) -> bool:
    return any(tier.name == "GPU" and tier.fits for tier in prediction.tiers)


def _tier_lines(tier: Tier) -> list[str]:
    unit, name = (_GIB, "GiB") if tier.total_bytes >= _GIB else (_MIB, "MiB")
    lines = [f"{f'{tier.name} of a rank':<{_LABEL}}{name:>8}"]
    largest = max((line.size_bytes or 0 for line in tier.lines), default=0)
    scale = max(largest, tier.limit_bytes or 0) or 1
    for line in tier.lines:
        size = "?" if line.size_bytes is None else f"{line.size_bytes / unit:.2f}"
        lines.append(f"  {line.name:<{_LABEL - 2}}{size:>8}  {'#' * _cells(line.size_bytes or 0, scale)}".rstrip())
    total = f"  {'total':<{_LABEL - 2}}{tier.total_bytes / unit:>8.2f}"
    if tier.limit_bytes is None:
        return [*lines, total]
    used = min(_BAR, _cells(tier.total_bytes, tier.limit_bytes))
    share = (
        f"{100 * tier.total_bytes / tier.limit_bytes:.0f} % of {tier.limit_bytes / unit:.1f}"
        if tier.limit_bytes
        else "no room"
    )
    return [*lines, f"{total}  [{'#' * used}{'.' * (_BAR - used)}] {share}"]


def _cells(size: int, scale: int) -> int:
    """Characters of a bar; something is never nothing."""
    return 0 if size <= 0 else max(1, round(_BAR * size / max(1, scale)))


def _host_lines(prediction: Prediction) -> list[str]:
    machine = prediction.machine
    limit = machine.host_memory_bytes
    room = "unknown, see `--host-memory`" if limit is None else f"{format_bytes(limit)}"
    lines = [
        f"host memory of {machine.ranks_per_host} rank{'s' if machine.ranks_per_host > 1 else ''}: "
        f"{format_bytes(prediction.host_bytes)} of {room}"
    ]
    if prediction.save_bytes:
        lines.append(f"from the first checkpoint on: {format_bytes(prediction.save_bytes)} more, for its copy")
        if prediction.save_fits is False:
            lines[-1] += ", which does not fit; `checkpoint.asynchronous` false needs none"
    return lines


def _step_lines(prediction: Prediction) -> list[str]:
    traffic, step = prediction.traffic, prediction.step
    amounts = {
        "compute": _flops(traffic.flops),
        "optimizer": format_bytes(traffic.optimizer_bytes),
        **{axis.name: format_bytes(traffic.moved_over(axis.name)) for axis in traffic.axes},
        "PCIe": f"{format_bytes(traffic.pcie_to_gpu_bytes)} in, {format_bytes(traffic.pcie_to_host_bytes)} out",
        "DDR": format_bytes(traffic.ddr_bytes),
        "NVMe": f"{format_bytes(traffic.nvme_read_bytes)} in, {format_bytes(traffic.nvme_write_bytes)} out",
    }
    whose = {"DDR": " (host)", "NVMe": " (host)"}
    if prediction.machine.hosts > 1:
        across = {axis.name for axis in traffic.axes if axis.crosses_hosts}
        whose |= {axis.name: ", all hosts" if axis.name in across else ", one host" for axis in traffic.axes}
    lines = [f"{'one step of a rank':<20}{'amount':>28}  at least"]
    for floor in prediction.paths:
        time = f"unknown (`--speed {floor.missing[0]}=`)" if floor.seconds is None else format_duration(floor.seconds)
        mark = "  <- bottleneck" if floor.path == step.bottleneck else ""
        lines.append(f"  {floor.path + whose.get(floor.path, ''):<18}{amounts[floor.path]:>28}  {time}{mark}")
    if step.seconds is None:
        return [*lines, "a step: unknown, for no speed is known"]
    tokens = prediction.tokens_per_step / step.seconds
    said = (
        f"a step: at least {format_duration(step.seconds)}{_known_paths_text(prediction)}, "
        f"at most {tokens:,.0f} tokens/s{_share_of_peak(prediction)}; bound by {step.bottleneck}"
    )
    return [*lines, *textwrap.wrap(said, _WIDTH)]


def floor_text(prediction: Prediction) -> str:
    """Returns the shortest time of a step, to be put behind a choice; nothing where no speed is known."""
    seconds = prediction.step.seconds
    if seconds is None:
        return ""
    return f", a step of at least {format_duration(seconds)}{_known_paths_text(prediction)}"


def _known_paths_text(prediction: Prediction) -> str:
    return "" if prediction.step.complete else " by the paths whose speed is known"


def taken_speeds_text(prediction: Prediction) -> str:
    """Returns what a choice has taken unknown speeds for, to be put behind it; nothing where it needed none.

    Args:
        prediction: prediction for what was chosen, without these speeds.
    """
    machine, unknown = prediction.machine, prediction.unknown_speeds
    return f", unknown speeds taken for {', '.join(_speed_text(machine, name) for name in unknown)}" if unknown else ""


def _speed_text(machine: Machine, name: str) -> str:
    speed = machine.cautious_speed(name)
    return f"`{name}` {speed / 1e12:g} TFLOP/s" if name == "flops" else f"`{name}` {speed / 1e9:g} GB/s"


def _share_of_peak(prediction: Prediction) -> str:
    """Returns what share of a GPU's peak the model's own FLOPs are; nothing where that is not known."""
    gpu, flops = prediction.machine.gpu, prediction.flops_per_second
    if gpu is None or flops is None:
        return ""
    peak = gpu.half_flops if prediction.settings.compute_bytes == 2 else gpu.single_flops
    return f" and {flops / 1e12:,.0f} TFLOP/s a GPU ({flops / peak:.0%} of its peak)"


def _flops(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP" if flops >= 1e11 else f"{flops / 1e9:,.2f} GFLOP"


def _assumed(prediction: Prediction) -> list[str]:
    machine, settings = prediction.machine, prediction.settings
    notes = [*prediction.model.notes, *settings.notes, *machine.notes, *_speed_notes(machine)]
    if prediction.pipeline is not None and any(0 in stage.blocks for stage in prediction.pipeline.stages):
        notes.append("embedding and head are chunks of their own: a `PipelineModule` can have that, no plain model")
    if prediction.model.architecture is None:
        notes.append("the shape of the layers is not known, so neither are activations and logits")
    lines = ["assumed"]
    for note in notes:
        lines += textwrap.wrap(
            note,
            _WIDTH,
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines if notes else []


def _speed_notes(machine: Machine) -> list[str]:
    if machine.gpu is None:
        return [] if not machine.on_cpu else ["speeds of processors are not guessed; give them with `--speed`"]
    shares = f"{ACHIEVABLE['compute']:.0%} of its FLOP/s, {ACHIEVABLE['memory']:.0%} of its memory's"
    return [f"speeds: {shares} and {ACHIEVABLE['links']:.0%} of links' bandwidth in: {machine.gpu.source}"]


def _axis_json(axis: AxisTraffic) -> dict[str, Any]:
    return {
        "name": axis.name,
        "ranks": axis.ranks,
        "crosses_hosts": axis.crosses_hosts,
        "buffer_bytes": dict(axis.buffers),
        "sent_bytes": axis.sent_bytes,
    }


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """Returns the prediction as plain JSON values; bytes, seconds and FLOPs."""
    settings = {key: value for key, value in asdict(prediction.settings).items() if key != "notes"}
    machine = prediction.machine
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "label": prediction.model.label,
            "parameters": prediction.model.numel,
            "trained_parameters": prediction.model.trained_numel,
        },
        "machine": {
            "label": machine.label,
            "ranks": machine.ranks,
            "ranks_per_host": machine.ranks_per_host,
            "gpu": None if machine.gpu is None else machine.gpu.name,
        },
        "settings": settings,
        "fits": prediction.fits,
        "runs": prediction.settings.can_run,
        "model_state_bytes": prediction.state.total,
        "zero_paper_bytes": prediction.zero_paper_bytes,
        "tiers": [
            {
                "name": tier.name,
                "bytes": tier.total_bytes,
                "limit_bytes": tier.limit_bytes,
                "fits": tier.fits,
                "lines": [{"name": line.name, "bytes": line.size_bytes} for line in tier.lines],
            }
            for tier in prediction.tiers
        ],
        "pipeline": pipeline_json(prediction),
        "attention": attention_json(prediction.attention),
        "host_bytes": prediction.host_bytes,
        "save_bytes": prediction.save_bytes,
        "host_limit_bytes": machine.host_memory_bytes,
        "step": {
            **{key: value for key, value in asdict(prediction.traffic).items() if key != "axes"},
            "network_bytes": prediction.traffic.network_bytes,
            "axes": [_axis_json(axis) for axis in prediction.traffic.axes],
            "flops_per_s": prediction.flops_per_second,
            "floors_s": {floor.path: floor.seconds for floor in prediction.paths},
            "floor_s": prediction.step.seconds,
            "bottleneck": prediction.step.bottleneck,
            "tokens": prediction.tokens_per_step,
        },
        "assumed": [
            *prediction.model.notes,
            *prediction.settings.notes,
            *machine.notes,
            *_speed_notes(machine),
        ],
    }
