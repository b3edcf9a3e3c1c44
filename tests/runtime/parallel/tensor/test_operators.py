"""Each operator, forward and backward, against the plain computation; calls and bytes as integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsrun.runtime.kept_results import KeptResults, keeping
from dsrun.runtime.mesh.collectives import Traffic
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.parallel.tensor.operators import (
    gather_last,
    part_of,
    share_input,
    split_last,
    sum_outputs,
)
from dsrun.runtime.parallel.tensor.styles import EVEN, Deal

SIZES = [1, 2, 3]
#: Deals of a last dim of 12; of 10, which is uneven over three; of 2, which three ranks cannot share.
DEALS = [
    pytest.param(EVEN, 12, id="even"),
    pytest.param(EVEN, 10, id="uneven"),
    pytest.param(EVEN, 2, id="fewer than ranks"),
    pytest.param(Deal(2), 12, id="packed"),
    pytest.param(Deal(2), 10, id="packed, uneven"),
    pytest.param(Deal((6, 3, 3), groups=3), 12, id="queries, keys and values"),
]
ITEM = 8  # bytes of fp64


def copied(axis: LoopbackCollectives) -> Traffic:
    return Traffic(Counter(axis.traffic.calls), Counter(axis.traffic.bytes))


def run_parts(
    axis: LoopbackCollectives, operator: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Traffic, Traffic]:
    """Returns outputs, the gradient of x where outputs have the gradient `weight`, and the traffic of both ways."""
    before = copied(axis)
    kept = x.detach().clone()
    y = operator(x.requires_grad_())
    there = copied(axis)
    y.backward(weight)
    assert torch.equal(x, kept), "inputs are left as they are"
    assert x.grad is not None
    return y.detach(), x.grad, there.since(before), axis.traffic.since(there)


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def strided(x: Tensor) -> Tensor:
    """Returns the same values with other strides, and room between them."""
    return torch.stack([x.mT, torch.full_like(x.mT, torch.nan)], -1)[..., 0].mT


def lengths_of(deal: Deal, numel: int, size: int) -> list[int]:
    return [sum(stop - start for start, stop in deal.runs(numel, rank=rank, size=size)) for rank in range(size)]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
@pytest.mark.parametrize("size", SIZES)
def test_a_shared_input_is_itself_and_its_gradients_are_summed(size: int, layout: Callable[[Tensor], Tensor]) -> None:
    x, weights = values(2, 3, 4, seed=0), values(size, 2, 3, 4, seed=1)
    found = LoopbackWorld(size).run(
        lambda axis: run_parts(axis, lambda x: share_input(x, axis), layout(x.clone()), layout(weights[axis.rank]))
    )
    for y, grad, forward, backward in found:
        assert torch.equal(y, x)
        assert_close(grad, weights.sum(0))
        assert forward == Traffic()
        assert backward == Traffic(Counter(all_reduce=1), Counter(all_reduce=24 * ITEM))


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
@pytest.mark.parametrize("size", SIZES)
def test_outputs_are_summed_and_gradients_go_back_as_they_are(size: int, layout: Callable[[Tensor], Tensor]) -> None:
    parts, weight = values(size, 2, 3, 4, seed=0), values(2, 3, 4, seed=1)
    found = LoopbackWorld(size).run(
        lambda axis: run_parts(axis, lambda x: sum_outputs(x, axis), layout(parts[axis.rank].clone()), layout(weight))
    )
    for y, grad, forward, backward in found:
        assert_close(y, parts.sum(0))
        assert y.is_contiguous()
        assert torch.equal(grad, weight)
        assert forward == Traffic(Counter(all_reduce=1), Counter(all_reduce=24 * ITEM))
        assert backward == Traffic()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
def test_a_sum_in_place_has_the_bits_and_the_gradients_of_another(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor]
) -> None:
    parts, weight = values(2, 3, 4, 5, seed=0).to(dtype), values(3, 4, 5, seed=1).to(dtype)

    def body(axis: LoopbackCollectives) -> None:
        found: list[Tensor] = []
        for in_place in (False, True):
            x = parts[axis.rank].clone().requires_grad_()
            before = copied(axis)
            product = layout(x * 3)
            y = sum_outputs(product, axis, in_place=in_place)
            assert axis.traffic.since(before).calls == Counter(all_reduce=1)
            assert (y is product) == (in_place and layout is not strided), "other strides would be sent in pieces"
            assert y.is_contiguous()
            (y * weight).sum().backward()
            assert x.grad is not None
            found += [y.detach(), x.grad]
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])

    LoopbackWorld(2).run(body)


def test_what_autograd_has_kept_of_a_sum_in_place_is_refused() -> None:
    def body(axis: LoopbackCollectives) -> None:
        y = sum_outputs(torch.ones(2, 4, requires_grad=True).exp(), axis, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    LoopbackWorld(2).run(body)


@pytest.mark.parametrize("changed", [False, True])
def test_a_further_run_of_a_recomputed_call_gets_the_sum_that_was_made_in_place(changed: bool) -> None:
    def body(axis: LoopbackCollectives) -> Counter[str]:
        part = torch.full((2, 4), axis.rank + 1.0)
        results = KeptResults()
        with keeping(results):
            first = sum_outputs(part * 2, axis, in_place=True)
            if changed:  # then it is made again, on all ranks
                first.mul_(5)
            results.run_again()
            product = part * 2
            assert sum_outputs(product, axis, in_place=True) is product
        assert torch.equal(product, torch.full((2, 4), 6.0))
        return axis.traffic.calls

    assert LoopbackWorld(2).run(body) == [Counter(all_reduce=2 if changed else 1)] * 2


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
@pytest.mark.parametrize(("deal", "numel"), DEALS)
@pytest.mark.parametrize("size", SIZES)
def test_parts_are_put_together_and_gradients_taken_apart(
    size: int, deal: Deal, numel: int, layout: Callable[[Tensor], Tensor]
) -> None:
    whole, weight = values(2, 3, numel, seed=0), values(2, 3, numel, seed=1)

    def body(axis: LoopbackCollectives) -> tuple[Tensor, Tensor, Traffic, Traffic]:
        part = layout(part_of(whole, axis, deal=deal))
        found = run_parts(axis, lambda x: gather_last(x, axis, whole=numel, deal=deal), part, layout(weight))
        assert_close(found[1], part_of(weight, axis, deal=deal))
        return found

    longest = max(lengths_of(deal, numel, size))
    for y, _, forward, backward in LoopbackWorld(size).run(body):
        assert torch.equal(y, whole)
        assert y.is_contiguous()
        assert forward == Traffic(Counter(all_gather=1), Counter(all_gather=size * 6 * longest * ITEM))
        assert backward == Traffic()


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, strided])
@pytest.mark.parametrize(("deal", "numel"), DEALS)
@pytest.mark.parametrize("size", SIZES)
def test_a_part_is_taken_and_gradients_are_put_together(
    size: int, deal: Deal, numel: int, layout: Callable[[Tensor], Tensor]
) -> None:
    whole, weight = values(2, 3, numel, seed=0), values(2, 3, numel, seed=1)

    def body(axis: LoopbackCollectives) -> tuple[Tensor, Tensor, Traffic, Traffic]:
        runs = deal.runs(numel, rank=axis.rank, size=size)
        index = torch.tensor([i for start, stop in runs for i in range(start, stop)], dtype=torch.int64)
        mine = layout(weight.index_select(-1, index))
        found = run_parts(axis, lambda x: split_last(x, axis, deal=deal), layout(whole.clone()), mine)
        assert torch.equal(found[0], whole.index_select(-1, index))
        assert found[0].is_contiguous()
        return found

    longest = max(lengths_of(deal, numel, size))
    for _, grad, forward, backward in LoopbackWorld(size).run(body):
        assert_close(grad, weight)
        assert forward == Traffic()
        assert backward == Traffic(Counter(all_gather=1), Counter(all_gather=size * 6 * longest * ITEM))


def test_a_part_has_memory_of_its_own() -> None:
    whole = values(2, 6, seed=0)
    kept = whole.clone()

    def body(axis: LoopbackCollectives) -> None:
        split_last(whole, axis).zero_()
        sum_outputs(whole, axis).zero_()
        gather_last(whole, axis, whole=6 * axis.size).zero_()

    for size in SIZES:
        LoopbackWorld(size).run(body)
    assert torch.equal(whole, kept)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
@pytest.mark.parametrize("deal", [EVEN, Deal(2)])
def test_empty_sequences_pass_with_the_same_collectives(shape: tuple[int, int], deal: Deal) -> None:
    """A rank that has nothing to say still enters, for the others wait."""

    def body(axis: LoopbackCollectives) -> Counter[str]:
        x = torch.zeros(*shape, 10, dtype=torch.float64, requires_grad=True)
        part = split_last(share_input(x, axis), axis, deal=deal)
        y = sum_outputs(gather_last(part, axis, whole=10, deal=deal), axis)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        return axis.traffic.calls

    assert LoopbackWorld(3).run(body) == [Counter(all_reduce=2, all_gather=2)] * 3


def test_a_gradient_that_is_one_number_everywhere_is_summed() -> None:
    """The gradient of a sum has strides of 0: what is summed in place must not be it."""

    def body(axis: LoopbackCollectives) -> Tensor:
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        part = split_last(x, axis)
        (share_input(x, axis).sum() + part.sum() + sum_outputs(part, axis).sum()).backward()
        assert x.grad is not None
        return x.grad

    for grad in LoopbackWorld(2).run(body):
        assert torch.equal(grad, torch.full((2, 4), 4.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    def body(axis: LoopbackCollectives) -> set[torch.dtype]:
        x = torch.ones(2, 6, dtype=dtype, requires_grad=True)
        part = split_last(share_input(x, axis), axis)
        y = sum_outputs(gather_last(part, axis, whole=6), axis)
        y.sum().backward()
        assert x.grad is not None
        return {part.dtype, y.dtype, x.grad.dtype}

    assert LoopbackWorld(2).run(body) == [{dtype}] * 2


def test_nothing_is_entered_for_a_gradient_that_nobody_asks_for() -> None:
    def body(axis: LoopbackCollectives) -> Counter[str]:
        x = torch.ones(2, 4)
        weight = torch.ones(4, requires_grad=True)
        (share_input(x, axis) * weight + gather_last(split_last(x, axis), axis, whole=4) * weight).sum().backward()
        return axis.traffic.calls

    assert LoopbackWorld(2).run(body) == [Counter(all_gather=1)] * 2


def test_operators_have_no_second_derivative_and_say_so() -> None:
    def body(axis: LoopbackCollectives) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad((share_input(x, axis) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    LoopbackWorld(2).run(body)
