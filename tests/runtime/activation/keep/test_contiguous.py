"""One buffer for all inputs that are kept at once."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.activation.keep.contiguous import Contiguous


def test_tensors_lie_side_by_side_and_come_back() -> None:
    keeper = Contiguous(3)
    tensors = [torch.randn(8, 16) for _ in range(3)]
    tickets = [keeper.put(tensor) for tensor in tensors]
    starts = [ticket.take().data_ptr() for ticket in tickets]
    assert [b - a for a, b in itertools.pairwise(starts)] == [512, 512]
    assert all(torch.equal(ticket.take(), tensor) for ticket, tensor in zip(tickets, tensors, strict=True))
    assert keeper.device_bytes == 3 * 512


def test_places_are_used_again() -> None:
    keeper = Contiguous(2)
    for _ in range(5):
        first, second = keeper.put(torch.ones(64)), keeper.put(torch.zeros(64))
        assert torch.equal(first.take(), torch.ones(64))
        del first, second
    assert keeper.device_bytes == 2 * 256


def test_a_full_buffer_says_how_many_it_was_made_for() -> None:
    keeper = Contiguous(2)
    kept = [keeper.put(torch.ones(64)) for _ in range(2)]
    with pytest.raises(ModelError, match="`number_checkpoints` is 2, which reserved 512 B") as refused:
        keeper.put(torch.ones(64))
    assert len(kept) == 2
    assert "activation_checkpointing.number_checkpoints" in str(refused.value.hint)
