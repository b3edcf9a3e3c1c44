"""Random numbers go on after a resume: to the last bit on the same ranks, and in a stated way on others."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from dsrun.errors import CheckpointError
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.engine.saving.randomness import RandomState, adapted, capture, restore, sources
from dsrun.runtime.generators import host_kept, seed_host

CPU = torch.device("cpu")


def tracker(seed: int = 3) -> RngTracker:
    found = RngTracker()
    found.add("dropout", seed)
    return found


def draw(named: RngTracker) -> list[Any]:
    """Of every generator; normal numbers too, of which a second one of a pair waits for the next call."""
    with named.fork("dropout"):
        own = float(torch.rand(()))
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), float(torch.randn(())), own]


def state_of(seed: int, *, named: int = 3) -> RandomState:
    """The state of a rank that has seeded its generators and drawn."""
    with host_kept():
        seed_host(seed)
        generators = tracker(named)
        draw(generators)
        return capture(CPU, generators)


def drawn_from(state: RandomState) -> list[Any]:
    with host_kept():
        named = tracker()
        restore(state, CPU, named)
        return [draw(named) for _ in range(3)]


def test_numbers_go_on_by_way_of_bytes() -> None:
    with host_kept():
        seed_host(11)
        named = tracker()
        draw(named)
        saved = capture(CPU, named).to_bytes()
        expected = [draw(named) for _ in range(3)]
    assert drawn_from(RandomState.from_bytes(saved)) == expected
    assert len(saved) < 25_000
    assert json.loads(saved)["device"] is None


def test_a_capture_does_not_change_with_what_is_drawn_later() -> None:
    with host_kept():
        named = tracker()
        state = capture(CPU, named)
        before = state.to_bytes()
        draw(named)
        assert state.to_bytes() == before


def test_another_bit_generator_of_numpy_is_kept_whole() -> None:
    with host_kept():
        state = capture(CPU, tracker())
    other: Any = np.random.PCG64(5).state
    changed = RandomState.from_bytes(
        RandomState(type(state.host)(state.host.python, other, state.host.torch), None, "cpu", {}).to_bytes()
    )
    assert changed.host.numpy == other


@pytest.mark.parametrize(
    ("rank", "saved", "wanted"), [(0, 1, (0,)), (1, 2, (1,)), (1, 1, (0, 0, 0)), (2, 2, (0, 0, 1)), (5, 3, (2, 0, 1))]
)
def test_a_rank_reads_its_own_state_or_what_stands_for_it(rank: int, saved: int, wanted: tuple[int, ...]) -> None:
    assert sources(rank, saved) == wanted


def test_a_rank_that_there_was_goes_on_with_its_own() -> None:
    state = state_of(4)
    assert adapted([state], 3, CPU) is state


def test_new_ranks_draw_what_all_drew_alike_and_else_numbers_of_their_own() -> None:
    first, second = state_of(1, named=3), state_of(2, named=3)
    alike = adapted([first, first, first], 2, CPU)
    assert drawn_from(alike) == drawn_from(first)
    apart = [adapted([first, first, second], rank, CPU) for rank in (2, 4, 2)]
    drawn = [drawn_from(state) for state in (first, second, *apart)]
    assert drawn[2] == drawn[4], "the same every time"
    for generator in range(4):
        assert len({numbers[0][generator] for numbers in drawn[:4]}) == 4
    assert len({numbers[0][4] for numbers in drawn}) == 1, "the named ones were alike"
    other = adapted([first, first, state_of(1, named=5)], 2, CPU)
    assert [numbers[:4] for numbers in drawn_from(other)] == [numbers[:4] for numbers in drawn[0]]
    assert drawn_from(other)[0][4] != drawn[0][0][4]


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "python": 7}', b"\xff"])
def test_bytes_that_are_no_state_are_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="random-number state: it cannot be read"):
        RandomState.from_bytes(text)


def test_a_state_that_a_generator_does_not_take_is_refused() -> None:
    state = state_of(1)
    short = RandomState(type(state.host)(state.host.python, state.host.numpy, state.host.torch[:7]), None, "cpu", {})
    with host_kept(), pytest.raises(CheckpointError, match="a generator does not take it"):
        restore(short, CPU, tracker())


def test_generators_of_another_kind_of_device_stay() -> None:
    state = state_of(1)
    elsewhere = RandomState(state.host, torch.zeros(16, dtype=torch.uint8), "cuda", {"dropout": torch.zeros(3)})
    with host_kept():
        named = tracker()
        before = named.get_states()["dropout"]
        restore(elsewhere, CPU, named)
        assert torch.equal(named.get_states()["dropout"], before)
        assert random.getstate() == state.host.python
