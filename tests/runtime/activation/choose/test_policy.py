"""Which blocks are recomputed together."""

from __future__ import annotations

import pytest

from dsrun.config.sections.activation import Policy
from dsrun.runtime.activation.choose.policy import Segment, Treatment, by_ratio, by_sqrt, into_segments, plan

POLICIES: list[tuple[Policy, dict[str, object]]] = [
    ("none", {}),
    ("every_block", {}),
    ("every_block", {"kept": 3}),
    ("interval", {"interval": 4}),
    ("ratio", {"ratio": 0.3}),
    ("sqrt", {}),
    ("hierarchical", {}),
    ("selective", {}),
    ("memory_budget", {}),
    ("compiler", {}),
]


@pytest.mark.parametrize("count", [1, 2, 5, 12, 97])
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_every_block_is_in_one_segment(policy: Policy, options: dict[str, int | float], count: int) -> None:
    segments = plan(policy, count, **options)  # type: ignore[arg-type]
    assert [block for s in segments for block in range(s.start, s.stop)] == list(range(count))


@pytest.mark.parametrize(("count", "lengths"), [(1, [1]), (4, [2, 2]), (12, [3, 3, 3, 3]), (10, [3, 2, 3, 2])])
def test_sqrt_makes_about_as_many_segments_as_each_has_blocks(count: int, lengths: list[int]) -> None:
    assert [s.stop - s.start for s in by_sqrt(count)] == lengths


def test_a_segment_length_differs_by_one_at_most() -> None:
    for count in range(1, 40):
        for number in range(1, 45):
            lengths = [s.stop - s.start for s in into_segments(count, number)]
            assert len(lengths) == min(count, number)
            assert max(lengths) - min(lengths) <= 1


def test_a_ratio_recomputes_blocks_at_the_front() -> None:
    kinds = [s.treatment for s in by_ratio(5, 0.5)]
    assert kinds == [Treatment.RECOMPUTE] * 3 + [Treatment.KEEP] * 2
    assert {s.treatment for s in by_ratio(5, 0.0)} == {Treatment.KEEP}
    assert {s.treatment for s in by_ratio(5, 1.0)} == {Treatment.RECOMPUTE}


def test_an_interval_leaves_a_short_segment_last() -> None:
    assert plan("interval", 5, interval=2) == [Segment(0, 2), Segment(2, 4), Segment(4, 5)]


def test_hierarchical_has_the_segments_of_sqrt_in_two_passes() -> None:
    pairs = zip(plan("sqrt", 9), plan("hierarchical", 9), strict=True)
    assert all((a.start, a.stop, a.at_once, b.at_once) == (b.start, b.stop, True, False) for a, b in pairs)
