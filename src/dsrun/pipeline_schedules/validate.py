"""Proves that a schedule can be run and does what a global batch needs. It knows no times; see `simulate.py`.

[Note: what is proved]
Every computation is done once, on the rank of its chunk, behind what it needs; chunks take micro batches in ascending
order; each message is sent once and received once, and the receives of one lane stand in the order of its sends; the
ranks together come to their ends, also where only so many messages of a lane may be under way; parameters are there
where they are used, and gradients are reduced behind the last of them; no rank keeps more micro batches than claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsrun.errors import LayoutError, Problem

from .actions import NO_MICRO, Action, Kind, Schedule
from .live import most_live
from .progress import stuck_at

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_OF_CHUNK = (Kind.GATHER, Kind.DROP, Kind.REDUCE)
#: Place of what is not there.
_NOWHERE = -1
_Places = dict[Kind, list[int]]


def validate(schedule: Schedule, *, live: int | Sequence[int] | None = None, capacity: int | None = None) -> None:
    """Refuses a schedule that has problems; see `problems_of`.

    Args:
        schedule: schedule to prove.
        live: most forwards of chunks that a rank may keep at once, of all ranks or of each; None: any number.
        capacity: messages of a lane that may be sent before they are asked for; None: any number.

    Raises:
        LayoutError: the schedule has problems, all of them in one error.
    """
    problems = problems_of(schedule, live=live, capacity=capacity)
    if problems:
        raise LayoutError.of([Problem(f"schedule {schedule.name}: {problem}") for problem in problems])


def problems_of(
    schedule: Schedule, *, live: int | Sequence[int] | None = None, capacity: int | None = None
) -> list[str]:
    """Returns what is wrong with a schedule, see [Note: what is proved]; nothing if it can be run.

    A schedule without any messages is proved as one whose messages are there at once. What ranks wait for is looked at
    only where all else is right.

    Args:
        schedule: schedule to prove.
        live: most forwards of chunks that a rank may keep at once, of all ranks or of each; None: any number.
        capacity: messages of a lane that may be sent before they are asked for; None: any number.
    """
    shape = list(_shape(schedule))
    if shape:
        return shape
    places: _Places = {kind: [_NOWHERE] * (schedule.chunks * schedule.micros) for kind in Kind}
    found = list(_placed(schedule, places))
    has_messages = any(max(places[kind], default=_NOWHERE) != _NOWHERE for kind in (*_SENDS, *_RECEIVES))
    found += _computations(schedule, places)
    found += _orders(schedule, places)
    if has_messages:
        found += _messages(schedule, places)
        found += _lanes(schedule)
    found += _zero(schedule)
    if live is not None:
        claims = [live] * schedule.ranks if isinstance(live, int) else live
        for rank, (most, claim) in enumerate(zip(live_of(schedule), claims, strict=True)):
            if most > claim:
                found.append(f"rank {rank} keeps {most} forwards of chunks at once; claimed are {claim}")
    return found or stuck_at(schedule, has_messages=has_messages, capacity=capacity)


def live_of(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most forwards whose activations each rank keeps at once, one a chunk and micro batch.

    Over a rank's number of chunks, they are micro batches of whole stages. A forward is kept until the whole backward,
    or until the gradients of its weights.
    """
    return tuple(most_live(schedule, rank, [1] * len(schedule.chunks_of(rank))) for rank in range(schedule.ranks))


def _shape(schedule: Schedule) -> Iterator[str]:
    """Yields why the numbers of the schedule cannot be those of one."""
    if schedule.micros < 1:
        yield f"it has {schedule.micros} micro batches"
    for chunk, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.ranks:
            yield f"chunk {chunk} is on rank {rank} of {schedule.ranks}"


