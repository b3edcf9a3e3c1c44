"""What ranks that share layers tell each other at an update: nothing where they did the same, else what differs."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.same_steps import StepWatch

CPU = torch.device("cpu")


class Takes(nn.Module):
    """Gives back what it is given, multiplied."""

    def forward(self, x: Any, more: Any = None) -> Any:
        del more
        return x * 1.0


def told(act: Callable[[StepWatch, nn.Module, int], Any], *, world: int = 2, size: int = 2) -> str:
    """Returns what all ranks are told after each has acted; nothing where they did the same.

    Args:
        act: function of a watch, its model and the rank.
        world: number of ranks.
        size: number of ranks that share layers.
    """

    def body(axis: LoopbackCollectives) -> str:
        first = axis.rank // size * size
        # Threads share generators, so random numbers are left to tests in processes.
        watch = StepWatch(range(first, first + size), axis.rank - first, CPU, draws=False)
        model = Takes()
        watch.follow(model)
        act(watch, model, axis.rank)
        sums = watch.shared_3()
        axis.all_reduce(sums).wait()
        try:
            watch.refuse_differences(sums.tolist(), axis, at=" at step 4")
        except ModelError as error:
            return str(error)
        return ""

    (text,) = set(LoopbackWorld(world).run(body))
    return text.removeprefix("model: ranks that share each layer did not do the same at step 4: ")


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_alike_is_nothing_in_any_number_of_replicas(size: int) -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        replica = rank // size
        for micro in range(3):
            model(values(10 * replica + micro, 3, 5), torch.arange(micro + replica))
            watch.add_loss(values(10 * replica + micro, 1))

    assert told(act, world=3 * size, size=size) == ""


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 1,
        lambda x: x.flip(0),
        lambda x: x[:, :-1],
        lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64),
        lambda x: x.view(-1),
        lambda x: torch.cat([x[:-1], x[-1:] + 1]),
    ],
    ids=["values", "order", "length", "dtype", "shape", "last"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_other_inputs_of_one_rank_are_told(other: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = values(1, 4, 3).gt(0) if dtype is torch.bool else values(1, 4, 3, dtype=dtype).mul(100).to(dtype)
    changed = other(x)

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(x)
        model(changed if rank == 1 else x)
        model(x)

    assert told(act) == "ranks 0, 1: other inputs on rank 1"


def test_the_order_of_micro_batches_counts() -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        for micro in (0, 1) if rank else (1, 0):
            model(values(micro, 4))

    assert told(act) == "ranks 0, 1: other inputs on rank 1"


def test_values_all_over_a_large_input_count() -> None:
    """Every second one of 131,072, so a difference of a stretch is seen wherever it is."""
    x = torch.zeros(1 << 17)

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        own = x.clone()
        own[-100:] = rank
        model(own)

    assert told(act) == "ranks 0, 1: other inputs on rank 1"


def test_inputs_are_looked_at_in_forwards_with_gradients_alone() -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        with torch.no_grad():
            model(torch.tensor(float(rank)))
        with torch.inference_mode():
            model(torch.tensor(float(rank)))

    assert told(act) == ""


def test_what_the_model_gave_may_be_given_back() -> None:
    """As keys of this rank's heads, of which ranks may have unlike numbers."""

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        with torch.no_grad():
            keys = model(torch.full((2 + rank,), float(rank)))
        model(torch.ones(3), keys)

    assert told(act) == ""
    assert "other inputs" in told(lambda watch, model, rank: model(torch.ones(3), torch.full((2 + rank,), 1.0)))


def test_replicas_do_not_cancel_each_other() -> None:
    """A, B in one and B, A in the other add up to nothing, but for what each replica mixes in."""

    def inputs(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(values(int(rank in (0, 3)), 4))

    assert told(inputs, world=4) == "ranks 0, 1: other inputs on rank 1; ranks 2, 3: other inputs on rank 3"


@pytest.mark.parametrize(
    ("mine", "others", "is_told"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.000001], False),
        ([5.0, -5.0], [5.0, -5.00001], False),  # of 10, not of 0
        ([5.0, -5.0], [5.0, -5.01], True),
        ([1e-9], [2e-9], False),
        ([1e-3], [1.1e-3], True),
        ([float("nan")], [float("nan")], False),
        ([float("inf")], [float("inf")], False),
    ],
)
def test_losses_are_compared_by_their_size(mine: list[float], others: list[float], is_told: bool) -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        for loss in others if rank == 1 else mine:
            watch.add_loss(torch.tensor([loss]))

    assert bool(told(act)) is is_told
    if is_told:
        assert told(act).startswith("ranks 0, 1: losses ")


def test_one_torn_replica_of_many_is_told() -> None:
    """What counts is a replica's loss, and not that of all."""

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        watch.add_loss(torch.tensor([2.0 + 5e-5 * (rank == 1)], dtype=torch.float64))

    assert told(act, world=16).startswith("ranks 0, 1: losses 2, 2.00005")


def test_an_update_begins_anew() -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(torch.full((2 + rank,), float(rank)))
        watch.add_loss(torch.tensor([float(rank)]))
        watch.forget()

    assert told(act) == ""


@pytest.mark.parametrize(
    ("mine", "others"),
    [(1.0, 2.0), (0.0, float("-inf")), (1.0, -1.0), (0.0, -0.0), (float(1 << 60), float(1 << 61))],
)
def test_round_numbers_of_8_bytes_are_told(mine: float, others: float) -> None:
    """They differ in their highest bits alone, as masks of attention do."""

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(torch.tensor([others if rank == 1 else mine], dtype=torch.float64))

    assert told(act) == "ranks 0, 1: other inputs on rank 1"
    whole = told(lambda watch, model, rank: model(torch.tensor([1 << (44 + rank)])))
    assert whole == "ranks 0, 1: other inputs on rank 1"


@dataclasses.dataclass
class Batch:
    """Inputs of a script's own class."""

    mask: Any


@pytest.mark.parametrize(
    "more", [lambda v: v, lambda v: {"scale": [v]}, lambda v: Batch(v), lambda v: Batch(torch.tensor(float(v)))]
)
@pytest.mark.parametrize(("mine", "others"), [(4.0, 1.0), (True, False), (2, 3), (0, 0.0)])
def test_numbers_and_what_dataclasses_hold_are_told(more: Callable[[Any], Any], mine: Any, others: Any) -> None:
    if isinstance(more(mine), Batch) and isinstance(more(mine).mask, Tensor) and mine == others:
        pytest.skip("one tensor")

    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(torch.ones(1), more(others if rank == 1 else mine))

    assert told(act) == "ranks 0, 1: other inputs on rank 1"


def test_texts_and_other_objects_are_a_rank_s_own() -> None:
    def act(watch: StepWatch, model: nn.Module, rank: int) -> None:
        model(torch.ones(1), {"name": f"rank {rank}", "cache": types.SimpleNamespace(keys=torch.ones(rank))})

    assert told(act) == ""
