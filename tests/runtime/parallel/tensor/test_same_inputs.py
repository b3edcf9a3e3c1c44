"""Ranks that share each layer are given the same inputs, or told which differ; once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.same_inputs import check_inputs_once

CPU = torch.device("cpu")


class Takes(nn.Module):
    def forward(self, ids: Any, *rest: Any, labels: Any = None, **more: Any) -> int:
        del ids, rest, labels, more
        return 1


def run(call: Callable[[nn.Module, int], Any], *, size: int = 3, first: int = 0) -> list[tuple[str | None, int]]:
    """Calls a watched module on every rank; returns what was raised, and the collectives that were entered."""

    def rank(axis: LoopbackCollectives) -> tuple[str | None, int]:
        module = Takes()
        check_inputs_once(module, axis, ranks=range(first, first + size), device=CPU)
        raised: str | None = None
        try:
            call(module, axis.rank)
        except ModelError as error:
            raised, hint = str(error), error.hint
        else:
            hint = None
        assert (raised is None) or "num_replicas=engine.dp_world_size" in (hint or "")
        return raised, axis.traffic.calls.total()

    return LoopbackWorld(size).run(rank)


def test_same_inputs_cost_one_small_collective_once() -> None:
    def call(module: nn.Module, rank: int) -> None:
        ids = torch.arange(6).view(2, 3)
        batch = {"x": torch.ones(2, dtype=torch.bfloat16), "y": [torch.tensor(3.0), (torch.tensor(True), None, "word")]}
        module(ids, torch.zeros(0), 3, labels=ids.T, batch=batch, name=f"rank {rank}")
        module(torch.tensor(rank))  # looked at no more

    for raised, calls in run(call):
        assert raised is None
        assert calls == 1


INPUTS: list[tuple[str, Callable[[nn.Module, Tensor], Any]]] = [
    ("ids", lambda module, x: module(x)),
    ("ids", lambda module, x: module(ids=x)),
    ("labels", lambda module, x: module(torch.ones(2), labels=x)),
    ("rest[1]", lambda module, x: module(None, torch.ones(2), x)),
    ("more['batch']['x']", lambda module, x: module(None, batch={"x": x})),
    ("ids[1][0]", lambda module, x: module([1, (x,)])),
]


@pytest.mark.parametrize(("name", "call"), INPUTS)
@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, 3.0]), torch.tensor([1, 2]), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0])],
    ids=["values", "dtype", "shape", "length"],
)
def test_every_rank_is_told_what_differs_and_where(
    name: str, call: Callable[[nn.Module, Tensor], Any], other: Tensor
) -> None:
    found = run(lambda module, rank: call(module, other if rank == 1 else torch.tensor([1.0, 2.0])), first=4)
    for raised, _ in found:
        assert raised == (
            f"model: ranks 4, 5, 6 share each layer, and were not given the same inputs as rank 4: `{name}` on rank 5"
        )


def test_numbers_are_told_too() -> None:
    for raised, _ in run(lambda module, rank: module(torch.ones(1), scale=4.0 if rank == 2 else 1.0)):
        assert raised is not None
        assert raised.endswith("as rank 0: `more['scale']` on rank 2")


def test_what_one_rank_has_alone_is_told() -> None:
    def call(module: nn.Module, rank: int) -> None:
        module(torch.tensor(0), labels=torch.tensor(rank) if rank else None, mask=torch.tensor(rank // 2))

    for raised, _ in run(call):
        assert raised is not None
        assert raised.endswith("as rank 0: `labels` on rank 1, 2; `more['mask']` on rank 2")


def test_inputs_that_lie_in_other_ways_are_the_same() -> None:
    """Values count, and not strides or what is behind a view."""

    def call(module: nn.Module, rank: int) -> None:
        whole = torch.arange(12.0).view(3, 4)
        module(whole.T if rank else whole.T.contiguous(), whole[:, 1] if rank else whole[:, 1].clone())

    assert [raised for raised, _ in run(call)] == [None] * 3


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_is_looked_at_without_gradients_too(context: Callable[[], Any]) -> None:
    def call(module: nn.Module, rank: int) -> None:
        with context():
            module(torch.tensor(float(rank)))

    assert all(raised is not None for raised, _ in run(call))


def test_wrong_arguments_are_the_forwards_business() -> None:
    def call(module: nn.Module, rank: int) -> None:
        with pytest.raises(TypeError, match="ids"):
            module()

    assert run(call) == [(None, 1)] * 3


def test_a_copy_of_the_model_is_not_looked_at_and_a_handle_takes_the_look_away() -> None:
    def rank(axis: LoopbackCollectives) -> int:
        module = Takes()
        handle = check_inputs_once(module, axis, ranks=range(2), device=CPU)
        copy.deepcopy(module)(torch.tensor(axis.rank))
        handle.remove()
        module(torch.tensor(axis.rank))
        return axis.traffic.calls.total()

    assert LoopbackWorld(2).run(rank) == [0, 0]
