"""Keeping tensors as they are, and once where several calls take them."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.activation.keep.keeper import AsItIs, KeptOnce

NBYTES = 6 * 4


def test_a_tensor_is_held_without_a_copy_until_its_ticket_is_gone() -> None:
    keeper = AsItIs()
    tensor = torch.arange(6.0).requires_grad_() * 2
    ticket = keeper.put(tensor)
    assert keeper.device_bytes == NBYTES
    for _ in range(2):
        assert ticket.take().data_ptr() == tensor.data_ptr()
        assert not ticket.take().requires_grad
    del ticket
    assert keeper.device_bytes == 0


def test_a_tensor_that_has_changed_is_refused_with_its_shape() -> None:
    tensor = torch.zeros(2, 3)
    ticket = AsItIs().put(tensor)
    tensor += 1
    with pytest.raises(ModelError, match=r"an input of shape \(2, 3\) was changed in place"):
        ticket.take()


def test_a_tensor_of_several_calls_is_kept_once() -> None:
    inner = AsItIs()
    keeper = KeptOnce(inner)
    tensor = torch.arange(6.0)
    tickets = [keeper.put(tensor) for _ in range(3)]
    assert tickets[0] is tickets[1] is tickets[2]
    assert keeper.device_bytes == inner.device_bytes == NBYTES
    tickets.clear()
    assert keeper.device_bytes == 0
    again = keeper.put(tensor)
    assert torch.equal(again.take(), torch.arange(6.0))


def test_a_tensor_that_changed_between_two_calls_is_kept_for_each() -> None:
    keeper = KeptOnce(AsItIs())
    tensor = torch.zeros(6)
    first = keeper.put(tensor)
    tensor += 1
    second = keeper.put(tensor)
    assert second is not first
    assert torch.equal(second.take(), torch.ones(6))


def test_tensors_that_are_gone_are_forgotten_and_never_taken_for_new_ones() -> None:
    keeper = KeptOnce(AsItIs())
    for value in range(50):  # an id, and often an address, is used again
        ticket = keeper.put(torch.full((6,), float(value)))
        assert torch.equal(ticket.take(), torch.full((6,), float(value)))
        del ticket
    assert keeper.device_bytes == 0
    assert not keeper._known
