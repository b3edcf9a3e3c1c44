"""Spans of a block never overlap, free neighbours are one, and a compaction leaves no hole that may be closed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.runtime.memory.spans import Move, Spans


def test_the_first_free_span_that_is_large_enough_is_taken() -> None:
    spans = Spans(100)
    assert [spans.take(n) for n in (10, 20, 30, 5)] == [0, 10, 30, 60]
    spans.give_back(10)
    spans.give_back(60)
    assert spans.holes == 20, "what is free behind the last one is no hole"
    assert spans.take(21) == 60
    assert spans.take(15) == 10
    assert spans.take(5) == 25
    assert (spans.holes, spans.take(20)) == (0, None)


def test_free_neighbours_on_either_side_become_one() -> None:
    for order in ((0, 10, 20), (20, 10, 0), (0, 20, 10)):
        spans = Spans(30)
        assert [spans.take(10) for _ in range(3)] == [0, 10, 20]
        for start in order:
            spans.give_back(start)
        assert spans.take(30) == 0


def test_what_may_not_move_stays_and_others_move_below_and_behind_it() -> None:
    spans = Spans(100)
    starts = [spans.take(10) for _ in range(6)]
    for start in (0, 20, 40):
        spans.give_back(start)
    assert starts == [0, 10, 20, 30, 40, 50]
    assert spans.compact(lambda start: start != 30) == [Move(10, 0, 10), Move(50, 40, 10)]
    assert spans.holes == 20, "below the one that stays"
    assert [spans.take(20), spans.take(50)] == [10, 50]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(-8, -1), st.just(0)), max_size=60), st.integers(0, 3))
def test_any_sequence_keeps_spans_apart_and_accounts_for_every_element(actions: list[int], pinned: int) -> None:
    """Positive: take so many; negative: give one back; 0: compact, where every so-many-th may not move."""
    spans = Spans(128)
    taken: dict[int, int] = {}
    for action in actions:
        if action > 0:
            start = spans.take(action)
            free = _gaps(taken, 128)
            first = next((gap_start for gap_start, numel in free if numel >= action), None)
            assert start == first
            if start is not None:
                taken[start] = action
        elif action < 0 and taken:
            start = sorted(taken)[action % len(taken)]
            del taken[start]
            spans.give_back(start)
        elif action == 0:
            stays = {start for place, start in enumerate(sorted(taken)) if pinned and place % pinned == 0}
            for move in spans.compact(lambda start, stays=stays: start not in stays):
                assert move.target < move.source not in stays
                assert taken.pop(move.source) == move.numel
                taken[move.target] = move.numel
            assert stays <= set(taken)
            assert pinned or not _holes(taken)
        assert spans.holes == _holes(taken)


def _gaps(taken: dict[int, int], size: int) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    end = 0
    for start, numel in sorted(taken.items()):
        assert start >= end, "spans overlap"
        if start > end:
            gaps.append((end, start - end))
        end = start + numel
    assert end <= size
    return [*gaps, (end, size - end)] if end < size else gaps


def _holes(taken: dict[int, int]) -> int:
    return max((start + numel for start, numel in taken.items()), default=0) - sum(taken.values())
