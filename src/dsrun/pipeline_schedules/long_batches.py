"""Prices a global batch of any number of micro batches in a few rounds. It makes no timeline; see `simulate.py`.

[Note: rounds]
In the middle of a long batch all ranks do the same again and again, with the next micro batches: a round. The row of a
rank is a beginning, rounds, and an end, and more micro batches are more rounds.

A round adds costs to times and takes the later of two times. As long as each of these comparisons has the same answer,
a time that moved by so much in the last round moves by as much in the next: so all rounds up to the first one with
another answer are done at once. That is exact. Times that merely look regular say nothing: where one stage is dearer
than another by little, it takes thousands of micro batches until it sets the pace. Where messages take time, answers
come back after several rounds; these are then one step.

Source: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, chapter 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import frexp, ldexp

from .actions import Action, Schedule
from .generate import ScheduleName, check_numbers, make_schedule
from .simulate import Costs, Moment, simulate, simulate_piece

#: Micro batches with which every rank has a beginning and an end of its own, by rank of the pipeline.
_FEW = 3
#: Binary digits of costs, which become whole numbers: sums are then exact, and costs that differ by rounding are alike.
_DIGITS = 40
#: Most rounds that are one step, by rank of the pipeline. The longest way that a micro batch keeps others waiting is
#: through all ranks and back; it holds as many as there are ranks.
_LONGEST = 4


@dataclass(frozen=True, slots=True)
class Rounds:
    """Pieces of the schedule of a long batch; see [Note: rounds].

    Attributes:
        beginning: actions of each rank before the first round.
        around: those of the first round; those of the next are of micro batches that follow.
        end: those behind the rounds, with micro batches as if there was no round.
        each: micro batches that a round adds.
        fewest: micro batches of a batch without rounds.
    """

    beginning: Schedule
    around: Schedule
    end: Schedule
    each: int
    fewest: int


def step_seconds(name: ScheduleName, costs: Costs, *, ranks: int, micros: int, virtual: int = 1) -> float:
    """Returns the time until the last rank has ended: what `simulate` says, to 1e-9 of it.

    Args:
        name: name of the schedule.
        costs: costs of each of its chunks.
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch.
        virtual: chunks of a rank.

    Raises:
        ConfigError: the schedule does not take these numbers.
        LayoutError: the costs are of another number of chunks.
    """
    check_numbers(name, ranks, micros, virtual)
    costs.check(ranks * virtual)
    if name in ("gpipe", "breadth_first"):
        return _chunk_by_chunk(costs, ranks, micros)
    rounds = rounds_of(name, ranks, virtual)
    count = (micros - rounds.fewest) // rounds.each
    largest = max(*costs.forward, *costs.input_grads, *costs.weight_grads, costs.link if ranks > 1 else 0)
    if count <= 0 or not largest:
        return simulate(
            make_schedule(name, ranks=ranks, micros=min(micros, rounds.fewest), virtual=virtual), costs
        ).seconds
    unit = ldexp(1.0, frexp(largest)[1] - _DIGITS)
    whole = Costs(
        forward=[round(cost / unit) for cost in costs.forward],
        input_grads=[round(cost / unit) for cost in costs.input_grads],
        weight_grads=[round(cost / unit) for cost in costs.weight_grads],
        link=round(costs.link / unit),
    )
    begun = simulate_piece(rounds.beginning, whole, Moment.first(rounds.beginning)).end
    last = simulate_piece(rounds.end, whole, _after(count, rounds, whole, begun)).end
    return max(last.free) * unit


@cache
def rounds_of(name: ScheduleName, ranks: int, virtual: int) -> Rounds:
    """Returns the pieces of a schedule that goes on in rounds.

    Args:
        name: name of the schedule; neither `gpipe` nor `breadth_first`, whose chunks take all micro batches in turn.
        ranks: ranks of the pipeline.
        virtual: chunks of a rank.
    """
    each, fewest = ranks if name == "interleaved" else 1, _FEW * ranks
    short = make_schedule(name, ranks=ranks, micros=fewest, virtual=virtual)
    longer = make_schedule(name, ranks=ranks, micros=fewest + each, virtual=virtual)
    beginning: list[tuple[Action, ...]] = []
    around: list[tuple[Action, ...]] = []
    end: list[tuple[Action, ...]] = []
    for row, more in zip(short.actions, longer.actions, strict=True):
        differs = (at for at, (action, other) in enumerate(zip(row, more, strict=False)) if action != other)
        same = next(differs, len(row))
        beginning.append(row[:same])
        around.append(more[same : same + len(more) - len(row)])
        end.append(row[same:])

    def piece(rows: Iterable[tuple[Action, ...]]) -> Schedule:
        # Of one number of micro batches: a moment counts by it.
        return Schedule(name, longer.micros, longer.rank_of, tuple(rows))

    return Rounds(piece(beginning), piece(around), piece(end), each, fewest)


def _after(count: int, rounds: Rounds, costs: Costs, begin: Moment) -> Moment:
    """Returns the moment behind so many rounds.

    Args:
        count: number of rounds.
        rounds: pieces of the schedule.
        costs: costs of each chunk, in whole numbers.
        begin: moment before the rounds.
    """
    longest = _LONGEST * rounds.around.ranks
    moments, leads = [begin], list[list[float]]()
    while count:
        done = simulate_piece(rounds.around, costs, moments[-1])
        moments = [*moments[-2 * longest :], _of_next_round(done.end, rounds.each)]
        leads = [*leads[1 - 2 * longest :], [lead for row in done.leads for lead in row]]
        count -= 1
        for size in range(1, len(leads) // 2 + 1):
            step = _regular_step(moments[-1], moments[-1 - size], moments[-1 - 2 * size])
            alike = 0 if step is None else _rounds_alike(leads[-size:], leads[-2 * size : -size])
            times = count // size if alike is None else min(count // size, alike)
            if step is not None and times:
                moments, leads = [_moved(moments[-1], [times * time for time in step])], []
                count -= times * size
                break
    return moments[-1]


def _of_next_round(moment: Moment, each: int) -> Moment:
    """Returns a moment as the next round sees it, whose micro batches have the numbers of the round before."""
    inputs = {key - each: time for key, time in moment.inputs.items()}
    return Moment(moment.free, inputs, {key - each: time for key, time in moment.grads.items()})


def _regular_step(last: Moment, before: Moment, first: Moment) -> list[float] | None:
    """Returns by how much each time of a moment has moved, if it moved twice by as much."""
    if last.free[0] - before.free[0] != before.free[0] - first.free[0]:  # most differ here
        return None
    step = [time - earlier for time, earlier in zip(_times(last), _times(before), strict=True)]
    return (
        step if step == [time - earlier for time, earlier in zip(_times(before), _times(first), strict=True)] else None
    )


def _rounds_alike(leads: Sequence[Sequence[float]], earlier: Sequence[Sequence[float]]) -> int | None:
    """Returns how often comparisons can have the answers that they had twice; None for ever.

    Args:
        leads: time of one side less that of the other for each comparison of the last rounds.
        earlier: those of as many rounds before.
    """
    fewest: int | None = None
    for of_round, of_earlier in zip(leads, earlier, strict=True):
        for lead, before in zip(of_round, of_earlier, strict=True):
            if lead * before < 0:
                return 0
            nearer = abs(before) - abs(lead)
            if nearer > 0:
                times = int(abs(lead) // nearer)
                fewest = times if fewest is None else min(fewest, times)
    return fewest


def _times(moment: Moment) -> Iterator[float]:
    """Yields all times of a moment, in an order that is the same for all rounds."""
    yield from moment.free
    for given in (moment.inputs, moment.grads):
        for key in sorted(given):
            yield given[key]


def _moved(moment: Moment, by: Iterable[float]) -> Moment:
    """Returns a moment whose times have moved, each by its own amount."""
    moves = iter(by)
    free = tuple(time + next(moves) for time in moment.free)
    inputs, grads = (
        {key: given[key] + next(moves) for key in sorted(given)} for given in (moment.inputs, moment.grads)
    )
    return Moment(free, inputs, grads)


def _chunk_by_chunk(costs: Costs, ranks: int, micros: int) -> float:
    """Returns the time until the last rank has ended, where each chunk has all micro batches in turn.

    The longest way through such a batch is of pieces. Each goes through some neighbouring chunks, in the time of one
    micro batch, and stays at the dearest of them for all others; the next begins where the rank of the last chunk goes
    on.
    """
    free = [0.0] * ranks
    backward = [inputs + weights for inputs, weights in zip(costs.input_grads, costs.weight_grads, strict=True)]
    ways = ([*enumerate(costs.forward)], [*enumerate(backward)][::-1])
    for way in ways:
        begun: list[tuple[float, float]] = []
        for chunk, own in way:
            begun.append((free[chunk % ranks], own))
            ended, through, dearest = 0.0, 0.0, 0.0
            for begin, cost in reversed(begun):
                through, dearest = through + cost, max(dearest, cost)
                ended = max(ended, begin + through + (micros - 1) * dearest)
                through += costs.link if ranks > 1 else 0.0
            free[chunk % ranks] = ended
    return max(free)
