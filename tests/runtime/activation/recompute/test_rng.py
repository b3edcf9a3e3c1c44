"""Generators that are replayed, and named ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsrun.contract.environment import BACKEND_ENV
from dsrun.errors import InputError, ModelError
from dsrun.runtime.activation.recompute.rng import MODEL_PARALLEL_NAME, RngTracker, capture, replayed
from dsrun.runtime.compat import HashStore


@pytest.fixture
def place(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of a rank that trains there."""
    monkeypatch.setenv(BACKEND_ENV, "gloo" if device.type == "cpu" else "nccl")
    return device


def draw(device: torch.device, count: int = 4) -> Tensor:
    return torch.rand(count, device=device)


def state_of(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def test_inside_numbers_come_again_and_outside_none_are_lost(place: torch.device) -> None:
    tracker = RngTracker()
    tracker.add("other", 5)
    state = capture([torch.zeros(1, device=place)], tracker)
    first = draw(place)
    with tracker.fork("other"):
        named = draw(place)
    expected_state = state_of(place)
    with replayed(state, tracker):
        assert torch.equal(draw(place), first)
        with tracker.fork("other"):
            assert torch.equal(draw(place), named)
    assert torch.equal(state_of(place), expected_state)
    with tracker.fork("other"):
        assert not torch.equal(draw(place), named), "the named one goes on where it was"


def test_a_fork_draws_from_its_own_generator_and_leaves_the_default_alone(place: torch.device) -> None:
    tracker = RngTracker()
    torch.manual_seed(1)
    expected = draw(place)
    torch.manual_seed(1)
    tracker.add("a", 7)
    with tracker.fork("a"):
        drawn = draw(place)
    assert torch.equal(draw(place), expected)
    torch.manual_seed(7)
    assert torch.equal(draw(place), drawn)


def test_tensor_ranks_share_the_default_and_not_the_named_generator(place: torch.device) -> None:
    drawn: list[tuple[list[float], list[float]]] = []
    for rank in range(2):
        tracker = RngTracker()
        tracker.seed_ranks(10, tensor_rank=rank)
        common = draw(place).tolist()
        with tracker.fork():
            drawn.append((common, draw(place).tolist()))
    assert drawn[0][0] == drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


@pytest.fixture
def untouchable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, in a process where using it raises."""

    def touched(*_: object) -> None:
        raise AssertionError("the GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)


@pytest.fixture
def gloo_alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def use_all_of_it() -> None:
    tracker = RngTracker()
    tracker.seed_ranks(10, tensor_rank=1)
    tracker.add("a", 7)
    state = capture([torch.zeros(1)], tracker)
    with replayed(state, tracker), tracker.fork("a"):
        torch.rand(2)


@pytest.mark.usefixtures("untouchable_gpu")
def test_ranks_that_are_to_train_on_the_cpu_touch_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_ENV, "gloo")
    use_all_of_it()
    monkeypatch.delenv(BACKEND_ENV)
    with pytest.raises(AssertionError, match="the GPU was touched"):
        use_all_of_it()


@pytest.mark.usefixtures("untouchable_gpu", "gloo_alone")
def test_ranks_that_have_joined_by_gloo_touch_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_ENV, raising=False)
    use_all_of_it()


def test_named_generators_stay_where_the_first_one_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_ENV, "gloo")
    tracker = RngTracker()
    tracker.add("a", 7)
    monkeypatch.setenv(BACKEND_ENV, "no such thing")
    with tracker.fork("a"):
        torch.rand(2)
    tracker.reset()
    with pytest.raises(InputError, match="no such thing"):
        tracker.add("a", 7)


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