def _placed(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Fills in the place of each action in the row of its rank, and yields those that cannot stand there."""
    chunks, micros, rank_of = schedule.chunks, schedule.micros, schedule.rank_of
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            kind, chunk, micro = action
            if not 0 <= chunk < chunks:
                yield f"{_at(action, rank)}: there are {chunks} chunks"
                continue
            if rank_of[chunk] != rank:
                yield f"{_at(action, rank)}: the chunk is on rank {rank_of[chunk]}"
            if kind in _OF_CHUNK:
                if micro != NO_MICRO:
                    yield f"{_at(action, rank)}: it is of no micro batch"
                continue
            if not 0 <= micro < micros:
                yield f"{_at(action, rank)}: there are {micros} micro batches"
                continue
            of_kind, key = places[kind], chunk * micros + micro
            if of_kind[key] != _NOWHERE:
                yield f"{_at(action, rank)}: it is there twice"
            of_kind[key] = index


def _computations(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Yields computations that are missing, are there in two ways, or stand before what they need of their chunk."""
    forward, backward = places[Kind.FORWARD], places[Kind.BACKWARD]
    inputs, weights = places[Kind.INPUT_GRADS], places[Kind.WEIGHT_GRADS]
    for key, start in enumerate(forward):
        whole, first, second = backward[key], inputs[key], weights[key]
        if start == _NOWHERE:
            yield f"{_name(schedule, Kind.FORWARD, key)} is missing"
        if whole != _NOWHERE:
            if first != _NOWHERE or second != _NOWHERE:
                yield f"{_name(schedule, Kind.BACKWARD, key)} is there whole and in parts"
            first = whole
        elif first == _NOWHERE or second == _NOWHERE:
            yield f"{_name(schedule, Kind.BACKWARD, key)} is missing, or a part of it"
        elif second < first:
            yield f"{_name(schedule, Kind.WEIGHT_GRADS, key)} stands before {Kind.INPUT_GRADS.value}"
        if first != _NOWHERE and first < start:
            yield f"{_name(schedule, Kind.BACKWARD, key)} stands before the forward"


def _orders(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Yields chunks that do not take their micro batches in ascending order."""
    whole = places[Kind.BACKWARD]
    inputs = list(map(max, whole, places[Kind.INPUT_GRADS]))
    weights = list(map(max, whole, places[Kind.WEIGHT_GRADS]))
    for what, row in (("forwards", places[Kind.FORWARD]), ("backwards", inputs), ("gradients of weights", weights)):
        for chunk in range(schedule.chunks):
            of_chunk = row[chunk * schedule.micros : (chunk + 1) * schedule.micros]
            if of_chunk != sorted(of_chunk):
                yield f"chunk {chunk} does not take its {what} in the order of the micro batches"


def _messages(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Yields messages that are missing, that nobody needs, or that stand on the wrong side of their computation."""
    inputs = list(map(max, places[Kind.BACKWARD], places[Kind.INPUT_GRADS]))
    for step, computed, send, receive in (
        (1, places[Kind.FORWARD], Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD),
        (-1, inputs, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD),
    ):
        for chunk in range(schedule.chunks):
            for kind, other in ((send, chunk + step), (receive, chunk - step)):
                is_far = 0 <= other < schedule.chunks and schedule.rank_of[other] != schedule.rank_of[chunk]
                for key in range(chunk * schedule.micros, (chunk + 1) * schedule.micros):
                    place = places[kind][key]
                    if not is_far and place != _NOWHERE:
                        yield f"{_name(schedule, kind, key)} is of no other rank's chunk"
                    elif is_far and place == _NOWHERE:
                        yield f"{_name(schedule, kind, key)} is missing"
                    elif is_far and computed[key] != _NOWHERE and (place > computed[key]) != (kind is send):
                        side = "before" if kind is send else "behind"
                        yield f"{_name(schedule, kind, key)} stands {side} its computation"


def _lanes(schedule: Schedule) -> Iterator[str]:
    """Yields pairs of ranks of whom one receives in another order than the other sends."""
    sent: dict[tuple[int, int, bool], list[int]] = {}
    received: dict[tuple[int, int, bool], list[int]] = {}
    chunks, micros, rank_of = schedule.chunks, schedule.micros, schedule.rank_of
    for rank, row in enumerate(schedule.actions):
        for kind, chunk, micro in row:
            is_send = kind in _SENDS
            if not is_send and kind not in _RECEIVES:
                continue
            forward = kind is Kind.SEND_FORWARD or kind is Kind.RECEIVE_FORWARD
            other = chunk + (1 if forward == is_send else -1)
            if not 0 <= other < chunks:
                continue  # `_messages` has said so
            far = rank_of[other]
            lane, needs = ((rank, far, forward), other) if is_send else ((far, rank, forward), chunk)
            (sent if is_send else received).setdefault(lane, []).append(needs * micros + micro)
    for lane in sorted(sent.keys() | received.keys()):
        there, here = sent.get(lane, []), received.get(lane, [])
        if there != here:
            what = "activations" if lane[2] else "gradients"
            yield f"rank {lane[1]} does not receive {what} from rank {lane[0]} in the order in which they are sent"


def _zero(schedule: Schedule) -> Iterator[str]:
    """Yields chunks whose parameters are not there, or whose gradients are not reduced once behind the last one."""
    kinds = {action.kind for row in schedule.actions for action in row if action.kind in _OF_CHUNK}
    gathers, reduces = bool(kinds & {Kind.GATHER, Kind.DROP}), Kind.REDUCE in kinds
    for rank, row in enumerate(schedule.actions):
        there: set[int] = set()
        reduced: set[int] = set()
        for action in row if kinds else ():
            kind, chunk = action.kind, action.chunk
            if kind is Kind.GATHER:
                if chunk in there:
                    yield f"{_at(action, rank)}: the parameters are there"
                there.add(chunk)
            elif kind is Kind.DROP:
                if chunk not in there:
                    yield f"{_at(action, rank)}: the parameters are not there"
                there.discard(chunk)
            elif kind is Kind.REDUCE:
                if chunk in reduced:
                    yield f"{_at(action, rank)}: the gradients are reduced"
                reduced.add(chunk)
            elif kind not in _SENDS and kind not in _RECEIVES:
                if gathers and chunk not in there:
                    yield f"{_at(action, rank)}: the parameters are not there"
                if chunk in reduced and kind is not Kind.FORWARD:
                    yield f"{_at(action, rank)}: the gradients were reduced before"
        for chunk in sorted(there):
            yield f"chunk {chunk} on rank {rank}: the parameters are never dropped"
        for chunk in schedule.chunks_of(rank) if reduces else ():
            if chunk not in reduced:
                yield f"chunk {chunk} on rank {rank}: the gradients are never reduced"


def _at(action: Action, rank: int) -> str:
    return f"{action} on rank {rank}"


def _name(schedule: Schedule, kind: Kind, key: int) -> str:
    chunk, micro = divmod(key, schedule.micros)
    return str(Action(kind, chunk, micro))
