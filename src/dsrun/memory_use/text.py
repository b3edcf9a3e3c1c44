"""Samples of memory as lines for a terminal: bars over the step, a peak with its owners, what to do. Only words."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.units import format_bytes

from .findings import LEAK_ADVICE, Growth, fragmentation_of, peak_of, start_of
from .samples import GPU, MemorySample, latest_step, owners_of, parts_of

#: How owners are told apart in a bar without colour, in order of their first appearance.
_MARKS = "#=+*o%x@&:.~"
_BAR_WIDTH = 56
#: Tiers and moments as people read them.
TITLES = {"gpu": "GPU", "cpu": "host"}
MOMENTS = {
    "start": "before forward",
    "forward": "before backward",
    "backward": "after backward",
    "update": "after update",
}


def report_lines(
    samples: Sequence[MemorySample], growths: Sequence[Growth], *, state: tuple[int, int] | None
) -> list[str]:
    """Returns all there is to say, tier by tier.

    Args:
        samples: memory samples in order of time; there may be none yet.
        growths: growth of memory use, of any tiers.
        state: bytes of model state, (predicted, measured), if known.
    """
    lines = [] if state is None else [state_line(*state), ""]
    for tier in tiers_of(samples):
        lines += [*step_lines(samples, tier), "", *peak_lines(samples, tier), ""]
        lines += [*fragmentation_lines(samples, tier), ""]
    lines += growth_lines(growths) or ["growth is judged over 50 steps, from step 60 on"]
    if not samples:
        lines.insert(0, "no step was sampled yet")
    return lines


def tiers_of(samples: Sequence[MemorySample]) -> list[str]:
    """Returns the tiers that were sampled, the GPU first."""
    found = {use.tier for sample in samples for use in sample.tiers}
    return sorted(found, key=lambda tier: tier != GPU)


def step_lines(samples: Sequence[MemorySample], tier: str) -> list[str]:
    """Returns bars of one tier over the last step that was sampled, and a legend with bytes at its fullest moment."""
    step = [sample for sample in latest_step(samples) if sample.of(tier) is not None]
    if not step:
        return []
    rows: list[tuple[str, list[tuple[str, int]], int]] = []
    for sample in step:
        use = sample.of(tier)
        assert use is not None, "chosen above"
        rows.append((MOMENTS[sample.phase], parts_of(use, start_of(step, sample, tier)), use.held_bytes))
    most = max(sum(nbytes for _, nbytes in parts) for _, parts, _ in rows)
    names = owners_of([parts for _, parts, _ in rows])
    marks = {name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)}
    lines = [f"{TITLES[tier]} memory over step {step[0].step}"]
    for moment, parts, held in rows:
        bar = _bar(parts, marks, most)
        lines.append(f"  {moment:<15} |{bar:<{_BAR_WIDTH}}| {format_bytes(held):>10}")
    largest = {name: max(dict(parts).get(name, 0) for _, parts, _ in rows) for name in names}
    width = max(len(name) for name in names)
    lines += [f"  {marks[name]} {name:<{width}}  {format_bytes(largest[name]):>10}" for name in names]
    return lines


def peak_lines(samples: Sequence[MemorySample], tier: str) -> list[str]:
    """Returns the peak of a tier and who owns it."""
    peak = peak_of(samples, tier)
    if peak is None:
        return []
    lines = [f"{TITLES[tier]} peak {format_bytes(peak.nbytes)}, most of it {peak.owner}, seen in step {peak.step}"]
    width = max(len(name) for name, _ in peak.parts)
    return lines + [
        f"  {name:<{width}}  {format_bytes(nbytes):>10}  {nbytes / max(1, peak.nbytes):>4.0%}"
        for name, nbytes in peak.parts
    ]


def fragmentation_lines(samples: Sequence[MemorySample], tier: str) -> list[str]:
    """Returns what the allocator holds beside what is in use, with what to do."""
    figure = fragmentation_of(samples, tier)
    if figure is None:
        return []
    who = "torch" if tier == GPU else "malloc"
    lines = [
        f"{TITLES[tier]} fragmentation {figure.share:.0%}: {who} has {format_bytes(figure.reserved_bytes)} reserved, "
        f"{format_bytes(figure.live_bytes)} in use"
    ]
    return lines if figure.advice is None else [*lines, f"  hint: {figure.advice}"]


def growth_lines(growths: Sequence[Growth]) -> list[str]:
    """Returns the newest growth of each tier, with what to do about a leak."""
    newest = {growth.tier: growth for growth in sorted(growths, key=lambda growth: growth.step)}
    lines: list[str] = []
    for growth in newest.values():
        lines.append(growth_line(growth))
        if growth.is_leak:
            lines.append(f"  hint: {LEAK_ADVICE}")
    return lines


def growth_line(growth: Growth) -> str:
    """Returns one tier's growth in words."""
    sign = "-" if growth.bytes_per_step < 0 else "+"
    verdict = "a leak" if growth.is_leak else "no leak"
    return (
        f"{TITLES[growth.tier]} growth {sign}{format_bytes(abs(growth.bytes_per_step))} a step over {growth.steps} "
        f"steps up to {growth.step}: {verdict}"
    )


def state_line(predicted_bytes: int, measured_bytes: int) -> str:
    """Returns model state, predicted against measured."""
    off = (measured_bytes - predicted_bytes) / predicted_bytes if predicted_bytes else 0.0
    return (
        f"model state {format_bytes(predicted_bytes)} predicted, {format_bytes(measured_bytes)} measured ({off:+.1%})"
    )


def _bar(parts: Sequence[tuple[str, int]], marks: dict[str, str], most: int) -> str:
    """Cuts at rounded sums, so that the bar is as long as the whole says and no part is lost to rounding twice."""
    bar, upto, total = "", 0, 0
    for name, nbytes in parts:
        total += nbytes
        end = round(total / most * _BAR_WIDTH)
        bar += marks[name] * (end - upto)
        upto = max(upto, end)
    return bar
