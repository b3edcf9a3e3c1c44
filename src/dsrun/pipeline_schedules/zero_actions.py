"""Adds to a schedule when a chunk's parameters are gathered and dropped, and when its gradients are reduced.

It knows no ZeRO stage: its caller says how long parameters stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from dsrun.errors import ConfigError

from .actions import COMPUTES, Action, Kind, Schedule

#: How long gathered parameters stay: from a chunk's first use to its last one; for all forwards, and again for all
#: backwards; or they are never gathered, as they are there.
Parameters = Literal["held", "phases", "never"]
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def with_zero(schedule: Schedule, *, parameters: Parameters, reduces: bool = True, ahead: bool = False) -> Schedule:
    """Returns the schedule with what ZeRO does between its computations.

    A reduction stands behind the last gradients of a chunk, and behind their send: what other ranks wait for leaves
    first. Between the forwards and the backwards of one chunk, parameters stay where nothing comes in between.

    Args:
        schedule: schedule with or without messages.
        parameters: time that gathered parameters stay; see `Parameters`.
        reduces: whether gradients are reduced in the batch.
        ahead: whether a chunk is gathered behind the first computation of the chunk before it; else behind the last.

    Raises:
        ConfigError: parameters are to be gathered for phases that the schedule does not have.
    """
    rows = tuple(_with_zero(schedule, rank, parameters, reduces, ahead) for rank in range(schedule.ranks))
    return Schedule(schedule.name, schedule.micros, schedule.rank_of, rows)


def _with_zero(schedule: Schedule, rank: int, parameters: Parameters, reduces: bool, ahead: bool) -> tuple[Action, ...]:
    row = schedule.actions[rank]
    gathers: dict[int, list[Action]] = {}
    early: dict[int, list[Action]] = {}
    drops: dict[int, list[Action]] = {}
    uses = _uses(row)
    stays = sorted(
        (first, last, chunk)
        for chunk, places in uses.items()
        for first, last in _stays(schedule, rank, chunk, places, parameters)
    )
    before: int | None = None
    for first, last, chunk in stays:
        gathered, at = (gathers, first) if before is None or not ahead else (early, before)
        gathered.setdefault(at, []).append(Action(Kind.GATHER, chunk))
        drops.setdefault(last, []).append(Action(Kind.DROP, chunk))
        before = first
    reductions = {places[-1]: Action(Kind.REDUCE, chunk) for chunk, places in uses.items()} if reduces else {}
    made: list[Action] = []
    late: list[Action] = []  # what stands behind the send of the computation before
    for index, action in enumerate(row):
        if late and action.kind not in _SENDS:
            made += late
            late = []
        made += gathers.get(index, ())
        made.append(action)
        late += early.get(index, ())
        late += [reductions[index]] if index in reductions else ()
        late += drops.get(index, ())
    return (*made, *late)


def _uses(row: Sequence[Action]) -> dict[int, list[int]]:
    """Returns the places in a row at which each chunk computes."""
    uses: dict[int, list[int]] = {}
    for index, action in enumerate(row):
        if action.kind in COMPUTES:
            uses.setdefault(action.chunk, []).append(index)
    return uses


def _stays(
    schedule: Schedule, rank: int, chunk: int, places: Sequence[int], parameters: Parameters
) -> Iterator[tuple[int, int]]:
    """Yields the first and the last place of each time that a chunk's parameters are gathered for."""
    if parameters == "never":
        return
    row = schedule.actions[rank]
    if parameters == "held":
        yield places[0], places[-1]
        return
    computes = [index for index, action in enumerate(row) if action.kind in COMPUTES]
    start = computes.index(places[0])
    forwards = sum(row[index].kind is Kind.FORWARD for index in places)
    turn = next((i for i, index in enumerate(places) if row[index].kind is not Kind.FORWARD), len(places))
    if forwards != turn or computes[start : start + turn] != list(places[:turn]):
        raise _no_phases(schedule, chunk)
    if turn == len(places):
        yield places[0], places[-1]
        return
    again = computes.index(places[turn])
    if computes[again : again + len(places) - turn] != list(places[turn:]):
        raise _no_phases(schedule, chunk)
    if again == start + turn:
        yield places[0], places[-1]
        return
    yield places[0], places[turn - 1]
    yield places[turn], places[-1]


def _no_phases(schedule: Schedule, chunk: int) -> ConfigError:
    return ConfigError(
        f"`pipeline.schedule` is {schedule.name}; chunk {chunk} has its forwards or its backwards in several pieces, "
        "and each would gather its parameters again",
        hint="take the schedule breadth_first, or ZeRO stage 1",
    )
