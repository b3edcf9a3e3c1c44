"""One job at a moment as a line of text, and as an object for programs. Reads no file and no clock."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from dsrun.contract.step_records import step_fields
from dsrun.units import format_bytes, format_count, format_duration

from ..jobs.text import job_json, short_duration, state_text
from ..records.waits import rank_lags
from .measures import (
    eta_s,
    loss_trend,
    median_of,
    phase_seconds,
    rate_median,
    step_seconds,
)
from .run_view import RunView

#: Raised whenever a field changes its meaning or goes away; new fields do not raise it.
SCHEMA_VERSION = 1


def line_of(view: RunView) -> str:
    """Returns a line for a log or a terminal without a cursor: time, job, and how far and how fast it is."""
    clock = datetime.fromtimestamp(view.now_s).strftime("%H:%M:%S")
    parts = [f"{clock} {view.job.id} {state_text(view.job)}"]
    last = view.figures.last
    if last is None:
        parts += [view.doing] if view.doing else []
        parts.append("no step yet")
        return "  ".join(parts)
    steps = list(view.figures.recent)
    total = "" if last.total_steps is None else f"/{last.total_steps}"
    parts.append(f"step {last.step}{total}")
    if last.loss is not None:
        parts.append(f"loss {last.loss:.4g}")
    elif view.figures.loss.points():
        parts.append("loss not finite")
    parts.append(f"lr {last.lr:.3g}")
    if (seconds := step_seconds(steps)) is not None:
        parts.append(f"{format_duration(seconds)} a step")
    if (rate := rate_median(steps)) is not None:
        parts.append(f"{format_count(rate)} {'samples' if last.tokens_per_s is None else 'tokens'}/s")
    if (mfu := median_of(steps, "mfu")) is not None:
        parts.append(f"MFU {100 * mfu:.1f}%")
    if last.memory_bytes:
        parts.append(format_bytes(last.memory_bytes))
    if view.job.state.is_live and (left_s := eta_s(steps)) is not None:
        parts.append(f"ETA {short_duration(left_s)}")
    return "  ".join(parts)


def view_json(view: RunView) -> dict[str, Any]:
    """Returns all that the page shows, as plain JSON values; None where a figure is not known."""
    figures, steps = view.figures, list(view.figures.recent)
    last = figures.last
    now = datetime.fromtimestamp(view.now_s, timezone.utc)
    trend = loss_trend(steps)
    return {
        "schema_version": SCHEMA_VERSION,
        "time": round(view.now_s, 3),
        "job": job_json(view.job, step=None if last is None else last.step, now=now),
        "restarts": view.restarts,
        "engines": figures.engines,
        "unread_records": figures.unread,
        "lost_steps": figures.lost_steps,
        "skipped_steps": figures.skipped,
        "last_step": None if last is None else {"time": last.time, **step_fields(last)},
        "eta_s": eta_s(steps) if view.job.state.is_live else None,
        "loss": {"last": trend.last, "smoothed": trend.smoothed, "change": trend.change},
        "step_s": step_seconds(steps),
        "tokens_per_s": None if last is None or last.tokens_per_s is None else rate_median(steps),
        "model_tflops": median_of(steps, "model_tflops"),
        "mfu": median_of(steps, "mfu"),
        "phases_s": dict(phase_seconds(steps)),
        "waits_s": median_of(steps, "waits_s"),
        "memory": {}
        if figures.spread is None
        else {
            tier: {"most_bytes": each.most[-1], "most_rank": each.most_rank}
            for tier, each in figures.spread.memory.items()
            if each.most
        },
        "memory_total_bytes": dict(view.memory_total),
        "lags": [
            {"host": view.host_of(lag.rank), **asdict(lag)}
            for lag in (rank_lags(figures.waits) if figures.waits is not None else ())
        ],
        "ranks": [{**asdict(use.live), "gpu": None if use.gpu is None else asdict(use.gpu)} for use in view.ranks],
        "gpus": [asdict(gpu) for gpu in view.gpus],
        "checkpoint": None if figures.checkpoint is None else dict(figures.checkpoint),
        "logged": {name: {"step": each.step, "value": each.values.get(name)} for name, each in figures.logged.items()},
        "events": [asdict(event) for event in view.events],
    }
