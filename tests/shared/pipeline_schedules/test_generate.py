"""Schedules by name: torch's own order, ascending backwards, any number of micro batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from dsrun.errors import ConfigError
from dsrun.pipeline_schedules.actions import Action, Kind, Schedule
from dsrun.pipeline_schedules.generate import NAMES, make_schedule
from dsrun.pipeline_schedules.simulate import equal_costs, simulate
from dsrun.pipeline_schedules.validate import live_of, problems_of

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADS, "W": Kind.WEIGHT_GRADS}
THEIRS = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "breadth_first": theirs.ScheduleLoopedBFS,
    "zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
}


class Stage:
    """What torch's schedules ask of a stage: making their orders, and running them without messages or tensors."""

    def __init__(self, index: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_size, self.group_rank = ranks, 0
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward = True
        self.submod = torch.nn.Linear(1, 1)
        self.device = torch.device("cpu")
        self.done: list[Action] = []

    def forward_one_chunk(self, micro: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.done.append(Action(Kind.FORWARD, self.stage_index, micro))
        return torch.zeros(1)

    def backward_one_chunk(self, micro: int, **kwargs: Any) -> None:
        self.done.append(Action(Kind.BACKWARD, self.stage_index, micro))

    def __getattr__(self, name: str) -> Any:
        """Returns what does nothing: preparations have no result, and there are no messages."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: [] if name.endswith("_ops") else None


def run_by_torch(name: str, ranks: int, micros: int) -> tuple[tuple[Action, ...], ...]:
    """Returns what each rank does when torch runs a schedule of one stage a rank."""
    rows = []
    for rank in range(ranks):
        stage: Any = Stage(rank, ranks, ranks)
        made: Any = THEIRS[name](stage, micros, loss_fn=lambda output, target: output)
        made._step_microbatches([()] * micros, [{}] * micros, [None] * micros)
        rows.append(tuple(stage.done))
    return tuple(rows)


def torchs(name: str, ranks: int, micros: int, virtual: int) -> Schedule:
    """Returns torch's schedule as one of ours, computations alone."""
    count = ranks * virtual
    indices = [0, count - 1] if name == "zbv" else list(range(0, count, ranks))
    stages: Any = [Stage(index, count, ranks) for index in indices]
    made: Any = THEIRS[name](stages, micros, loss_fn=lambda output, target: output)
    assert made.pipeline_order is not None
    rows = []
    for rank in range(ranks):
        rows.append(
            tuple(
                Action(KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
                for action in made.pipeline_order[rank]
                if action is not None
            )
        )
    rank_of = tuple(min(chunk, 2 * ranks - 1 - chunk) if name == "zbv" else chunk % ranks for chunk in range(count))
    return Schedule(name, micros, rank_of, tuple(rows))


def in_parts(row: tuple[Action, ...], *, chunk: int) -> list[Action]:
    """Returns a rank's actions with a chunk's whole backwards taken apart."""
    apart: list[Action] = []
    for action in row:
        if action.kind is Kind.BACKWARD and action.chunk == chunk:
            apart += [Action(kind, chunk, action.micro) for kind in (Kind.INPUT_GRADS, Kind.WEIGHT_GRADS)]
        else:
            apart.append(action)
    return apart


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_are_torchs(name: str, ranks: int, rounds: int) -> None:
    micros = ranks * rounds + (1 if rounds > 1 else 0)
    assert make_schedule(name, ranks=ranks, micros=micros).actions == run_by_torch(name, ranks, micros)


@pytest.mark.parametrize(("ranks", "virtual"), [(1, 2), (2, 2), (2, 3), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaved_is_torchs(ranks: int, virtual: int, rounds: int) -> None:
    ours = make_schedule("interleaved", ranks=ranks, micros=ranks * rounds, virtual=virtual)
    assert ours.actions == torchs("interleaved", ranks, ranks * rounds, virtual).actions


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_interleaved_of_one_chunk_is_as_fast_as_torchs_and_keeps_less(ranks: int) -> None:
    ours = make_schedule("interleaved", ranks=ranks, micros=4 * ranks)
    other = torchs("interleaved", ranks, 4 * ranks, 1)
    assert simulate(ours, equal_costs(ranks)).seconds == simulate(other, equal_costs(ranks)).seconds
    assert max(live_of(ours)) == ranks < max(live_of(other)) == 2 * ranks - 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_zero_bubble_is_torchs_but_for_whole_backwards_of_chunk_0(ranks: int, rounds: int) -> None:
    micros = ranks * rounds
    ours, other = make_schedule("zero_bubble", ranks=ranks, micros=micros), torchs("zero_bubble", ranks, micros, 1)
    assert [in_parts(row, chunk=0) for row in ours.actions] == [list(row) for row in other.actions]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 3, 4, 8, 15, 16, 33])
def test_zbv_is_torchs_but_for_whole_backwards_of_chunk_0(ranks: int, micros: int) -> None:
    ours, other = make_schedule("zbv", ranks=ranks, micros=micros), torchs("zbv", ranks, micros, 2)
    assert ours.rank_of == other.rank_of
    assert [in_parts(row, chunk=0) for row in ours.actions] == [list(row) for row in other.actions]


@pytest.mark.parametrize(("ranks", "virtual"), [(1, 1), (2, 2), (3, 3), (4, 2), (8, 4)])
@pytest.mark.parametrize("micros", [1, 4, 8, 16])
def test_breadth_first_has_torchs_order_with_ascending_backwards_and_is_as_fast(
    ranks: int, virtual: int, micros: int
) -> None:
    ours = make_schedule("breadth_first", ranks=ranks, micros=micros, virtual=virtual)
    other = torchs("breadth_first", ranks, micros, virtual)

    def places(row: tuple[Action, ...]) -> list[tuple[Kind, int]]:
        return [(action.kind, action.chunk) for action in row]

    assert list(map(places, ours.actions)) == list(map(places, other.actions))
    costs = equal_costs(ours.chunks, forward=3, input_grads=2, weight_grads=4)
    assert simulate(ours, costs).seconds <= simulate(other, costs).seconds
    assert live_of(ours) == live_of(other)


@pytest.mark.parametrize("name", NAMES)
def test_any_ranks_and_micro_batches_make_a_schedule_that_can_be_run(name: str) -> None:
    tried = 0
    for ranks, micros, virtual in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 7, 10, 16), (1, 2, 3)):
        if name in ("interleaved", "breadth_first"):
            micros = micros * ranks if name == "interleaved" else micros
        elif virtual != (2 if name == "zbv" else 1):
            continue
        made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
        assert problems_of(made) == []
        assert made.ranks == ranks
        assert made.chunks == ranks * virtual
        tried += 1
    assert tried >= 30


@pytest.mark.parametrize("name", NAMES)
def test_chunks_take_backwards_and_gradients_of_weights_in_ascending_order(name: str) -> None:
    made = make_schedule(name, ranks=4, micros=8)
    for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT_GRADS), (Kind.BACKWARD, Kind.WEIGHT_GRADS)):
        for chunk, rank in enumerate(made.rank_of):
            row = made.actions[rank]
            assert [a.micro for a in row if a.chunk == chunk and a.kind in kinds] == list(range(8))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble"])
