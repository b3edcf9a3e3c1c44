"""Do all ranks mean the same thing, and did all of them succeed? One small collective tells every rank of an axis.

A rank with another model or config, or one that failed alone, would otherwise hang or corrupt the others much later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsrun.errors import ModelError

from .collectives import Collectives, own_slice


def check_agreement(facts: Mapping[str, object], collectives: Collectives, *, device: torch.device) -> None:
    """Raises on every rank where a rank's facts differ from rank 0's; one all-gather of 32 bytes a fact and rank.

    Args:
        facts: name of a fact to a value that JSON can hold; the same names on every rank.
        collectives: the axis to compare over; every rank must call.
        device: where the collectives' tensors live.

    Raises:
        ModelError: naming each fact that differs and the ranks that differ in it.
    """
    digests = [hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest() for value in facts.values()]
    mine = torch.tensor(list(b"".join(digests)), dtype=torch.uint8, device=device).view(torch.int64)
    everyone = torch.empty(mine.numel() * collectives.size, dtype=torch.int64, device=device)
    collectives.all_gather(everyone, mine, of="model and config digests").wait()
    table = [
        own_slice(everyone, rank=rank, size=collectives.size).view(len(facts), 4).tolist()
        for rank in range(collectives.size)
    ]
    differences: list[str] = []
    for index, name in enumerate(facts):
        odd = [str(rank) for rank, row in enumerate(table) if row[index] != table[0][index]]
        if odd:
            differences.append(f"{name} differs on rank {', '.join(odd)}")
    if differences:
        raise ModelError(
            f"the ranks do not agree with rank 0: {'; '.join(differences)}",
            hint="build the same model from the same config on every rank; seed it or branch on the rank only for data",
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on at least one rank: the last rank that failed, and this rank's own error if it did."""

    rank: int
    error: Exception | None


def attempt(work: Callable[[], None], collectives: Collectives, *, device: torch.device, of: str) -> Failure | None:
    """Runs each rank's part and returns on every rank whether one failed; one all-reduce of one number.

    Args:
        work: this rank's part; it enters no collective.
        collectives: the axis; every rank must call.
        device: where the collectives' tensors live.
        of: what is attempted, for who watches a rank wait for the others' parts.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as raised:  # whatever it is: the other ranks wait, and the caller raises it
        error = raised
    failed = torch.tensor([-1 if error is None else collectives.rank], dtype=torch.int64, device=device)
    collectives.all_reduce(failed, op="max", of=f"{of} outcome").wait()
    return None if int(failed.item()) < 0 else Failure(int(failed.item()), error)
