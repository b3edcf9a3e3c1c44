"""Makes the schedule of a name: which chunk each rank computes when. Messages and ZeRO are added by other modules.

[Note: order of backwards]
In every schedule a chunk takes its backwards, and where they stand apart the gradients of its weights, in ascending
order of micro batches. GPipe and breadth first are often drawn the other way round; that is as long, and their sums
would have other bits.

[Note: whole backwards]
Nobody waits for the gradients of chunk 0's inputs, and its rank computes those of the weights straight after. So chunk
0 has whole backwards, which cost less than two parts. A pipeline of one rank therefore has nothing in two parts with
`zero_bubble`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, get_args

from dsrun.errors import ConfigError, Problem

from .actions import Action, Kind, Schedule

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble", "zbv"]
NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)
#: Schedules of one chunk a rank.
_ONE_CHUNK = ("gpipe", "1f1b", "zero_bubble")


def make_schedule(name: str, *, ranks: int, micros: int, virtual: int | None = None) -> Schedule:
    """Returns what each rank computes in a global batch; nothing but computing, see `with_communication`.

    Args:
        name: one of `NAMES`.
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch; any number, with `interleaved` a multiple of the ranks.
        virtual: chunks of a rank; None: 2 with `zbv`, 1 with the others.

    Raises:
        ConfigError: the name is unknown, or the schedule does not take these numbers.

    Sources: GPipe (Huang et al., 2019); 1F1B and interleaved (Narayanan et al., 2021, arXiv 2104.04473); breadth first
    (Lamy-Poirier, 2022, arXiv 2211.05953); ZB-H1 and ZB-V (Qi et al., 2023, arXiv 2401.10241, and 2024, 2405.15362).
    """
    virtual = (2 if name == "zbv" else 1) if virtual is None else virtual
    check_numbers(name, ranks, micros, virtual)
    chunks = ranks * virtual
    rank_of = tuple(_zbv_rank(chunk, ranks) if name == "zbv" else chunk % ranks for chunk in range(chunks))
    rows = tuple(tuple(_row(name, rank, ranks, micros, virtual)) for rank in range(ranks))
    return Schedule(name, micros, rank_of, rows)


def check_numbers(name: str, ranks: int, micros: int, virtual: int) -> None:
    """Refuses numbers of which there is no schedule.

    Args:
        name: one of `NAMES`.
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch.
        virtual: chunks of a rank.

    Raises:
        ConfigError: the name is unknown, or the schedule does not take these numbers.
    """
    if name not in NAMES:
        raise ConfigError(
            f"`pipeline.schedule` is {name!r}; expected one of {', '.join(NAMES)}",
            hint="1f1b is what most take",
        )
    for key, value in (("pipeline.stages", ranks), ("micro batches", micros), ("pipeline.virtual_stages", virtual)):
        if value < 1:
            raise ConfigError(f"`{key}` of the schedule {name} is {value}", hint="give 1 or more")
    if name in _ONE_CHUNK and virtual != 1:
        raise ConfigError(
            f"`pipeline.virtual_stages` is {virtual}; the schedule {name} has 1 chunk a rank",
            hint="leave it out, or take the schedule interleaved or breadth_first",
        )
    if name == "zbv" and virtual != 2:
        raise ConfigError(
            f"`pipeline.virtual_stages` is {virtual}; the schedule zbv has 2 chunks a rank", hint="leave it out"
        )
    if (problem := misfit_of_micros(name, ranks=ranks, micros=micros)) is not None:
        raise ConfigError.of([problem])


def misfit_of_micros(name: str, *, ranks: int, micros: int, given: str | None = None) -> Problem | None:
    """Returns what keeps a schedule from taking a number of micro batches, and the numbers next to it.

    Args:
        name: one of `NAMES`.
        ranks: ranks of the pipeline.
        micros: micro batches of a global batch.
        given: words that say where the number comes from; None: it is written.
    """
    if name != "interleaved" or not micros % ranks:
        return None
    below, above = micros // ranks * ranks, -(-micros // ranks) * ranks
    return Problem(
        f"{given or f'`gradient_accumulation_steps` is {micros}'}; the schedule `interleaved` takes a multiple of the "
        f"{ranks} stages of `pipeline.stages`",
        f"take {f'{below} or {above}' if below else above} micro batches, or "
        '`pipeline.schedule` "breadth_first" for any number',
    )


def _row(name: str, rank: int, ranks: int, micros: int, virtual: int) -> Iterator[Action]:
    """Yields what a rank computes."""
    match name:
        case "1f1b":
            return _one_forward_one_backward(rank, ranks, micros, 1)
        case "interleaved":
            return _one_forward_one_backward(rank, ranks, micros, virtual)
        case "zero_bubble":
            return _zb1p(rank, ranks, micros)
        case "zbv":
            return _zbv(rank, ranks, micros)
        case _:
            # GPipe is breadth first with one chunk a rank.
            return _breadth_first(rank, ranks, micros, virtual)


def _breadth_first(rank: int, ranks: int, micros: int, virtual: int) -> Iterator[Action]:
    """Yields all forwards chunk by chunk, then all backwards chunk by chunk."""
    chunks = range(rank, ranks * virtual, ranks)
    for chunk in chunks:
        for micro in range(micros):
            yield Action(Kind.FORWARD, chunk, micro)
    for chunk in reversed(chunks):
        for micro in range(micros):
            yield Action(Kind.BACKWARD, chunk, micro)


def _one_forward_one_backward(rank: int, ranks: int, micros: int, virtual: int) -> Iterator[Action]:
    """Yields forwards until the first backward can be there, then a forward and a backward in turn.

    With several chunks, micro batches go through them in rounds of as many as there are ranks: all of a round through
    the first chunk, then through the second. A chunk that another rank's chunk follows is then a round ahead of it.
    """
    total = micros * virtual
    # One rank further from the loss, a message more goes each way; with several chunks it meets the next round's.
    warm = (ranks - 1 - rank) if virtual == 1 else (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
    warm = min(warm, total)
    places = _places(total, ranks if virtual > 1 else 1, virtual)
    for step in range(total + warm):
        if step < total:
            turn, micro = places[step]
            yield Action(Kind.FORWARD, turn * ranks + rank, micro)
        if step >= warm:
            turn, micro = places[step - warm]
            yield Action(Kind.BACKWARD, (virtual - 1 - turn) * ranks + rank, micro)


# All ranks of a schedule take the same turns.
@lru_cache(maxsize=1)
def _places(total: int, size: int, virtual: int) -> tuple[tuple[int, int], ...]:
    """Returns which of a rank's chunks has each turn, and with which micro batch, in rounds of `size` micro batches."""
    found: list[tuple[int, int]] = []
    for step in range(total):
        around, place = divmod(step, size * virtual)
        turn, micro = divmod(place, size)
        found.append((turn, around * size + micro))
    return tuple(found)


