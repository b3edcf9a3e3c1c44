"""Prices a schedule: when each action begins and ends, how long ranks wait. It proves nothing; see `validate.py`.

[Note: what takes time]
Computations take the time of their chunk, a whole backward that of its two parts. A message is there the time of the
link after it was made, whatever the ranks do meanwhile, and at once between chunks of one rank. Sends, receives,
gathers, drops and reductions take no time of a rank: they go on beside its computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dsrun.errors import LayoutError

from .actions import COMPUTES, Kind, Schedule
from .validate import live_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What computations and messages take, in seconds or in any other unit.

    Attributes:
        forward: time of the forward of each chunk for one micro batch.
        input_grads: time of the gradients of its inputs; of all that is computed again for them, too.
        weight_grads: time of the gradients of its weights.
        link: time of a message between two ranks.
    """

    forward: Sequence[float]
    input_grads: Sequence[float]
    weight_grads: Sequence[float]
    link: float = 0.0

    def check(self, chunks: int) -> None:
        """Refuses costs of another number of chunks.

        Args:
            chunks: number of chunks.

        Raises:
            LayoutError: the costs are of another number.
        """
        for name in ("forward", "input_grads", "weight_grads"):
            found = len(getattr(self, name))
            if found != chunks:
                raise LayoutError(f"costs: {name} has {found} chunks; expected {chunks}")


def equal_costs(
    chunks: int, *, forward: float = 1.0, input_grads: float = 1.0, weight_grads: float = 1.0, link: float = 0.0
) -> Costs:
    """Returns the costs of chunks that are all alike.

    Args:
        chunks: number of chunks.
        forward: time of a forward.
        input_grads: time of the gradients of the inputs.
        weight_grads: time of the gradients of the weights.
        link: time of a message between two ranks.
    """
    return Costs(
        forward=(forward,) * chunks,
        input_grads=(input_grads,) * chunks,
        weight_grads=(weight_grads,) * chunks,
        link=link,
    )


@dataclass(frozen=True)
class Timeline:
    """A schedule in time; all times are in the unit of the costs, from the begin of the global batch on.

    Attributes:
        schedule: the schedule.
        starts: begin of each action of each rank.
        ends: end of each action of each rank.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def seconds(self) -> float:
        """Time until the last rank has ended."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank waits, before its first computation and behind its last one as well."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Time that ranks wait over the time that they compute; what papers give as the bubble over the ideal time."""
        return sum(self.idle) / sum(self.busy)

    @property
    def bubble_share(self) -> float:
        """Part of the step that ranks wait."""
        return sum(self.idle) / (self.seconds * self.schedule.ranks)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Most forwards of chunks that each rank keeps; see `live_of`."""
        return live_of(self.schedule)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Returns when each action begins and ends.

    Args:
        schedule: schedule with or without messages and ZeRO.
        costs: costs of each of its chunks.

    Raises:
        LayoutError: the costs are of another number of chunks, or ranks wait for each other.
    """
    costs.check(schedule.chunks)
    piece = simulate_piece(schedule, costs, Moment.first(schedule))
    return Timeline(schedule, tuple(map(tuple, piece.starts)), tuple(map(tuple, piece.ends)))


@dataclass(frozen=True, slots=True)
class Moment:
    """All that the times of what is yet to do depend on.

    Attributes:
        free: time at which each rank has ended what it has done.
        inputs: time at which each chunk is given inputs that it has not used, by `chunk * micros + micro`.
        grads: time at which each chunk is given the gradients of its outputs, likewise.
    """

    free: tuple[float, ...]
    inputs: Mapping[int, float]
    grads: Mapping[int, float]

    @classmethod
    def first(cls, schedule: Schedule) -> Moment:
        """Returns the begin of a global batch."""
        return cls((0,) * schedule.ranks, {}, {})


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a schedule in time.

    Attributes:
        starts: begin of each action of each rank.
        ends: end of each action of each rank.
        leads: time at which each rank is free for each computation that needs another chunk's result, less the time at
            which the result is there: above 0 the result waits, below 0 the rank does.
        end: moment behind the piece.
    """

    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    leads: Sequence[Sequence[float]]
    end: Moment


