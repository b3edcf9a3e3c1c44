"""Random numbers go on after a resume: to the last bit on the same ranks, and in a stated way on others."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from dsrun.errors import CheckpointError
from dsrun.runtime.activation.recompute.rng import MODEL_PARALLEL_NAME, RngTracker
from dsrun.runtime.engine.saving.randomness import RandomState, ResumedRank, adapted, capture, restore
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
    ("rank", "tensor", "saved", "saved_tensor", "wanted"),
    [
        (0, 1, 1, 1, (0,)),
        (1, 1, 2, 1, (1,)),
        (1, 1, 1, 1, (0, 0, 0, 0, 0)),
        (2, 1, 2, 1, (0, 0, 0, 1, 0)),
        (5, 1, 3, 1, (2, 2, 0, 1, 0)),
        (3, 2, 4, 2, (3,)),
        (5, 2, 4, 2, (0, 1, 0, 2, 1)),
        (1, 2, 2, 1, (0, 0, 0, 1, 0)),
        (3, 4, 4, 2, (0, 1, 0, 2, 1)),
        (1, 1, 4, 2, (2, 2, 0, 2, 1)),
        (7, 2, 6, 3, (3, 4, 0, 3, 1)),
    ],
)
def test_a_rank_reads_its_own_state_or_what_stands_for_it(
    rank: int, tensor: int, saved: int, saved_tensor: int, wanted: tuple[int, ...]
) -> None:
    assert ResumedRank(rank, tensor, saved, saved_tensor).sources() == wanted


def test_a_rank_that_there_was_goes_on_with_its_own() -> None:
    state = state_of(4)
    assert adapted([state], ResumedRank(3, 1, 4, 1), CPU) is state


def test_new_ranks_draw_what_all_drew_alike_and_else_numbers_of_their_own() -> None:
    first, second = state_of(1, named=3), state_of(2, named=3)
    alike = adapted([first] * 5, ResumedRank(2, 1, 2, 1), CPU)
    assert drawn_from(alike) == drawn_from(first)
    apart = [adapted([first, first, first, second, first], ResumedRank(rank, 1, 2, 1), CPU) for rank in (2, 4, 2)]
    drawn = [drawn_from(state) for state in (first, second, *apart)]
    assert drawn[2] == drawn[4], "the same every time"
    for generator in range(4):
        assert len({numbers[0][generator] for numbers in drawn[:4]}) == 4
    assert len({numbers[0][4] for numbers in drawn}) == 1, "the named ones were alike"
    other = adapted([first, first, first, state_of(1, named=5), first], ResumedRank(2, 1, 2, 1), CPU)
    assert [numbers[:4] for numbers in drawn_from(other)] == [numbers[:4] for numbers in drawn[0]]
    assert drawn_from(other)[0][4] != drawn[0][0][4]


def test_new_ranks_that_share_layers_draw_alike_and_other_numbers_than_other_replicas() -> None:
    """Four ranks of two replicas become eight of four; a generator that is seeded by rank becomes the replica's."""
    saved = [state_of(rank // 2, named=rank % 2) for rank in range(4)]
    ranks = [ResumedRank(rank, 2, 4, 2) for rank in range(8)]
    drawn = [drawn_from(adapted([saved[n] for n in rank.sources()], rank, CPU)) for rank in ranks]
    assert drawn[:4] == [drawn_from(state) for state in saved]
    for generator in range(4):
        numbers = [one[0][generator] for one in drawn]
        assert numbers[::2] == numbers[1::2]
        assert len(set(numbers)) == 4
    named = [one[0][4] for one in drawn]
    assert named == named[:2] * 4


@pytest.mark.parametrize(
    ("name", "alike", "saved_tensor"),
    [("dropout", True, 1), (MODEL_PARALLEL_NAME, False, 1), ("dropout", True, 2), ("dropout", False, 2)],
)
def test_named_generators_of_new_places_in_a_replica_are_alike_where_they_were(
    name: str, alike: bool, saved_tensor: int
) -> None:
    """Of one rank with whole layers only the name tells whether ranks that share them differ in it."""

    def state(place: int) -> RandomState:
        generators = RngTracker()
        generators.add(name, 3 if alike else 3 + place)
        return capture(CPU, generators)

    with host_kept():
        saved = [state(rank % saved_tensor) for rank in range(2 * saved_tensor)]
        ranks = [ResumedRank(rank, 4, 2 * saved_tensor, saved_tensor) for rank in range(8)]
        found = [adapted([saved[n] for n in rank.sources()], rank, CPU).named[name] for rank in ranks]
    assert len({str(one.tolist()) for one in found[:4]}) == (1 if alike else 4)
    assert all(torch.equal(one, other) for one, other in zip(found[:4], found[4:], strict=True))


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
