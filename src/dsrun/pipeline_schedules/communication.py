"""Adds the messages between ranks to a schedule that computes alone. It moves no computing.

[Note: receives ahead]
A receive is asked for one computation ahead of the one that needs it, so that the message can come while the rank
computes; and where the message is made earlier than that, if all computations take the same time, at once. So not more
than one message of a lane is sent before it is asked for, under breadth first, too. A send stands directly behind what
has made it. Between two chunks of one rank there is no message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .actions import COMPUTES, Action, Kind, Schedule
from .simulate import Timeline, equal_costs, simulate

#: A receive: place of the computation that it stands before, and when its message is made.
_Receive = tuple[int, float, Action]


@dataclass(slots=True)
class _Lane:
    """Messages of one rank to another in one direction.

    Attributes:
        to: rank that receives them.
        messages: messages as they are sent: when they are made, the chunk that needs them, the micro batch.
    """

    to: int
    messages: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])


@dataclass(frozen=True, slots=True)
class _Direction:
    """One of the two ways that messages go.

    Attributes:
        send: kind of its sends.
        receive: kind of its receives.
        step: difference of the chunk that needs a message to the one that has made it.
        lanes: its lanes.
        lane_of: lane that each chunk sends on; None where it sends nothing.
        needed: place of what needs a message among the computations of its rank, by chunk and micro batch.
    """

    send: Kind
    receive: Kind
    step: int
    lanes: Sequence[_Lane]
    lane_of: Sequence[_Lane | None]
    needed: list[int]


def with_communication(schedule: Schedule) -> Schedule:
    """Returns the schedule with its sends and receives.

    Receives of one pair of ranks and one lane stand in the order of its sends, see [Note: messages in order] in the
    runtime's `links.py`: one that is needed before others that were sent earlier has those asked for with it.

    Args:
        schedule: schedule without messages; see `make_schedule` and `with_zero`.

    Raises:
        LayoutError: its ranks wait for each other.
    """
    forward = _direction(schedule, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, 1)
    backward = _direction(schedule, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, -1)
    timeline = simulate(schedule, equal_costs(schedule.chunks))
    begun = [_look_at(timeline, rank, forward, backward) for rank in range(schedule.ranks)]
    asked: list[list[_Receive]] = [[] for _ in begun]
    for direction in (forward, backward):
        for lane in direction.lanes:
            asked[lane.to] += _receives(lane, direction, begun[lane.to], schedule.micros)
    rows = tuple(
        tuple(_row(row, forward, backward, iter(sorted(of_rank, key=_place_and_time))))
        for row, of_rank in zip(schedule.actions, asked, strict=True)
    )
    return Schedule(schedule.name, schedule.micros, schedule.rank_of, rows)


def _direction(schedule: Schedule, send: Kind, receive: Kind, step: int) -> _Direction:
    lanes: dict[tuple[int, int], _Lane] = {}
    lane_of: list[_Lane | None] = []
    for chunk, rank in enumerate(schedule.rank_of):
        other = chunk + step
        to = schedule.rank_of[other] if 0 <= other < schedule.chunks else rank
        lane_of.append(None if to == rank else lanes.setdefault((rank, to), _Lane(to)))
    needed = [0] * (schedule.chunks * schedule.micros)
    return _Direction(send, receive, step, tuple(lanes.values()), lane_of, needed)


def _look_at(timeline: Timeline, rank: int, forward: _Direction, backward: _Direction) -> list[float]:
    """Notes what a rank needs and sends; returns when each of its computations begins."""
    begun: list[float] = []
    micros = timeline.schedule.micros
    row = zip(timeline.schedule.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, start, end in row:
        kind, chunk, micro = action.kind, action.chunk, action.micro
        if kind not in COMPUTES:
            continue
        if kind is not Kind.WEIGHT_GRADS:
            direction = forward if kind is Kind.FORWARD else backward
            direction.needed[chunk * micros + micro] = len(begun)
            lane = direction.lane_of[chunk]
            if lane is not None:
                lane.messages.append((end, chunk + direction.step, micro))
        begun.append(start)
    return begun


def _receives(lane: _Lane, direction: _Direction, begun: Sequence[float], micros: int) -> Iterable[_Receive]:
    """Returns the receives of a lane in the order of its sends; see [Note: receives ahead]."""
    place = len(begun)
    found: list[_Receive] = []
    # From the last one on: none may be asked for behind one that is sent later.
    for made, chunk, micro in reversed(lane.messages):
        ahead = max(0, direction.needed[chunk * micros + micro] - 1)
        place = min(place, ahead, bisect_left(begun, made))
        found.append((place, made, Action(direction.receive, chunk, micro)))
    return reversed(found)


def _place_and_time(receive: _Receive) -> tuple[int, float]:
    return receive[:2]


def _row(
    actions: Sequence[Action],
    forward: _Direction,
    backward: _Direction,
    receives: Iterator[_Receive],
) -> Iterator[Action]:
    """Yields a rank's actions with its messages; receives are given in the order in which they are asked for."""
    computed = 0
    coming = next(receives, None)
    for action in actions:
        kind = action.kind
        if kind not in COMPUTES:
            yield action
            continue
        while coming is not None and coming[0] == computed:
            yield coming[2]
            coming = next(receives, None)
        computed += 1
        yield action
        if kind is not Kind.WEIGHT_GRADS:
            direction = forward if kind is Kind.FORWARD else backward
            if direction.lane_of[action.chunk] is not None:
                yield Action(direction.send, action.chunk, action.micro)
