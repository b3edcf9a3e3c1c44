"""What follows from samples of memory: who owns the peak, how much is fragmented, what grows. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from .samples import CPU, GPU, HELD_FREE, MemorySample, TierUse, parts_of

#: Event of a record of one tier's growth. Fields: those of `Growth`.
GROWTH_EVENT = "memory_growth"
#: Steps over which growth is judged, and between two looks at it.
WINDOW_STEPS, LOOK_STEPS = 50, 5
#: Growth over the window below which nothing is said: caches and lists of losses grow that much.
_LEAK_BYTES = 1 << 20
#: And as a share of what was in use: by 1 % in 50 steps grows a heap whose batches differ in length, plain torch's too.
_LEAK_PART = 0.02
#: Share of looks that must have found more than the one before. What merely swings grows in half of them.
_LEAK_SHARE = 0.8
#: Below either of these, fragmentation is not worth a change.
_FRAGMENTED_SHARE, _FRAGMENTED_BYTES = 0.2, 64 << 20
_BETWEEN = {
    "start": "before the first sampled step (building the model, loading data)",
    "forward": "temporaries during the forward",
    "backward": "gradients and temporaries during the backward",
    "update": "temporaries during the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that a tier has held.

    Attributes:
        tier: name of the tier, `gpu` or `cpu`.
        nbytes: bytes that the tier held at the peak.
        step: sampled step in which it was reached, or before which.
        phase: moment at which it was first seen.
        parts: (owner, bytes), the largest first.
    """

    tier: str
    nbytes: int
    step: int
    phase: str
    parts: tuple[tuple[str, int], ...]

    @property
    def owner(self) -> str:
        """Who holds most of it."""
        return self.parts[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """What the allocator of a tier held beside what was in use, when most was in use."""

    tier: str
    live_bytes: int
    reserved_bytes: int

    @property
    def share(self) -> float:
        """Part of what is reserved that is not in use, 0 to 1."""
        return 1 - self.live_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def advice(self) -> str | None:
        """What to do; None where there is nothing to gain."""
        if self.share < _FRAGMENTED_SHARE or self.reserved_bytes - self.live_bytes < _FRAGMENTED_BYTES:
            return None
        if self.tier == GPU:
            return (
                "run with `--env PYTORCH_ALLOC_CONF=expandable_segments:True`; pad batches to few different lengths "
                "if they vary"
            )
        return (
            "run with `--env MALLOC_MMAP_THRESHOLD_=131072`: what is freed then goes back to the system at once, "
            "and costs page faults when it is wanted again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How what is in use between steps grew.

    Attributes:
        tier: name of the tier, `gpu` or `cpu`.
        step: last step of the window.
        steps: length of the window.
        bytes_per_step: median slope between any two looks (Theil, 1950), which a single jump does not move.
        is_leak: whether the use grew nearly all the time, and by more than caches do.
    """

    tier: str
    step: int
    steps: int
    bytes_per_step: int
    is_leak: bool


def peak_of(samples: Sequence[MemorySample], tier: str) -> Peak | None:
    """Finds the owner of the most that a tier has held.

    What the peak held beyond the fullest sample lived only between two of them; it belongs to the phase in which the
    high-water mark rose for the last time.

    Args:
        samples: memory samples in order of time.
        tier: `gpu` or `cpu`.

    Returns:
        the peak; None where the tier was not sampled.
    """
    seen = [(sample, use) for sample in samples if (use := sample.of(tier)) is not None]
    if not seen:
        return None
    top = max(use.peak_bytes for _, use in seen)
    first = next(i for i, (_, use) in enumerate(seen) if use.peak_bytes == top)
    reached, _ = seen[first]
    if first == 0:
        # The mark stood there already when the first sample was taken: no phase of a step has raised it.
        parts = [(_BETWEEN["start"], top)]
        return Peak(tier=tier, nbytes=top, step=reached.step, phase=reached.phase, parts=tuple(parts))
    if reached.phase == "start":
        # It rose in steps between: those are taken to be like this one, which was sampled for that.
        near = [pair for pair in seen if pair[0].step == reached.step]
    else:
        near = seen[first - 1 : first + 1]
    fullest, use = max(near, key=lambda pair: pair[1].peak_comparable_bytes)
    parts = [part for part in parts_of(use, start_of(samples, fullest, tier)) if tier == CPU or part[0] != HELD_FREE]
    between = top - sum(nbytes for _, nbytes in parts)
    if between > 0:
        parts.append(
            (_BETWEEN[reached.phase] if reached.phase != "start" else "in steps that were not sampled", between)
        )
    parts.sort(key=lambda part: -part[1])
    return Peak(tier=tier, nbytes=top, step=reached.step, phase=reached.phase, parts=tuple(parts))


def start_of(samples: Sequence[MemorySample], sample: MemorySample, tier: str) -> TierUse | None:
    """Returns the tier at the start of a sample's step; None where that was not sampled."""
    return next((s.of(tier) for s in samples if s.step == sample.step and s.phase == "start"), None)


def fragmentation_of(samples: Sequence[MemorySample], tier: str) -> Fragmentation | None:
    """Returns the figure at the sample with most in use; None where the tier's allocator does not tell."""
    told = [
        Fragmentation(tier=tier, live_bytes=use.live_bytes, reserved_bytes=use.reserved_bytes)
        for sample in samples
        if (use := sample.of(tier)) is not None and use.live_bytes is not None and use.reserved_bytes
    ]
    return max(told, key=lambda figure: figure.live_bytes, default=None)


def growth_of(tier: str, looks: Sequence[tuple[int, int]]) -> Growth:
    """Judges growth.

    Args:
        tier: name of the tier, `gpu` or `cpu`.
        looks: (step, bytes in use after it), in order of steps; at least two.
    """
    assert len(looks) >= 2, "growth is between two looks"
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(looks, 2)]
    rises = [after > before for (_, before), (_, after) in pairwise(looks)]
    total = looks[-1][1] - looks[0][1]
    return Growth(
        tier=tier,
        step=looks[-1][0],
        steps=looks[-1][0] - looks[0][0],
        bytes_per_step=round(median(slopes)),
        is_leak=total >= max(_LEAK_BYTES, _LEAK_PART * looks[0][1]) and sum(rises) >= _LEAK_SHARE * len(rises),
    )


#: What to do about growth.
LEAK_ADVICE = (
    "look for what each step keeps: a loss added up with its graph (`total += loss`; take `loss.item()`), outputs or "
    "batches appended to a list, a hook's tensors"
)
