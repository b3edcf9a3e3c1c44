"""Generators that are replayed, and named ones."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.activation.rng import MODEL_PARALLEL_NAME, RngTracker, capture, replayed


def test_inside_numbers_come_again_and_outside_none_are_lost() -> None:
    tracker = RngTracker()
    tracker.add("other", 5)
    state = capture([torch.zeros(1)], tracker)
    first = torch.rand(4)
    with tracker.fork("other"):
        named = torch.rand(4)
    expected_state = torch.get_rng_state()
    with replayed(state, tracker):
        assert torch.equal(torch.rand(4), first)
        with tracker.fork("other"):
            assert torch.equal(torch.rand(4), named)
    assert torch.equal(torch.get_rng_state(), expected_state)
    with tracker.fork("other"):
        assert not torch.equal(torch.rand(4), named), "the named one goes on where it was"


def test_a_fork_draws_from_its_own_generator_and_leaves_the_default_alone() -> None:
    tracker = RngTracker()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    tracker.add("a", 7)
    with tracker.fork("a"):
        drawn = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), drawn)


def test_tensor_ranks_share_the_default_and_not_the_named_generator() -> None:
    drawn: list[tuple[list[float], list[float]]] = []
    for rank in range(2):
        tracker = RngTracker()
        tracker.seed_ranks(10, tensor_rank=rank)
        common = torch.rand(3).tolist()
        with tracker.fork():
            drawn.append((common, torch.rand(3).tolist()))
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def test_names_and_seeds_are_told_apart() -> None:
    tracker = RngTracker()
    tracker.add("a", 1)
    with pytest.raises(ModelError, match="the name 'a' is in use"):
        tracker.add("a", 2)
    with pytest.raises(ModelError, match="the seed 1 is in use"):
        tracker.add("b", 1)
    with pytest.raises(ModelError, match=f"no generator '{MODEL_PARALLEL_NAME}'; known: 'a'"), tracker.fork():
        pass
    tracker.reset()
    tracker.add("a", 1)
