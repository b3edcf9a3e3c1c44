"""One rank's part of a schedule: order, what is kept, what crosses a boundary, and what an error says. No model."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.pipeline_schedules.actions import Kind, Schedule
from dsrun.pipeline_schedules.communication import with_communication
from dsrun.pipeline_schedules.generate import make_schedule
from dsrun.pipeline_schedules.simulate import equal_costs, simulate
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.mesh.point_to_point.alone import AlonePointToPoint
from dsrun.runtime.mesh.point_to_point.loopback import LoopbackPointToPoint
from dsrun.runtime.parallel.pipeline.boundary import pack, pack_grads, unpack, unpack_grads
from dsrun.runtime.parallel.pipeline.executor import Executor
from support.core_speed import core_seconds

SCHEDULES = [
    ("gpipe", 2, 1, 4),
    ("1f1b", 4, 1, 8),
    ("interleaved", 2, 2, 4),
    ("interleaved", 4, 2, 8),
    ("breadth_first", 2, 2, 4),
    ("zero_bubble", 4, 1, 8),
    ("zbv", 2, 2, 4),
]


class Counted:
    """Chunks that multiply by 2, and count what is done and how many micro batches are live."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.live: set[tuple[int, int]] = set()
        self.most_live = 0
        self.done: Counter[str] = Counter()
        self.given: list[tuple[int, int, float]] = []

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        x = torch.full((3,), float(micro + 1), requires_grad=True) if chunk == 0 else received["x"]
        assert chunk == 0 or received["micro"] == micro
        self.live.add((chunk, micro))
        self.most_live = max(self.most_live, len(self.live))
        y = x * 2
        return y.sum() if chunk == self.last else {"x": y, "micro": micro, "mask": torch.tensor([True, False])}

    def backward(
        self, chunk: int, micro: int, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], *, split: bool
    ) -> None:
        self.done["split" if split else "whole"] += 1
        self.given.append((chunk, micro, 1.0 if grads[0] is None else float(grads[0][0])))
        torch.autograd.backward(outputs, grads)
        if not split:
            self.live.remove((chunk, micro))

    def weight_grads(self, chunk: int, micro: int) -> None:
        self.done["weights"] += 1
        self.live.remove((chunk, micro))

    def gather(self, chunk: int) -> None:
        self.done["gather"] += 1

    def drop(self, chunk: int) -> None:
        self.done["drop"] += 1

    def reduce(self, chunk: int) -> None:
        self.done["reduce"] += 1

    def abandon(self) -> None:
        self.done["abandon"] += 1


def run(schedule: Schedule, works: list[Counted], *, dtype: torch.dtype | None = None, times: int = 1) -> None:
    def rank(collectives: LoopbackCollectives) -> None:
        links = LoopbackPointToPoint(collectives, range(collectives.size))
        executor = Executor(links, boundary_dtype=dtype)
        for _ in range(times):
            executor.run(schedule, works[collectives.rank])

    LoopbackWorld(schedule.ranks, timeout_s=10).run(rank)


@pytest.mark.parametrize(("name", "ranks", "virtual", "micros"), SCHEDULES)
def test_every_micro_batch_passes_all_chunks_and_its_gradient_comes_back(
    name: str, ranks: int, virtual: int, micros: int
) -> None:
    made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    works = [Counted(made.chunks - 1) for _ in range(ranks)]
    run(with_communication(made), works, times=2)
    for rank, work in enumerate(works):
        own = made.chunks_of(rank)
        assert not work.live
        assert Counter((chunk, micro) for chunk, micro, _ in work.given) == Counter(
            {(chunk, micro): 2 for chunk in own for micro in range(micros)}
        )
        assert work.done["split"] == work.done["weights"]
        for chunk, micro, grad in work.given:
            assert grad == 2.0 ** (made.chunks - 1 - chunk), (chunk, micro)
        for chunk in own:
            order = [micro for one, micro, _ in work.given if one == chunk]
            assert order == [*range(micros)] * 2, "in ascending order, under every schedule"


@pytest.mark.parametrize(("name", "ranks", "virtual", "micros"), SCHEDULES)
def test_live_micro_batches_are_those_of_the_schedule(name: str, ranks: int, virtual: int, micros: int) -> None:
    made = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    works = [Counted(made.chunks - 1) for _ in range(ranks)]
    run(with_communication(made), works)
    assert [work.most_live for work in works] == list(simulate(made, equal_costs(made.chunks)).live)


