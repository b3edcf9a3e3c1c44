"""Operators between whole sequences and slices of them, against the plain computation; calls and bytes as integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsrun.errors import ModelError
from dsrun.runtime.kept_results import KeptResults, keeping
from dsrun.runtime.mesh.collectives import Collectives, Traffic
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.sequence.operators import (
    gather_for_columns,
    join_sequence,
    scatter_sums,
    split_sequence,
    with_hidden,
)

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
F64 = torch.float64
#: Samples, and width of the hidden states; tokens of a rank.
B, D, OWN = 2, 5, 3


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def strided(x: Tensor) -> Tensor:
    """Returns the same values with other strides, and room between them."""
    return torch.stack([x.mT, torch.full_like(x.mT, torch.nan)], -1)[..., 0].mT


LAYOUTS = pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])


def run(
    size: int,
    operator: Callable[[Tensor, Collectives], Tensor],
    given: Callable[[int], Tensor],
    weight: Callable[[int], Tensor],
    layout: Callable[[Tensor], Tensor],
) -> list[tuple[Tensor, Tensor, Traffic, Traffic]]:
    """Returns of each rank the outputs, the gradient of what it was given, and the traffic forward and backward."""

    def body(axis: LoopbackCollectives) -> tuple[Tensor, Tensor, Traffic, Traffic]:
        own = given(axis.rank)
        x = layout(own.clone()).requires_grad_()
        y = operator(x, axis)
        forward = axis.traffic.since(Traffic())
        assert y.is_contiguous()
        y.backward(layout(weight(axis.rank)))
        assert torch.equal(x, own), "what it is given is left as it is"
        assert x.grad is not None
        return y.detach(), x.grad, forward, axis.traffic.since(forward)

    return LoopbackWorld(size).run(body)


def slice_of(whole: Tensor, rank: int) -> Tensor:
    return whole[:, rank * OWN : (rank + 1) * OWN]


def one_call(name: str, size: int) -> Traffic:
    return Traffic(Counter({name: 1}), Counter({name: B * size * OWN * D * F64.itemsize}))


@LAYOUTS
@SIZES
def test_each_rank_takes_its_slice_and_the_gradient_is_put_together(
    size: int, layout: Callable[[Tensor], Tensor]
) -> None:
    whole, weight = values(B, size * OWN, D, seed=0), values(B, size * OWN, D, seed=1)
    found = run(size, split_sequence, lambda _: whole, lambda rank: slice_of(weight, rank), layout)
    for rank, (y, grad, forward, backward) in enumerate(found):
        assert torch.equal(y, slice_of(whole, rank))
        assert torch.equal(grad, weight)
        assert (forward, backward) == (Traffic(), one_call("all_gather", size))


@LAYOUTS
@SIZES
def test_slices_are_put_together_and_the_gradient_of_all_alike_is_sliced(
    size: int, layout: Callable[[Tensor], Tensor]
) -> None:
    whole, weight = values(B, size * OWN, D, seed=0), values(B, size * OWN, D, seed=1)
    found = run(size, join_sequence, lambda rank: slice_of(whole, rank), lambda _: weight, layout)
    for rank, (y, grad, forward, backward) in enumerate(found):
        assert torch.equal(y, whole)
        assert torch.equal(grad, slice_of(weight, rank))
        assert grad.untyped_storage().nbytes() == grad.nbytes, "the whole gradient is let go"
        assert (forward, backward) == (one_call("all_gather", size), Traffic())


@LAYOUTS
@SIZES
def test_in_front_of_columns_each_rank_s_gradient_is_a_part_of_a_sum(
    size: int, layout: Callable[[Tensor], Tensor]
) -> None:
    whole, weights = values(B, size * OWN, D, seed=0), values(size, B, size * OWN, D, seed=1)
    found = run(size, gather_for_columns, lambda rank: slice_of(whole, rank), lambda rank: weights[rank], layout)
    for rank, (y, grad, forward, backward) in enumerate(found):
        assert torch.equal(y, whole)
        torch.testing.assert_close(grad, slice_of(weights.sum(0), rank), rtol=1e-14, atol=1e-14)
        assert grad.untyped_storage().nbytes() == grad.nbytes, "the other ranks' parts are let go"
        assert (forward, backward) == (one_call("all_gather", size), one_call("reduce_scatter", size))


@LAYOUTS
@SIZES
def test_behind_a_row_each_rank_has_its_slice_of_the_sum(size: int, layout: Callable[[Tensor], Tensor]) -> None:
    parts, weight = values(size, B, size * OWN, D, seed=0), values(B, size * OWN, D, seed=1)
    found = run(size, scatter_sums, lambda rank: parts[rank], lambda rank: slice_of(weight, rank), layout)
    for rank, (y, grad, forward, backward) in enumerate(found):
        torch.testing.assert_close(y, slice_of(parts.sum(0), rank), rtol=1e-14, atol=1e-14)
        assert y.untyped_storage().nbytes() == y.nbytes, "the other ranks' parts are let go"
        assert torch.equal(grad, weight)
        assert (forward, backward) == (one_call("reduce_scatter", size), one_call("all_gather", size))


def test_empty_samples_pass_with_the_same_collectives() -> None:
    def body(axis: LoopbackCollectives) -> Counter[str]:
        x = torch.zeros(0, 6, D, dtype=F64, requires_grad=True)
        y = join_sequence(scatter_sums(gather_for_columns(split_sequence(x, axis), axis), axis), axis)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        return axis.traffic.calls

    assert LoopbackWorld(3).run(body) == [Counter(all_gather=4, reduce_scatter=2)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    def body(axis: LoopbackCollectives) -> set[torch.dtype]:
        x = torch.ones(B, 6, D, dtype=dtype, requires_grad=True)
        own = split_sequence(x, axis)
        y = join_sequence(scatter_sums(gather_for_columns(own, axis), axis), axis)
        y.sum().backward()
        assert x.grad is not None
        return {own.dtype, y.dtype, x.grad.dtype}

    assert LoopbackWorld(2).run(body) == [{dtype}] * 2


@pytest.mark.parametrize("shape", [(B, 7, D), (6,)])
def test_a_sequence_that_does_not_divide_is_refused_with_the_key_and_a_way_out(shape: tuple[int, ...]) -> None:
    def body(axis: LoopbackCollectives) -> None:
        with pytest.raises(ModelError, match=r"^tensor_parallel\.sequence_parallel: hidden states have shape") as found:
            split_sequence(torch.zeros(shape), axis)
        assert str(shape) in str(found.value)
        assert "pad sequences to a multiple of 2" in str(found.value.hint)

    LoopbackWorld(2).run(body)


@pytest.mark.parametrize(("operator", "calls"), [(join_sequence, 2), (gather_for_columns, 2), (scatter_sums, 1)])
def test_a_further_run_of_a_recomputed_call_sums_nothing_and_gathers_again(
    operator: Callable[[Tensor, Collectives], Tensor], calls: int
) -> None:
    """What is kept is this rank's slices: the whole sequence would be as much as slices save."""

    def body(axis: LoopbackCollectives) -> int:
        x, results = values(B, 4, D, seed=axis.rank), KeptResults()
        with keeping(results):
            first = operator(x, axis)
            results.run_again()
            assert torch.equal(operator(x, axis), first)
        assert results.nbytes == (first.nbytes if calls == 1 else 0)
        return axis.traffic.calls.total()

    assert LoopbackWorld(2).run(body) == [calls, calls]


def test_hidden_states_are_changed_where_they_are_given() -> None:
    mask, hidden = torch.ones(2, dtype=torch.int64), torch.ones(2)
    args, kwargs = with_hidden((mask, hidden), {"cache": None}, lambda x: x + 1)
    assert (args[0] is mask, args[1].tolist(), kwargs) == (True, [2, 2], {"cache": None})
    args, kwargs = with_hidden((mask,), {"bias": hidden, "hidden_states": hidden}, lambda x: x + 1)
    assert (args, kwargs["bias"] is hidden, kwargs["hidden_states"].tolist()) == ((mask,), True, [2, 2])


def test_a_block_without_hidden_states_is_refused_with_the_key() -> None:
    with pytest.raises(ModelError, match=r"^tensor_parallel\.sequence_parallel: a block is given no hidden states"):
        with_hidden((torch.ones(2, dtype=torch.int64),), {"cache": None}, lambda x: x)
