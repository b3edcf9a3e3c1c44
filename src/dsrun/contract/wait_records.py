"""Records of what ranks wait in: written by rank 0 of a run, read by the launcher. Measures and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Event of a record of waits; its fields are those of `WaitRecord`.
WAITS_EVENT = "waits"
#: Label of all waits that have no row of their own.
OTHER_LABEL = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpread:
    """Waits of all ranks in one collective.

    Attributes:
        label: name of the collective, such as `reduce_scatter of unit 12`.
        waits: number of waits a step, of the rank that had most of them.
        least_s: seconds a step of the rank that waited least.
        median_s: seconds a step, median of the ranks.
        most_s: seconds a step of the rank that waited most.
        least_rank: rank that waited least: the one that the others wait for, if they wait.
        most_rank: rank that waited most.
    """

    label: str
    waits: float
    least_s: float
    median_s: float
    most_s: float
    least_rank: int
    most_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRecord:
    """Waits of all ranks in some optimizer steps.

    Attributes:
        step: number of the last step.
        steps: number of steps.
        step_s: seconds that a step took on rank 0.
        ranks: number of ranks.
        total: waits in all collectives together.
        labels: waits by collective, longest first.
    """

    step: int
    steps: int
    step_s: float
    ranks: int
    total: WaitSpread
    labels: tuple[WaitSpread, ...]


def to_fields(record: WaitRecord) -> dict[str, Any]:
    """Returns the fields of a record as JSON holds them."""
    return asdict(record)


def from_fields(fields: Mapping[str, Any]) -> WaitRecord:
    """Reads the fields of a record.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of another kind.
    """
    return WaitRecord(
        step=fields["step"],
        steps=fields["steps"],
        step_s=fields["step_s"],
        ranks=fields["ranks"],
        total=WaitSpread(**fields["total"]),
        labels=tuple(WaitSpread(**each) for each in fields["labels"]),
    )
