"""Segments by policy, as the runtime cuts them."""

from __future__ import annotations

import pytest

from dsrun.config.sections.activation import Policy
from dsrun.estimate.run.recomputation import recomputed
from dsrun.runtime.activation.choose.policy import Treatment, plan

POLICIES: list[tuple[Policy, int | None, float | None, int | None]] = [
    ("none", None, None, None),
    ("every_block", None, None, None),
    ("every_block", None, None, 5),
    ("interval", 4, None, None),
    ("ratio", None, 0.3, None),
    ("ratio", None, 1.0, None),
    ("sqrt", None, None, None),
    ("hierarchical", None, None, None),
    ("selective", None, None, None),
    ("memory_budget", None, None, None),
    ("compiler", None, None, None),
]


@pytest.mark.parametrize(("policy", "interval", "ratio", "kept"), POLICIES)
def test_a_plan_counts_the_segments_that_a_run_makes(
    policy: Policy, interval: int | None, ratio: float | None, kept: int | None
) -> None:
    for layers in range(1, 60):
        counted = recomputed(policy, layers, interval=interval, ratio=ratio, kept=kept)
        made = plan(policy, layers, interval=interval, ratio=ratio, kept=kept)
        made = [s for s in made if s.treatment is not Treatment.KEEP]
        lengths = [s.stop - s.start for s in made]
        assert (counted.blocks, counted.segments, counted.longest) == (sum(lengths), len(made), max(lengths, default=0))
        assert counted.at_once == all(s.at_once for s in made)
        assert counted.products == any(s.treatment is Treatment.SELECT for s in made)


def test_two_passes_make_all_but_the_last_block_of_a_segment_once_more() -> None:
    assert recomputed("sqrt", 12).forwards == 12
    assert recomputed("hierarchical", 12).forwards == 12 + 8
    assert recomputed("hierarchical", 1).forwards == 1
