"""Which lines of code held memory at a peak: a value, its record and its words. Nothing is recorded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsrun.units import format_bytes

#: Event of a record of allocations by stack. Fields: those of `StacksAtPeak`.
HISTORY_EVENT = "memory_history"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackUse:
    """What one line of code, reached in one way, held.

    Attributes:
        nbytes: bytes of all tensors that this line of code held.
        count: number of tensors that this line of code held.
        frames: `file:line function`, the innermost first; empty for what no Python called, such as most of a backward.
    """

    nbytes: int
    count: int
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksAtPeak:
    """The peak of the steps that were recorded.

    Attributes:
        peak_bytes: bytes in tensors at the peak.
        before_bytes: bytes of `peak_bytes` that were allocated before the recording began: parameters, states and the
            other arenas.
        stacks: the largest, in order.
        snapshot: file for https://pytorch.org/memory_viz, if one was written.
    """

    peak_bytes: int
    before_bytes: int
    stacks: tuple[StackUse, ...]
    snapshot: str | None = None


def stacks_record(found: StacksAtPeak) -> dict[str, Any]:
    """Returns the fields of a record."""
    return asdict(found)


def stacks_from_record(record: Mapping[str, Any]) -> StacksAtPeak:
    """Returns the value of a record.

    Raises:
        KeyError: a field is missing.
    """
    stacks = tuple(
        StackUse(nbytes=use["nbytes"], count=use["count"], frames=tuple(use["frames"])) for use in record["stacks"]
    )
    return StacksAtPeak(
        peak_bytes=record["peak_bytes"],
        before_bytes=record["before_bytes"],
        stacks=stacks,
        snapshot=record["snapshot"],
    )


def stacks_lines(found: StacksAtPeak) -> list[str]:
    """Returns the stacks as lines, with where to look further."""
    lines = [
        f"GPU peak of the recorded steps {format_bytes(found.peak_bytes)}, "
        f"of it {format_bytes(found.before_bytes)} from before them"
    ]
    for use in found.stacks:
        first, *callers = use.frames or ("no Python stack: C++ of the backward",)
        lines.append(f"  {format_bytes(use.nbytes):>10}  {use.count:>5} x  {first}")
        lines += [f"{'':>22}from {caller}" for caller in callers]
    return lines if found.snapshot is None else [*lines, f"  all of it: {found.snapshot}, for pytorch.org/memory_viz"]
