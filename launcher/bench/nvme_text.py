"""What `dsrun nvme bench` found, as a table, as the section `aio` to paste, and as JSON. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsrun.direct_io.settings import IoSettings
from dsrun.units import format_bytes

from .figure import figure_text
from .nvme_sweep import SettingFigures, Sweep

_HEADS = ("block", "depth", "threads", "calls at once", "write", "read")


def table(found: Sweep) -> str:
    """Returns the trials, a line each, and below them what the best came to beside the floor."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for trial in found.trials:
        mark = "  <- best" if trial.settings == found.best.settings else ""
        rows.append((*_settings_cells(trial.settings), _rate(trial.write), _rate(trial.read) + mark))
    cache = "" if found.direct else ", through the page cache (O_DIRECT is refused)"
    lines = [f"{', '.join(found.paths)}: {format_bytes(found.file_bytes)}{cache}", "", *_aligned(rows), ""]
    lines += [
        *_aligned(
            [
                ("best", "write", figure_text(found.best.write), "read", figure_text(found.best.read)),
                ("floor", "write", figure_text(found.floor.write), "read", figure_text(found.floor.read)),
                (
                    "best / floor",
                    "write",
                    f"{found.best.write.median / found.floor.write.median:.2f}",
                    "read",
                    f"{found.best.read.median / found.floor.read.median:.2f}",
                ),
            ]
        ),
        "The floor is one direct call of 16 MiB at a time on each path, as dd makes them.",
    ]
    return "\n".join(lines)


def section(settings: IoSettings) -> str:
    """Returns the settings as a config has them."""
    return f'"aio": {json.dumps(section_values(settings), indent=2)}'


def section_values(settings: IoSettings) -> dict[str, Any]:
    """Returns the keys of the section `aio`."""
    return {
        "block_size": settings.block_bytes,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.threads,
        "single_submit": settings.single_submit,
        "overlap_events": settings.overlap_events,
    }


def to_json(found: Sweep) -> dict[str, Any]:
    """Returns plain JSON values."""
    return {
        "schema_version": 1,
        "paths": list(found.paths),
        "file_bytes": found.file_bytes,
        "direct": found.direct,
        "trials": [
            {"aio": section_values(trial.settings), "write": trial.write, "read": trial.read} for trial in found.trials
        ],
        "best": _measured_json(found.best),
        "floor": _measured_json(found.floor),
    }


def _measured_json(one: SettingFigures) -> dict[str, Any]:
    return {"aio": section_values(one.settings), "write": one.write.to_json(), "read": one.read.to_json()}


def _settings_cells(settings: IoSettings) -> tuple[str, ...]:
    calls = f"{settings.calls_at_once} x {format_bytes(settings.call_bytes)}"
    return format_bytes(settings.block_bytes), str(settings.queue_depth), str(settings.threads), calls


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