def test_activations_and_gradients_may_travel_in_another_dtype() -> None:
    made = make_schedule("1f1b", ranks=2, micros=2)
    works = [Counted(1), Counted(1)]
    run(with_communication(made), works, dtype=torch.bfloat16)
    assert [grad for _, _, grad in works[0].given] == [2.0, 2.0]


def test_an_error_says_in_which_action_it_came_and_the_work_is_given_up() -> None:
    class Broken(Counted):
        def forward(self, chunk: int, micro: int, received: Any) -> Any:
            if micro == 1:
                raise ValueError("no number")
            return super().forward(chunk, micro, received)

    work = Broken(0)
    with pytest.raises(ValueError, match="no number") as raised:
        Executor(AlonePointToPoint()).run(make_schedule("1f1b", ranks=1, micros=2), work)
    assert work.done["abandon"] == 1
    notes = getattr(raised.value, "__notes__", ["in the forward of chunk 0, micro batch 1 on stage 0 of 1"])
    assert notes == ["in the forward of chunk 0, micro batch 1 on stage 0 of 1"]


def test_values_of_a_boundary_come_as_they_were() -> None:
    x, ids = torch.randn(2, 3, requires_grad=True), torch.arange(4)
    value = {"x": x * 1, "more": (ids, [None, 2.5, "name", True], torch.zeros(0)), 3: x.detach()}
    header, tensors, carriers = pack(value, dtype=None, where="here")
    assert len(carriers) == 1
    found = unpack(header, [tensor.clone() for tensor in tensors])
    assert found.value["more"][1] == [None, 2.5, "name", True]
    assert isinstance(found.value["more"], tuple)
    assert torch.equal(found.value["more"][0], ids)
    assert torch.equal(found.value[3], x)
    assert not found.value[3].requires_grad
    assert [leaf.is_leaf and leaf.requires_grad for leaf in found.carriers] == [True]
    (found.value["x"].relu_() * 2).sum().backward()
    assert torch.equal(found.carriers[0].grad, (x > 0) * 2.0), "its first operation may change it in place"


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_gradients_of_a_boundary_come_as_they_were_and_none_stays_none(dtype: torch.dtype | None) -> None:
    header, tensors = pack_grads([torch.ones(2), None, torch.zeros(3)], dtype=dtype, where="here")
    assert all(tensor.dtype == (dtype or torch.float32) for tensor in tensors)
    first, second, third = unpack_grads(header, tensors)
    assert second is None
    assert first is not None
    assert first.dtype == torch.float32
    assert third is not None
    assert third.shape == (3,)


@pytest.mark.parametrize("value", [{"x": object()}, [{1, 2}]])
def test_what_is_no_tensor_and_no_plain_value_is_refused_by_its_class(value: Any) -> None:
    with pytest.raises(ModelError, match=r"chunk 1 .* hands a (object|set) on"):
        pack(value, dtype=None, where="chunk 1 of the pipeline")


def test_a_dtype_that_a_boundary_cannot_convert_is_refused() -> None:
    with pytest.raises(ModelError, match=re.escape("torch.float64")):
        pack(torch.zeros(2, dtype=torch.float64), dtype=torch.bfloat16, where="here")


@pytest.mark.depends_on_speed("a median of microseconds an action")
def test_an_action_takes_no_30_microseconds() -> None:
    loss = torch.zeros(())

    class Nothing(Counted):
        def forward(self, chunk: int, micro: int, received: Any) -> Any:
            return loss

        def backward(self, *args: Any, **kwargs: Any) -> None:
            return

    made = make_schedule("1f1b", ranks=1, micros=500)
    executor, work = Executor(AlonePointToPoint()), Nothing(0)
    assert core_seconds(lambda: executor.run(made, work), tries=5) / len(made.actions[0]) <= 30e-6


def test_a_schedule_without_communication_is_no_schedule_of_several_ranks() -> None:
    made = make_schedule("1f1b", ranks=2, micros=1)
    kinds = set(itertools.chain.from_iterable((action.kind for action in row) for row in made.actions))
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}
    with pytest.raises(KeyError):
        run(made, [Counted(1), Counted(1)])
