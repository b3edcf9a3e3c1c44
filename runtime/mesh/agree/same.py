"""Do all ranks mean the same thing, and did all of them succeed? One small collective tells every rank of an axis.

A rank with another model or config, or one that failed alone, would otherwise hang or corrupt the others much later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsrun.errors import ModelError

from ..collectives import Collectives
from .differences import Difference, first_difference

#: Of what a rank tells about one fact.
_TOLD_BYTES = 1024


def check_agreement(
    facts: Mapping[str, object],
    collectives: Collectives,
    *,
    device: torch.device,
    ranks: Sequence[int] = (),
    whose: str = "",
) -> None:
    """Raises on every rank where a rank's facts differ from the first's; one all-gather of 32 bytes a fact and rank.

    Where they differ, the first rank's facts are broadcast, and each rank tells the first difference from its own.

    Args:
        facts: name of a fact to a value that JSON can hold, see `differences`; the same names on every rank.
        collectives: the axis to compare over; every rank must call.
        device: device of the collectives' tensors.
        ranks: numbers in the job of the axis' ranks; empty where these are all ranks of the job.
        whose: text that follows `the ranks` in the error.

    Raises:
        ModelError: naming each fact that differs, the ranks that differ in it, and the first place with both values.
    """
    numbers = list(ranks) or list(range(collectives.size))
    texts = [json.dumps(value, sort_keys=True).encode() for value in facts.values()]
    digests = b"".join(hashlib.sha256(text).digest() for text in texts)
    everyone = _gather(digests, collectives, device=device, label="model and config digests")
    table = [[row[32 * number :][:32] for number in range(len(texts))] for row in everyone]
    differences: list[str] = []
    told: set[tuple[str, ...]] = set()
    for number, name in enumerate(facts):
        if any(row[number] != table[0][number] for row in table):
            for difference, odd in _differences(name, texts[number], collectives, numbers, device=device).items():
                # Several facts list the same things: one that is missing in all of them is told once.
                if (difference, *odd) not in told:
                    differences.append(f"rank {', '.join(odd)} in {name}: {difference}")
                if difference.startswith("`["):
                    told.add((difference, *odd))
    if differences:
        raise ModelError(
            f"the ranks{whose} do not agree with rank {numbers[0]}: {'; '.join(differences)}",
            hint="build the same model from the same config on every rank, and give each the whole training_data, "
            "which the loader shares out",
        )


def _differences(
    name: str, mine: bytes, collectives: Collectives, numbers: Sequence[int], *, device: torch.device
) -> dict[str, list[str]]:
    """Returns where ranks differ from the first in one fact, and which; ranks that differ alike are named together."""
    label = f"what {name} is on rank {numbers[0]}"
    length = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    collectives.broadcast(length, source=0, label=label).wait()
    with collectives.reading(label):
        numel = int(length.item())
    text = torch.zeros(numel, dtype=torch.uint8, device=device)
    if collectives.rank == 0:
        text.copy_(torch.tensor(list(mine), dtype=torch.uint8))
    collectives.broadcast(text, source=0, label=label).wait()
    with collectives.reading(label):
        first = bytes(text.tolist())
    found = first_difference(json.loads(first), json.loads(mine))
    words = "" if found is None else _words(found, numbers[0])
    told = _gather(words.encode()[:_TOLD_BYTES].ljust(_TOLD_BYTES, b"\0"), collectives, device=device, label=label)
    by_difference: dict[str, list[str]] = {}
    for rank, row in enumerate(told):
        difference = row.rstrip(b"\0").decode("utf-8", "replace")
        if difference:
            by_difference.setdefault(difference, []).append(str(numbers[rank]))
    return by_difference


def _words(found: Difference, first: int) -> str:
    path = f"`{found.path}` " if found.path else ""
    return f"{path}is {found.first} on rank {first} and {found.second} there"


def _gather(mine: bytes, collectives: Collectives, *, device: torch.device, label: str) -> list[bytes]:
    """Returns what each rank gave: equally many bytes."""
    shard = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    everyone = torch.empty(shard.numel() * collectives.size, dtype=torch.uint8, device=device)
    collectives.all_gather(everyone, shard, label=label).wait()
    with collectives.reading(label):
        return [bytes(row) for row in everyone.view(collectives.size, -1).tolist()]


def largest(values: Sequence[float], collectives: Collectives, *, device: torch.device, label: str) -> list[float]:
    """Returns the largest that any rank gave of each number, exactly; one all-reduce of 8 bytes a number.

    Args:
        values: this rank's numbers, equally many on every rank.
        collectives: the axis; every rank must call.
        device: device of the collectives' tensors.
        label: name of the values that are compared, shown to observers while a rank waits.
    """
    most = torch.tensor(list(values), dtype=torch.float64, device=device)
    collectives.all_reduce(most, op="max", label=label).wait()
    with collectives.reading(label):
        return most.tolist()


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong on at least one rank: the last rank that failed, and this rank's own error if it did."""

    rank: int
    error: Exception | None


def attempt(work: Callable[[], None], collectives: Collectives, *, device: torch.device, label: str) -> Failure | None:
    """Runs each rank's part and returns on every rank whether one failed; one all-reduce of one number.

    Args:
        work: function that does this rank's part; it enters no collective.
        collectives: the axis; every rank must call.
        device: device of the collectives' tensors.
        label: name of the work that is attempted, shown to observers while a rank waits for the others' parts.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as raised:  # whatever it is: the other ranks wait, and the caller raises it
        error = raised
    failed = torch.tensor([-1 if error is None else collectives.rank], dtype=torch.int64, device=device)
    collectives.all_reduce(failed, op="max", label=f"{label} outcome").wait()
    with collectives.reading(f"{label} outcome"):
        rank = int(failed.item())
    return None if rank < 0 else Failure(rank, error)
