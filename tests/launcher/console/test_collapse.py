"""Lines of several ranks become one only where they are the same, near in time, and in each rank's own order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsrun.launcher.console.collapse import HeldLine, LineCollapser


def shown(lines: list[HeldLine]) -> list[tuple[list[int], str]]:
    return [(line.ranks, line.text) for line in lines]


def test_the_same_line_of_all_ranks_is_one_and_leaves_at_once() -> None:
    collapser = LineCollapser(3)
    for rank in range(3):
        assert collapser.take_due(0.01 * rank) == []
        collapser.add(rank, "stdout", ["loading"], now_s=0.01 * rank)
    assert shown(collapser.take_due(0.02)) == [([0, 1, 2], "loading")]
    assert collapser.due_s is None


def test_a_line_that_others_do_not_print_leaves_after_the_window() -> None:
    collapser = LineCollapser(3, window_s=0.1)
    collapser.add(1, "stdout", ["mine"], now_s=5.0)
    assert collapser.due_s == 5.1
    assert collapser.take_due(5.05) == []
    assert shown(collapser.take_due(5.1)) == [([1], "mine")]


def test_a_line_that_comes_after_the_window_stands_alone() -> None:
    collapser = LineCollapser(2)
    collapser.add(0, "stdout", ["a"], now_s=0)
    assert shown(collapser.take_due(1)) == [([0], "a")]
    collapser.add(1, "stdout", ["a"], now_s=1)
    assert shown(collapser.take_due(2)) == [([1], "a")]


def test_streams_are_not_mixed() -> None:
    collapser = LineCollapser(2)
    collapser.add(0, "stdout", ["a"], now_s=0)
    collapser.add(1, "stderr", ["a"], now_s=0)
    assert [(line.ranks, line.stream) for line in collapser.take()] == [([0], "stdout"), ([1], "stderr")]


def test_repeated_lines_pair_up_one_by_one() -> None:
    collapser = LineCollapser(2)
    collapser.add(0, "stdout", ["", "a", ""], now_s=0)
    collapser.add(1, "stdout", ["", "a", ""], now_s=0)
    assert shown(collapser.take_due(0)) == [([0, 1], ""), ([0, 1], "a"), ([0, 1], "")]


def test_a_line_that_stands_elsewhere_in_another_ranks_order_is_not_joined() -> None:
    collapser = LineCollapser(2)
    collapser.add(0, "stdout", ["a", "b"], now_s=0)
    collapser.add(1, "stdout", ["b", "a"], now_s=0)
    assert shown(collapser.take()) == [([0], "a"), ([0, 1], "b"), ([1], "a")]


def test_a_flood_is_not_held() -> None:
    collapser = LineCollapser(2, window_s=0.1, most_lines=10)
    assert not collapser.passes(10, now_s=0)
    assert collapser.passes(1, now_s=0.05)
    assert not collapser.passes(1, now_s=0.1)
    assert collapser.passes(1000, now_s=0.15)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from("abc"), max_size=4), st.sampled_from([0.0, 0.06, 0.2])),
        max_size=12,
    )
)
def test_every_rank_keeps_its_lines_and_their_order(writes: list[tuple[int, list[str], float]]) -> None:
    collapser, now_s = LineCollapser(3), 0.0
    left: list[HeldLine] = []
    for rank, texts, wait_s in writes:
        now_s += wait_s
        collapser.add(rank, "stdout", texts, now_s=now_s)
        left += collapser.take_due(now_s)
        assert all(line.due_s > now_s for line in collapser._held[:1])
    left += collapser.take()
    assert collapser._numbers_of == {}
    for rank in range(3):
        written = [text for writer, texts, _ in writes if writer == rank for text in texts]
        assert [line.text for line in left if rank in line.ranks] == written
    assert all(len(set(line.ranks)) == len(line.ranks) for line in left)
