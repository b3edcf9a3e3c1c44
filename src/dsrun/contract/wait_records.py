"""Records of what ranks wait in: written by rank 0 of a run, read by the launcher. Measures and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Event of a record of waits; its fields are those of `WaitRecord`.
WAITS_EVENT = "waits"
#: Label of all waits that have no row of their own.
OTHER_LABEL = "other"
#: Ranks of a record whose waits are told one by one: those of some hosts, in 1 KB.
MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpread:
    """Waits in one collective, or in several together, of the ranks that are known to have told them.

    Attributes:
        label: name of the collective, such as `reduce_scatter of unit 12`.
        waits: number of waits a step, of the rank that had most of them.
        least_s: seconds a step of the rank that waited least.
        median_s: seconds a step, median of the ranks.
        most_s: seconds a step of the rank that waited most.
        least_rank: rank that waited least.
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
        kinds: waits by kind of collective, see `collective_kind`, longest first; empty in records of an older version.
        waited_s: seconds a step that each rank waited in all collectives together, by rank; of more than `MOST_RANKS`
            ranks, those that waited least. Empty in records of an older version.
    """

    step: int
    steps: int
    step_s: float
    ranks: int
    total: WaitSpread
    labels: tuple[WaitSpread, ...]
    kinds: tuple[WaitSpread, ...] = ()
    waited_s: Mapping[int, float] = field(default_factory=dict[int, float])


def collective_kind(label: str) -> str:
    """Returns the kind of a collective: `reduce_scatter` of `reduce_scatter of unit 12`."""
    return label.partition(" ")[0]


def to_fields(record: WaitRecord) -> dict[str, Any]:
    """Returns the fields of a record as JSON holds them."""
    return asdict(record)


def from_fields(fields: Mapping[str, Any]) -> WaitRecord:
    """Reads the fields of a record; others beside them are left out, but not inside of a row.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is of another kind, or a row has one that this version does not know.
    """
    return WaitRecord(
        step=fields["step"],
        steps=fields["steps"],
        step_s=fields["step_s"],
        ranks=fields["ranks"],
        total=WaitSpread(**fields["total"]),
        labels=tuple(WaitSpread(**each) for each in fields["labels"]),
        kinds=tuple(WaitSpread(**each) for each in fields.get("kinds", ())),
        # JSON has no numbers as names.
        waited_s={int(rank): seconds for rank, seconds in fields.get("waited_s", {}).items()},
    )
