from __future__ import annotations

from collections.abc import Callable

import pytest

from dsrun.launcher.failures.stragglers import Straggler, StragglerTracker
from dsrun.launcher.protocol import RankStatus


def watch(
    own_s: Callable[[int, int], float], *, ranks: int = 4, seconds: int = 60, step_s: float = 0.5
) -> list[Straggler]:
    """A job of synchronous steps; `own_s` gives a rank's own part of a step in a second of the run."""
    tracker = StragglerTracker(ranks)
    waited = [0.0] * ranks
    found: list[Straggler] = []
    for second in range(seconds):
        for rank in range(ranks):
            waited[rank] += (step_s - own_s(rank, second)) / step_s
        pulses = [
            RankStatus(
                rank=rank,
                beats=second,
                step=int(second / step_s),
                idle_s=0.1,
                waited_s=waited[rank],
                phase="",
                collective="",
                cpu_percent=100.0,
                rss_bytes=0,
            )
            for rank in range(ranks)
        ]
        # Two hosts, one after the other.
        for half in (pulses[: ranks // 2], pulses[ranks // 2 :]):
            found += tracker.pulse(half, float(second))
    return found


def test_a_rank_that_is_steadily_slower_by_a_fifth_is_named_once_with_its_ratio() -> None:
    (straggler,) = watch(lambda rank, second: 0.4 if rank == 2 else 0.3)
    assert straggler.rank == 2
    assert straggler.ratio == pytest.approx(4 / 3, abs=0.05)


@pytest.mark.parametrize("own_s", [0.3, 0.345])
def test_a_rank_within_a_fifth_of_the_median_is_not_named(own_s: float) -> None:
    assert watch(lambda rank, second: own_s if rank == 2 else 0.3) == []


def test_a_rank_that_was_slow_for_a_while_only_is_not_named() -> None:
    assert watch(lambda rank, second: 0.45 if rank == 2 and 10 <= second < 28 else 0.3, seconds=100) == []


def test_nobody_is_named_in_a_run_too_short_to_tell() -> None:
    assert watch(lambda rank, second: 0.45 if rank == 2 else 0.3, seconds=30) == []


def test_a_lone_rank_is_not_compared_with_itself() -> None:
    assert watch(lambda rank, second: 0.3, ranks=1) == []


def test_slow_steps_make_longer_windows() -> None:
    assert watch(lambda rank, second: 4.0 if rank == 0 else 3.0, step_s=5.0, seconds=200) == []
    assert len(watch(lambda rank, second: 4.0 if rank == 0 else 3.0, step_s=5.0, seconds=400)) == 1
