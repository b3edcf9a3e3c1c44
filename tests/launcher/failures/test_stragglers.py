from __future__ import annotations

from collections.abc import Callable

import pytest

from dsrun.launcher.failures.stragglers import Straggler, StragglerTracker, Wait, is_slow, medians_of_others
from dsrun.launcher.protocol import RankStatus

#: Where the rank that is slow waits longest, and where the others do.
WAITS = ("all_gather of unit 0", "reduce_scatter of unit 3")


def watch(
    own_s: Callable[[int, int], float], *, ranks: int = 4, seconds: int = 60, step_s: float = 0.5, counted: bool = True
) -> list[Straggler]:
    """A job of synchronous steps; `own_s` gives a rank's own part of a step in a second of the run."""
    tracker = StragglerTracker(ranks)
    waited = [0.0] * ranks
    found: list[Straggler] = []
    for second in range(seconds):
        waits = [step_s - own_s(rank, second) for rank in range(ranks)]
        for rank in range(ranks):
            waited[rank] += waits[rank] / step_s * counted
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
                longest_wait=WAITS[waits[rank] > min(waits)] if counted else "",
                longest_wait_s=waits[rank] * counted,
                step_s=step_s,
            )
            for rank in range(ranks)
        ]
        # Two hosts, one after the other.
        for half in (pulses[: ranks // 2], pulses[ranks // 2 :]):
            found += tracker.pulse(half, float(second))
    return found


def test_each_rank_is_compared_with_the_median_of_the_others() -> None:
    assert medians_of_others({0: 1.0, 1: 4.0}) == {0: 4.0, 1: 1.0}
    assert medians_of_others({2: 1.0, 5: 2.0, 7: 4.0, 9: 8.0}) == {2: 4.0, 5: 4.0, 7: 2.0, 9: 2.0}


@pytest.mark.parametrize(
    ("own_s", "others_s", "slow"), [(0.96, 0.8, True), (0.9, 0.8, False), (0.05, 0.02, False), (0.5, 0.0, False)]
)
def test_a_rank_is_slow_by_its_share_of_a_step_and_its_ratio(own_s: float, others_s: float, slow: bool) -> None:
    assert is_slow(own_s, others_s=others_s, step_s=1.0) == slow


def test_a_rank_that_is_steadily_slower_by_a_third_is_named_once_with_its_ratio_and_its_own_time() -> None:
    (straggler,) = watch(lambda rank, second: 0.4 if rank == 2 else 0.3)
    assert straggler.rank == 2
    assert straggler.ratio == pytest.approx(4 / 3, abs=0.05)
    assert straggler.own_s == pytest.approx(0.4, abs=0.02)
    assert straggler.others_s == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_a_rank_that_computes_a_fifth_longer_is_named_in_a_job_of_any_size(ranks: int) -> None:
    # The rest of a step moves data, on all ranks alike.
    (straggler,) = watch(lambda rank, second: 0.48 if rank == 1 else 0.4, ranks=ranks)
    assert straggler.rank == 1
    assert straggler.ratio == pytest.approx(1.2, abs=0.03)


def test_half_the_ranks_may_be_slow() -> None:
    assert sorted(each.rank for each in watch(lambda rank, second: 0.4 if rank % 2 else 0.3)) == [1, 3]


def test_a_straggler_comes_with_what_the_others_wait_in_and_with_what_it_waits_in() -> None:
    (straggler,) = watch(lambda rank, second: 0.4 if rank == 2 else 0.3)
    assert straggler.others_wait.collective == "reduce_scatter of unit 3"
    assert straggler.others_wait.seconds == pytest.approx(0.2)
    assert straggler.waits.collective == "all_gather of unit 0"
    assert straggler.waits.seconds == pytest.approx(0.1)


def test_one_rank_that_waited_long_for_once_does_not_speak_for_the_others() -> None:
    odd = (Wait("all_gather of unit 7", 0.3), Wait("reduce_scatter of unit 3", 5.0))
    tracker = StragglerTracker(6)
    found: list[Straggler] = []
    for second in range(60):
        for rank in range(6):
            wait = odd[rank - 4] if rank >= 4 else Wait("reduce_scatter of unit 3", 0.2)
            status = RankStatus(
                rank=rank,
                beats=second,
                step=2 * second,
                idle_s=0.1,
                waited_s=second * (0.2 if rank == 0 else 0.4),
                phase="",
                collective="",
                cpu_percent=100.0,
                rss_bytes=0,
                longest_wait=wait.collective,
                longest_wait_s=wait.seconds,
            )
            found += tracker.pulse([status], float(second))
    (straggler,) = found
    assert straggler.rank == 0
    assert straggler.others_wait == Wait("reduce_scatter of unit 3", 0.2)


def test_people_are_told_how_slow_a_rank_is_and_where_it_is_waited_for() -> None:
    waits = {"others_wait": Wait("reduce_scatter of unit 3", 0.103), "waits": Wait("all_gather of unit 0", 0.002)}
    assert Straggler(3, 0.62, 0.517, **waits).text("node7") == (
        "rank 3 on node7 is steadily slower than the others: 620 ms of its own a step, 1.20 x their median of 517 ms; "
        "they wait longest in reduce_scatter of unit 3, 103 ms a step; "
        "it waits longest in all_gather of unit 0, 2 ms a step"
    )
    assert (
        Straggler(3, 2.0, 1.0)
        .text("here", coordinate="data 1, tensor 1")
        .startswith("rank 3 (data 1, tensor 1) on here is steadily slower than the others: 2.0s of its own a step, ")
    )
    assert Straggler(0, 2.0, 1.0).text("here") == (
        "rank 0 on here is steadily slower than the others: 2.0s of its own a step, 2.00 x their median of 1.0s"
    )


@pytest.mark.parametrize("own_s", [0.3, 0.34])
def test_a_rank_within_a_seventh_of_the_others_is_not_named(own_s: float) -> None:
    assert watch(lambda rank, second: own_s if rank == 2 else 0.3) == []


def test_a_rank_that_is_slow_in_a_small_part_of_a_step_is_not_named() -> None:
    # Twice as long, and a fiftieth of a step.
    assert watch(lambda rank, second: 0.02 if rank == 2 else 0.01) == []


def test_a_rank_that_was_slow_for_a_while_only_is_not_named() -> None:
    assert watch(lambda rank, second: 0.45 if rank == 2 and 10 <= second < 28 else 0.3, seconds=100) == []


def test_nobody_is_named_in_a_run_too_short_to_tell() -> None:
    assert watch(lambda rank, second: 0.45 if rank == 2 else 0.3, seconds=30) == []


def test_nobody_is_named_where_ranks_count_no_waits() -> None:
    assert watch(lambda rank, second: 0.45 if rank == 2 else 0.3, counted=False) == []


def test_a_lone_rank_is_not_compared_with_itself() -> None:
    assert watch(lambda rank, second: 0.3, ranks=1) == []


def test_slow_steps_make_longer_windows() -> None:
    assert watch(lambda rank, second: 4.0 if rank == 0 else 3.0, step_s=5.0, seconds=200) == []
    assert len(watch(lambda rank, second: 4.0 if rank == 0 else 3.0, step_s=5.0, seconds=400)) == 1
