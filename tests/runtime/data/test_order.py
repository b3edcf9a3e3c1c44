"""One sequence of samples for every size of a round, from the first epoch to the last."""

from __future__ import annotations

import pytest

from dsrun.runtime.data.order import EpochEnd, GlobalOrder, Position, sample_seed


def make(samples: int, round_size: int, end: EpochEnd = "carry", *, seed: int = 1, shuffle: bool = True) -> GlobalOrder:
    return GlobalOrder(samples, round_size=round_size, end=end, seed=seed, shuffle=shuffle)


def walk(order: GlobalOrder, rounds: int, position: Position | None = None) -> list[tuple[int, int]]:
    """The picks of the next rounds."""
    found: list[tuple[int, int]] = []
    position = position or Position()
    for _ in range(rounds):
        found += order.picks(position, first=0, count=order.round_size)
        position = order.after_round(position)
    return found


@pytest.mark.parametrize("samples", [1, 3, 10, 50])
@pytest.mark.parametrize("shuffle", [True, False])
def test_carried_epochs_are_one_sequence_for_every_size_of_a_round(samples: int, shuffle: bool) -> None:
    whole = walk(make(samples, 1, shuffle=shuffle), 120)
    for round_size in (2, 3, 4, 6, 8, 120):
        assert walk(make(samples, round_size, shuffle=shuffle), 120 // round_size) == whole, round_size
    for epoch in range(120 // samples):
        assert sorted(whole[epoch * samples :][:samples]) == [(epoch, index) for index in range(samples)]


def test_epochs_and_seeds_have_orders_of_their_own_and_without_shuffling_none() -> None:
    first, second = walk(make(20, 20), 1), walk(make(20, 20), 1, Position(1))
    assert [index for _, index in first] != [index for _, index in second]
    assert first != walk(make(20, 20, seed=2), 1)
    assert walk(make(5, 5, shuffle=False), 2) == [(epoch, index) for epoch in (0, 1) for index in range(5)]


def test_a_filled_epoch_repeats_its_own_start_and_a_dropped_one_ends_early() -> None:
    filled = walk(make(10, 4, "fill"), 3)
    assert filled[10:] == filled[:2]
    assert make(10, 4, "fill").after_round(Position(0, 8)) == Position(1, 0)
    tiny = walk(make(3, 8, "fill"), 1)
    assert tiny[3:6] == tiny[:3]
    assert tiny[6:] == tiny[:2]
    dropped = make(10, 4, "drop")
    assert walk(dropped, 2) == filled[:8]
    assert dropped.after_round(Position(0, 4)) == Position(1, 0)


@pytest.mark.parametrize(
    ("end", "position", "settled", "left"),
    [
        ("carry", Position(0, 10), Position(1, 0), 3),
        ("carry", Position(0, 23), Position(2, 3), 2),
        ("carry", Position(4, 2), Position(4, 2), 2),
        ("fill", Position(0, 12), Position(1, 0), 3),
        ("fill", Position(0, 9), Position(0, 9), 1),
        ("drop", Position(0, 7), Position(1, 0), 2),
        ("drop", Position(0, 6), Position(0, 6), 1),
    ],
)
def test_a_position_at_the_end_of_an_epoch_is_the_next_ones(
    end: EpochEnd, position: Position, settled: Position, left: int
) -> None:
    order = make(10, 4, end)
    assert order.settled(position) == settled
    assert order.rounds_left(settled) == left


def test_every_sample_of_every_epoch_and_run_has_a_seed_of_its_own() -> None:
    seeds = {sample_seed(seed, (epoch, index)) for seed in (0, 1, 11) for epoch in range(12) for index in range(12)}
    assert len(seeds) == 3 * 12 * 12
    assert all(0 <= seed < 1 << 64 for seed in seeds)