def test_one_rank_takes_a_forward_and_a_backward_in_turn(name: str) -> None:
    (row,) = make_schedule(name, ranks=1, micros=3).actions
    assert " ".join(map(str, row)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"


def test_1f1b_of_fewer_micro_batches_than_ranks_begins_backwards_as_soon_as_they_can() -> None:
    made = make_schedule("1f1b", ranks=4, micros=2)
    assert [" ".join(map(str, row)) for row in made.actions] == [
        "F0.0 F1.0 B0.0 B1.0",
        "F0.1 F1.1 B0.1 B1.1",
        "F0.2 F1.2 B0.2 B1.2",
        "F0.3 B0.3 F1.3 B1.3",
    ]


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("depth_first", {}, "expected one of gpipe, 1f1b, interleaved, breadth_first, zero_bubble, zbv"),
        ("gpipe", {"virtual": 2}, "`pipeline.virtual_stages` is 2; the schedule gpipe has 1 chunk a rank"),
        ("1f1b", {"virtual": 2}, "the schedule 1f1b has 1 chunk a rank"),
        ("zero_bubble", {"virtual": 2}, "the schedule zero_bubble has 1 chunk a rank"),
        ("zbv", {"virtual": 3}, "the schedule zbv has 2 chunks a rank"),
        ("interleaved", {"micros": 6}, "is 6; the schedule `interleaved` takes a multiple of the 4 stages"),
        ("1f1b", {"micros": 0}, "`micro batches` of the schedule 1f1b is 0"),
        ("1f1b", {"ranks": 0}, "`pipeline.stages` of the schedule 1f1b is 0"),
    ],
)
def test_numbers_that_a_schedule_does_not_take_are_refused_by_name(
    name: str, numbers: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_schedule(name, **{"ranks": 4, "micros": 8, **numbers})
    assert words in str(refused.value)
    assert refused.value.hint
