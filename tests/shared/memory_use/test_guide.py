"""docs/guides/memory.md shows what `dsrun memory` prints of such a run, to the letter."""

from __future__ import annotations

from pathlib import Path

from dsrun.memory_use.findings import growth_of
from dsrun.memory_use.samples import MemorySample, TierUse
from dsrun.memory_use.text import report_lines

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "memory.md"
GIB = 1 << 30


def moment(phase: str, *, live: float, peak: float) -> MemorySample:
    gpu = TierUse(
        tier="gpu",
        held_bytes=72 * GIB,
        peak_bytes=round(peak * GIB),
        live_bytes=round(live * GIB),
        reserved_bytes=72 * GIB,
        kinds=(
            ("parameter shards", 2 * GIB),
            ("masters", 4 * GIB),
            ("gradient sums", 4 * GIB),
            ("gather slots", GIB),
            ("gradient slots", GIB),
            ("optimizer states", 8 * GIB),
        ),
    )
    return MemorySample(step=100, phase=phase, tiers=(gpu,))


def test_the_guide_shows_what_is_printed() -> None:
    samples = [
        moment("start", live=20.5, peak=20.5),
        moment("forward", live=52, peak=54),
        moment("backward", live=21, peak=58),
        moment("update", live=20.5, peak=58),
    ]
    leak = growth_of("gpu", [(step, step * 3_000_000) for step in range(60, 111, 5)])
    lines = report_lines(samples, (leak,), state=(20 * GIB, 20 * GIB))
    assert "\n".join(lines) in GUIDE.read_text()
