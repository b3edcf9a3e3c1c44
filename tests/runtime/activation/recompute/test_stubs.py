"""What stands for saved tensors: counted, filled in order, and nothing else taken for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsrun.errors import ModelError
from dsrun.runtime.activation.recompute.stubs import AllThere, Stub, Stubs, give, is_parameter


class Call:
    """Makes again what it was given."""

    name = "call"

    def __init__(self, *values: torch.Tensor) -> None:
        self.stubs = Stubs(self.name, measures=True)
        self.held = [self.stubs.drop(value, self) for value in values]
        self.values = values

    def make_again(self) -> None:
        self.stubs.expect(stops=False)
        for value in self.values:
            self.stubs.fill(value)
        self.stubs.check_all_came()


def test_tensors_that_take_the_memory_of_dropped_ones_are_counted_as_well() -> None:
    stubs = Stubs("call", measures=True)
    call = Call()
    addresses: set[int] = set()
    for _ in range(20):
        tensor = torch.empty(1000)
        addresses.add(tensor.data_ptr())
        stubs.drop(tensor, call)
        del tensor
    assert len(addresses) < 20, "this allocator gives no address twice, so this test says nothing"
    assert stubs.take_dropped_bytes() == 20 * 4000
    assert stubs.take_dropped_bytes() == 0


def test_a_storage_counts_once_and_parameters_not() -> None:
    x, weight = torch.zeros(8, 4), nn.Parameter(torch.zeros(4, 4))
    call = Call(x, x[2:], x.t(), weight, weight.t())
    assert call.stubs.take_dropped_bytes() == 8 * 4 * 4
    assert is_parameter(weight.t())
    assert not is_parameter(x.t())


def test_the_nth_tensor_of_a_second_run_is_the_nth_stubs() -> None:
    call = Call(torch.zeros(2), torch.ones(3))
    assert torch.equal(give(call.held[1]), torch.ones(3))
    assert torch.equal(give(call.held[0]), torch.zeros(2))


def test_a_run_ends_with_the_last_wanted_tensor_and_stubs_that_are_gone_are_passed_over() -> None:
    call = Call(torch.zeros(2), torch.ones(3))
    del call.held[0]
    call.stubs.expect(stops=True)
    call.stubs.fill(torch.zeros(2))
    with pytest.raises(AllThere):
        call.stubs.fill(torch.ones(3))
    assert call.held[0].value is not None


def test_too_many_too_few_and_other_tensors_are_refused() -> None:
    stubs = Call(torch.zeros(2)).stubs
    stubs.expect(stops=False)
    with pytest.raises(ModelError, match="`call` saved 0 tensors of 1: it went another way"):
        stubs.check_all_came()
    with pytest.raises(ModelError, match=r"\(3,\) float32 on cpu as tensor 0, which was \(2,\) float32 on cpu"):
        stubs.fill(torch.zeros(3))
    with pytest.raises(ModelError, match="saved more than 1 tensors"):
        stubs.fill(torch.zeros(2))


def test_a_stub_that_nothing_fills_is_told() -> None:
    call = Call()
    with pytest.raises(ModelError, match="second run of `call` did not come to a tensor"):
        give(Stub(call))
