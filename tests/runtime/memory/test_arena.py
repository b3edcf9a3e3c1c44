"""Views keep what was written into them, whatever comes, goes and moves beside them; figures say what is held."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsrun.runtime.memory.arena import VIEW_ALIGN, Arena, joined, room_for


def zeros(dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda numel: torch.zeros(numel, dtype=dtype)


class Owner:
    """Holds a view that may move, and what it was filled with."""

    def __init__(self, arena: Arena, numel: int, value: float, *, stays: bool) -> None:
        self.stays = stays
        self.value = value
        self.view = arena.take(numel, moved=None if stays else self._move)
        self.view.fill_(value)
        self.address = self.view.data_ptr()

    def _move(self, view: Tensor) -> None:
        assert view.shape == self.view.shape
        self.view = view

    def check(self) -> None:
        assert bool((self.view == self.value).all())
        assert not self.stays or self.view.data_ptr() == self.address


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 2000), st.booleans()),
        st.tuples(st.just("give back"), st.integers(0, 30), st.booleans()),
        st.just(("compact", 0, False)),
    ),
    max_size=50,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_ACTIONS)
def test_any_sequence_keeps_data_apart_and_the_high_water_mark_right(actions: list[tuple[str, int, bool]]) -> None:
    arena = Arena("test", zeros(), grows=True)
    owners: list[Owner] = []
    most = 0
    for number, (action, value, stays) in enumerate(actions, start=1):
        if action == "take":
            owners.append(Owner(arena, value, float(number), stays=stays))
        elif action == "give back" and owners:
            arena.give_back(owners.pop(value % len(owners)).view)
        elif action == "compact":
            arena.compact()
        for owner in owners:
            owner.check()
        places = sorted((o.view.data_ptr(), o.view.numel() * 4) for o in owners if o.view.numel())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
        in_use = room_for([owner.view.numel() for owner in owners]) * 4
        most = max(most, in_use)
        use = arena.use()
        assert (use.used_bytes, use.high_water_bytes) == (in_use, most)
        assert use.reserved_bytes >= use.used_bytes + use.hole_bytes


def test_a_large_view_moves_onto_itself() -> None:
    arena = Arena("test", zeros(), numel=VIEW_ALIGN + (3 << 20) + VIEW_ALIGN)
    first = arena.take(VIEW_ALIGN)
    moved: list[Tensor] = []
    values = torch.arange((3 << 20) + 17, dtype=torch.float32)
    arena.take(values.numel(), moved=moved.append).copy_(values)
    arena.give_back(first)
    assert arena.use().hole_bytes == VIEW_ALIGN * 4
    arena.compact()
    assert torch.equal(moved[0], values)
    assert arena.use().hole_bytes == 0


def test_memory_is_allocated_once_and_handed_out_in_order() -> None:
    made: list[int] = []

    def make(numel: int) -> Tensor:
        made.append(numel)
        return torch.zeros(numel, dtype=torch.bfloat16)

    sizes = [300, 0, 256, 1]
    arena = Arena("test", make, numel=room_for(sizes))
    views = [arena.take(size) for size in sizes]
    assert [n for n in made if n] == [512 + 256 + 256]
    assert [view.numel() for view in views] == sizes
    offsets = [view.data_ptr() - views[0].data_ptr() for view in (views[0], views[2], views[3])]
    assert offsets == [0, 1024, 1536], "at multiples of 512 bytes"
    assert all(arena.holds(view) for view in views if view.numel())
    assert not arena.holds(torch.zeros(3))
    assert arena.use().dtype == "bfloat16"


def test_a_reserved_arena_is_as_large_as_its_maker_said() -> None:
    arena = Arena("masters", zeros(), numel=512)
    arena.take(300)
    with pytest.raises(AssertionError, match="arena masters: 256 elements are wanted, 512 of 512 are handed out"):
        arena.take(1)


def test_what_was_not_taken_cannot_be_given_back() -> None:
    arena = Arena("test", zeros(), grows=True)
    view = arena.take(10)
    arena.give_back(view)
    with pytest.raises(AssertionError, match="was given back"):
        arena.give_back(view)
    with pytest.raises(AssertionError, match="lies elsewhere"):
        arena.give_back(torch.zeros(10))


def test_after_the_first_time_the_same_lifetimes_allocate_nothing() -> None:
    made: list[int] = []

    def make(numel: int) -> Tensor:
        made.append(numel)
        return torch.zeros(numel)

    arena = Arena("test", make, grows=True)
    counts: list[int] = []
    for _ in range(4):
        a, b = arena.take(1000), arena.take(300)
        arena.give_back(a)
        c = arena.take(700)
        arena.give_back(b)
        arena.give_back(c)
        arena.compact()
        counts.append(sum(n > 0 for n in made))
    assert counts[1:] == counts[:1] * 3
    assert arena.use().reserved_bytes == arena.use().high_water_bytes == (1024 + 512) * 4


def test_views_that_follow_each_other_are_joined_and_others_are_not() -> None:
    arena = Arena("sums", torch.zeros, numel=3 * VIEW_ALIGN, leaves=True)
    first, second, third = (arena.take(VIEW_ALIGN) for _ in range(3))
    whole = joined([first, first.new_zeros(0), second, third])
    assert whole is not None
    assert whole.numel() == 3 * VIEW_ALIGN
    whole.fill_(2.0)
    assert second.eq(2.0).all()
    assert joined([first, third]) is None
    assert joined([second, first]) is None
    assert joined([]) is None


def test_neighbours_in_memory_that_have_storages_of_their_own_are_not_joined() -> None:
    arena = Arena("parameters", torch.zeros, numel=2 * VIEW_ALIGN)
    first, second = arena.take(VIEW_ALIGN), arena.take(VIEW_ALIGN)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert joined([first, second]) is None