def _zb1p(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """Yields what a rank computes in ZB1P, the paper's ZB-H1: as much memory as 1F1B, about a third of its bubble.

    Gradients of weights lag behind those of inputs by as many micro batches as the rank's number, so that each rank
    keeps as many micro batches as the first one of 1F1B does.
    """
    warm = min(ranks - 1 - rank, micros)
    for step in range(micros + warm):
        if step < micros:
            yield Action(Kind.FORWARD, rank, step)
        back = step - warm
        if back >= 0:
            yield from _backward(rank, back)
            if back >= rank > 0:
                yield Action(Kind.WEIGHT_GRADS, rank, back - rank)
    if rank > 0:
        for micro in range(max(0, micros - rank), micros):
            yield Action(Kind.WEIGHT_GRADS, rank, micro)


def _zbv_rank(chunk: int, ranks: int) -> int:
    """Returns the rank of a chunk: from the first rank to the last one and back."""
    return chunk if chunk < ranks else 2 * ranks - 1 - chunk


def _zbv(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    """Yields what a rank computes in ZB-V: two chunks a rank, in a V, and no bubble between first and last action.

    It is made for at least 2 * ranks - 1 micro batches; with fewer, what there is not is left out.
    """
    for action in _zbv_whole(rank, ranks, max(2 * ranks - 1, micros)):
        if action.micro < micros:
            yield action


def _zbv_whole(rank: int, ranks: int, micros: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank  # chunks: the one on the way to the last rank, the one on the way back
    lead = 2 * (ranks - rank) - 1  # forwards of `down` before the first one of `up` can be there
    for micro in range(lead):
        yield Action(Kind.FORWARD, down, micro)
    for micro in range(rank):
        yield Action(Kind.FORWARD, up, micro)
        yield Action(Kind.FORWARD, down, lead + micro)
    forwards, backs = lead + rank, 0  # of `down`; `up` has had `rank` forwards
    for micro in range(ranks - rank):
        yield Action(Kind.FORWARD, up, rank + micro)
        yield from _both(up, micro)
    done = ranks - rank  # backwards of `up`; its forwards are `rank` ahead
    while done + rank < micros:
        if forwards < micros:
            yield Action(Kind.FORWARD, down, forwards)
            forwards += 1
        yield from _both(down, backs)
        yield Action(Kind.FORWARD, up, done + rank)
        yield from _both(up, done)
        backs, done = backs + 1, done + 1
    # What is left: gradients of inputs first, as other ranks wait for them.
    weights_down, weights_up = backs, done
    for _ in range(rank):
        yield from _backward(down, backs)
        yield from _backward(up, done)
        backs, done = backs + 1, done + 1
    for _ in range(ranks - rank):
        yield from _backward(down, backs)
        if down > 0:
            yield Action(Kind.WEIGHT_GRADS, down, weights_down)
        backs, weights_down = backs + 1, weights_down + 1
    for micro in range(weights_up, micros):
        yield Action(Kind.WEIGHT_GRADS, up, micro)
    if down > 0:
        for micro in range(weights_down, micros):
            yield Action(Kind.WEIGHT_GRADS, down, micro)


def _backward(chunk: int, micro: int) -> Iterator[Action]:
    """Yields the part of a backward that the chunk before waits for; see [Note: whole backwards]."""
    yield Action(Kind.INPUT_GRADS if chunk > 0 else Kind.BACKWARD, chunk, micro)


def _both(chunk: int, micro: int) -> Iterator[Action]:
    """Yields both parts of a backward, one after the other."""
    yield from _backward(chunk, micro)
    if chunk > 0:
        yield Action(Kind.WEIGHT_GRADS, chunk, micro)
