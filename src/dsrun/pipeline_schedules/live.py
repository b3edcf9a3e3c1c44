"""What a rank keeps of its chunks while a schedule runs: numbers of micro batches, no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .actions import Kind, Schedule


@dataclass(frozen=True, slots=True)
class LiveMoment:
    """What a rank keeps at one moment. Chunks are those of the rank, by their position from the inputs on.

    Attributes:
        counts: micro batches of each chunk whose backward has not ended, the one in backward among them.
        put_off: micro batches of each chunk that wait for the gradients of their weights alone.
        backward: position of the chunk whose backward runs; None for none.
    """

    counts: tuple[int, ...]
    put_off: tuple[int, ...]
    backward: int | None

    def is_within(self, other: LiveMoment) -> bool:
        """Whether `other` keeps as much of everything, or more."""
        pairs = zip(self.counts + self.put_off, other.counts + other.put_off, strict=True)
        return self.backward in (None, other.backward) and all(own <= others for own, others in pairs)


#: One micro batch at a time, of one chunk.
ONE_AT_A_TIME = (LiveMoment((1,), (0,), 0),)


def live_moments(schedule: Schedule, rank: int) -> tuple[LiveMoment, ...]:
    """Returns the moments of a rank beside which no other one keeps as much of everything.

    Args:
        schedule: schedule with or without messages and ZeRO.
        rank: rank of the pipeline.
    """
    found: list[LiveMoment] = []
    for moment in (LiveMoment(*kept) for kept in dict.fromkeys(_moments(schedule, rank))):
        if not any(moment.is_within(other) for other in found):
            found = [*(other for other in found if not other.is_within(moment)), moment]
    return tuple(found)


def most_live(schedule: Schedule, rank: int, weights: Sequence[int]) -> int:
    """Returns the most that a rank keeps at once, until a backward has ended with the gradients of its weights.

    Args:
        schedule: schedule with or without messages and ZeRO.
        rank: rank of the pipeline.
        weights: weight of a micro batch of each of the rank's chunks, such as the number of its blocks.
    """
    return max(
        (
            sum(weight * (live + late) for weight, live, late in zip(weights, counts, put_off, strict=True))
            for counts, put_off in dict.fromkeys((counts, put_off) for counts, put_off, _ in _moments(schedule, rank))
        ),
        default=0,
    )


def _moments(schedule: Schedule, rank: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int | None]]:
    """Yields what is kept at the most of each computation that keeps more than the one before, as a moment's fields.

    There are thousands, few of which differ: a moment itself is made of those alone.

    A whole backward begins with all that its forward has kept. A backward to the inputs ends with the most: by then
    what its blocks save waits, of those too that have kept less of it.
    """
    position_of = {chunk: position for position, chunk in enumerate(schedule.chunks_of(rank))}
    counts, put_off = [0] * len(position_of), [0] * len(position_of)
    for action in schedule.actions[rank]:
        position = position_of.get(action.chunk)
        if position is None:  # `validate.py` tells of it
            continue
        match action.kind:
            case Kind.FORWARD:
                counts[position] += 1
                yield tuple(counts), tuple(put_off), None
            case Kind.BACKWARD:
                yield tuple(counts), tuple(put_off), position
                counts[position] -= 1
            case Kind.INPUT_GRADS:
                counts[position] -= 1
                put_off[position] += 1
                yield tuple(counts), tuple(put_off), None
            case Kind.WEIGHT_GRADS:
                put_off[position] -= 1
            case _:
                pass