def simulate_piece(piece: Schedule, costs: Costs, begin: Moment) -> Piece:
    """Returns when each action of a piece of a schedule begins and ends.

    Args:
        piece: neighbouring actions of each rank; those of the schedule that need each other stand in one piece, or in
            the order of the pieces.
        costs: costs of each chunk of the schedule.
        begin: moment behind the piece before.

    Raises:
        LayoutError: ranks wait for each other, or for what is in no piece so far.
    """
    run = _Run(piece, costs, begin)
    ready = list(range(piece.ranks))
    while ready:
        ready += run.go_on(ready.pop())
    stuck = [rank for rank, row in enumerate(piece.actions) if len(run.ends[rank]) < len(row)]
    if stuck:
        raise LayoutError(
            f"schedule {piece.name}: ranks {stuck} wait for ever", hint="`problems_of` of validate.py says for what"
        )
    return Piece(run.starts, run.ends, run.leads, run.moment)


class _Run:
    """How far each rank has come, and when what it made is where it is needed."""

    def __init__(self, schedule: Schedule, costs: Costs, begin: Moment) -> None:
        self.starts: list[list[float]] = [[] for _ in schedule.actions]
        self.ends: list[list[float]] = [[] for _ in schedule.actions]
        self.leads: list[list[float]] = [[] for _ in schedule.actions]
        self._schedule = schedule
        whole = [sum(parts) for parts in zip(costs.input_grads, costs.weight_grads, strict=True)]
        self._costs = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: whole,
            Kind.INPUT_GRADS: costs.input_grads,
            Kind.WEIGHT_GRADS: costs.weight_grads,
        }
        # Time from a chunk to the one behind it.
        self._delays = [
            0 if rank == schedule.rank_of[(chunk + 1) % schedule.chunks] else costs.link
            for chunk, rank in enumerate(schedule.rank_of)
        ]
        # When each chunk is given its inputs, and the gradients of its outputs, by chunk and micro batch.
        self._given = (dict(begin.inputs), dict(begin.grads))
        self._waiting: dict[tuple[int, int], int] = {}
        self._now = list(begin.free)

    @property
    def moment(self) -> Moment:
        """How things stand."""
        return Moment(tuple(self._now), *self._given)

    def go_on(self, rank: int) -> list[int]:
        """Does the actions of a rank until it must wait; returns the ranks that no longer have to."""
        schedule, given, delays = self._schedule, self._given, self._delays
        micros, last = schedule.micros, schedule.chunks - 1
        row, starts, ends, leads = schedule.actions[rank], self.starts[rank], self.ends[rank], self.leads[rank]
        now, woken = self._now[rank], list[int]()
        for at in range(len(ends), len(row)):
            action = row[at]
            kind, chunk = action.kind, action.chunk
            if kind not in COMPUTES:
                starts.append(now)
                ends.append(now)
                continue
            key = chunk * micros + action.micro
            # Which of `given` it needs and makes, if there is a chunk on that side.
            side = 0 if kind is Kind.FORWARD else 1
            if kind is not Kind.WEIGHT_GRADS and chunk != (0, last)[side]:
                when = given[side].pop(key, None)
                if when is None:
                    self._waiting[side, key] = rank
                    break
                leads.append(now - when)
                now = max(now, when)
            starts.append(now)
            now += self._costs[kind][chunk]
            ends.append(now)
            if kind is Kind.WEIGHT_GRADS or chunk == (last, 0)[side]:
                continue
            to = key + micros if side == 0 else key - micros
            given[side][to] = now + delays[chunk if side == 0 else chunk - 1]
            waiting = self._waiting.pop((side, to), None)
            if waiting is not None:
                woken.append(waiting)
        self._now[rank] = now
        return woken
