"""Samples of memory as a picture, by matplotlib, which is imported here only. Chooses nothing but looks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsrun.errors import InputError

from .findings import start_of
from .samples import MemorySample, latest_step, owners_of, parts_of
from .text import MOMENTS, TITLES, tiers_of

_GIB, _MIB = 1 << 30, 1 << 20


def save_plot(samples: Sequence[MemorySample], path: Path) -> None:
    """Draws bars of bytes by kind at each moment of the last sampled step, a row of axes a tier.

    Args:
        samples: memory samples in order of time.
        path: file to write; its ending says what it is.

    Raises:
        InputError: there is no sample, matplotlib is not installed, or it cannot write such a file.
    """
    step = latest_step(samples)
    if not step:
        raise InputError("memory: no step was sampled yet, so there is nothing to draw", hint="train a step first")
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"memory: {path} cannot be drawn: matplotlib is not installed ({error})",
            hint='`pip install "dsrun[examples]"` installs it; bars on the terminal need nothing',
        ) from error
    tiers = tiers_of(step)
    figure: Any = Figure(figsize=(8, 1 + 2.6 * len(tiers)), dpi=120)
    for axes, tier in zip(figure.subplots(len(tiers), squeeze=False)[:, 0], tiers, strict=True):
        _draw(axes, step, tier)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise InputError(
            f"memory: {path} cannot be written: {error}", hint="name a file that ends in .png, .svg or .pdf"
        ) from error


def _draw(axes: Any, step: Sequence[MemorySample], tier: str) -> None:
    start = start_of(step, step[0], tier)
    rows = [(MOMENTS[s.phase], dict(parts_of(use, start))) for s in step if (use := s.of(tier)) is not None]
    names = owners_of([list(parts.items()) for _, parts in rows])
    most = max(sum(parts.values()) for _, parts in rows)
    unit, label = (_GIB, "GiB") if most >= _GIB else (_MIB, "MiB")
    left = [0.0] * len(rows)
    for number, name in enumerate(names):
        widths = [parts.get(name, 0) / unit for _, parts in rows]
        axes.barh(range(len(rows)), widths, left=left, label=name, color=f"C{number % 10}", height=0.7)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [moment for moment, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(f"{TITLES[tier]} memory over step {step[0].step}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
