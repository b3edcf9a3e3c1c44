"""What one rank holds at one moment of a step, as a value and as a record. Measures nothing and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Event of a record of one sample. Fields: `step`, `phase` (see `PHASES`), `tiers` (see `TierUse`).
SAMPLE_EVENT = "memory_sample"
#: Moments of a step that are sampled, of its first micro step: before the forward, when activations are all there and
#: the backward begins, when it has ended; and after the update.
PHASES = ("start", "forward", "backward", "update")
Phase = Literal["start", "forward", "backward", "update"]

GPU, CPU = "gpu", "cpu"
ACTIVATIONS = "activations and temporaries"
HELD_FREE = "held free by the allocator"
#: What nobody asked for by name: on a GPU the script's own tensors, on the host interpreter and libraries too.
OTHER = {GPU: "other tensors", CPU: "rest of the process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """One tier, in bytes.

    Attributes:
        tier: `gpu`, this rank's, or `cpu`, this process on its host.
        held_bytes: reserved of the GPU by torch, or resident.
        peak_bytes: the most so far: in tensors on a GPU, resident on the host.
        live_bytes: bytes in use, by the count of the allocator (torch's on a GPU, malloc's on the host); None where it
            does not tell.
        reserved_bytes: bytes that this allocator has taken from the system; None where it does not tell.
        kinds: bytes by known owner, as (name, bytes): arenas, and what lies outside of them for long.
    """

    tier: str
    held_bytes: int
    peak_bytes: int
    live_bytes: int | None
    reserved_bytes: int | None
    kinds: tuple[tuple[str, int], ...] = ()

    @property
    def peak_comparable_bytes(self) -> int:
        """What `peak_bytes` is the most of."""
        return self.held_bytes if self.tier == CPU or self.live_bytes is None else self.live_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """One moment.

    Attributes:
        step: number of the optimizer step, counted from 1.
        phase: one of `PHASES`.
        tiers: the device's first.
    """

    step: int
    phase: str
    tiers: tuple[TierUse, ...]

    def of(self, tier: str) -> TierUse | None:
        """Returns what a tier held, if it was sampled."""
        return next((use for use in self.tiers if use.tier == tier), None)


def to_record(sample: MemorySample) -> dict[str, Any]:
    """Returns the fields of a record."""
    tiers = [
        {
            "tier": use.tier,
            "held_bytes": use.held_bytes,
            "peak_bytes": use.peak_bytes,
            "live_bytes": use.live_bytes,
            "reserved_bytes": use.reserved_bytes,
            "kinds": dict(use.kinds),
        }
        for use in sample.tiers
    ]
    return {"step": sample.step, "phase": sample.phase, "tiers": tiers}


def from_record(record: Mapping[str, Any]) -> MemorySample:
    """Returns the sample of a record.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of another kind.
    """
    tiers = tuple(
        TierUse(
            tier=use["tier"],
            held_bytes=use["held_bytes"],
            peak_bytes=use["peak_bytes"],
            live_bytes=use["live_bytes"],
            reserved_bytes=use["reserved_bytes"],
            kinds=tuple(use["kinds"].items()),
        )
        for use in record["tiers"]
    )
    return MemorySample(step=record["step"], phase=record["phase"], tiers=tiers)


def parts_of(use: TierUse, start: TierUse | None) -> list[tuple[str, int]]:
    """Shares what a tier holds out over its owners.

    Activations are what the allocator has handed out since the step began. Kinds count whole, though pages of the host
    that nobody has written are not resident yet; the rest is then shown as less than it is, never below zero.

    Args:
        use: the tier at one moment.
        start: the same tier at the step's start; None: activations are not told apart.

    Returns:
        (owner, bytes), kinds first; nothing that has no bytes.
    """
    parts = [part for part in use.kinds if part[1] > 0]
    live, before = use.live_bytes, None if start is None else start.live_bytes
    if live is not None and before is not None and live > before:
        parts.append((ACTIVATIONS, live - before))
    rest = use.held_bytes - sum(nbytes for _, nbytes in parts)
    free = 0 if live is None or use.reserved_bytes is None else use.reserved_bytes - live
    free = min(max(0, free), max(0, rest))
    parts.append((OTHER[use.tier], rest - free))
    parts.append((HELD_FREE, free))
    return [part for part in parts if part[1] > 0]


def owners_of(moments: Sequence[Sequence[tuple[str, int]]]) -> list[str]:
    """Returns the owners that occur in any of several moments' parts, in the one order in which they are shown."""
    names = dict.fromkeys(name for parts in moments for name, _ in parts)
    last = (ACTIVATIONS, *OTHER.values(), HELD_FREE)
    return [*(name for name in names if name not in last), *(name for name in last if name in names)]


def latest_step(samples: Sequence[MemorySample]) -> list[MemorySample]:
    """Returns the samples of the last step that was sampled whole; of the last one at all where none was."""
    steps = {sample.step for sample in samples}
    whole = [step for step in steps if len({s.phase for s in samples if s.step == step}) == len(PHASES)]
    chosen = max(whole or steps, default=None)
    return sorted((s for s in samples if s.step == chosen), key=lambda s: PHASES.index(s.phase))
