from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.wait_records import WaitRecord, WaitSpread, to_fields
from dsrun.launcher.records.waits import WaitedFor, rank_lags, read_waits, waited_for


def spread(label: str, least_ms: float, median_ms: float, most_ms: float, *, least: int = 3) -> WaitSpread:
    return WaitSpread(
        label=label,
        waits=1.0,
        least_s=least_ms / 1000,
        median_s=median_ms / 1000,
        most_s=most_ms / 1000,
        least_rank=least,
        most_rank=0,
    )


RECORD = WaitRecord(
    step=40,
    steps=20,
    step_s=0.1,
    ranks=4,
    total=spread("all", 4, 18, 19),
    labels=(
        spread("all_gather of unit 0", 3, 14, 20, least=1),
        spread("reduce_scatter of unit 3", 1, 12, 13),
        spread("other", 0, 11.5, 15),
    ),
)


def write(folder: Path, *lines: Any) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "records.jsonl").write_text("\n".join(texts) + "\n")


def event(record: WaitRecord) -> dict[str, Any]:
    return {"event": "waits", "time": 1.0, **to_fields(record)}


def test_the_newest_record_of_the_last_attempt_is_read(tmp_path: Path) -> None:
    assert read_waits(tmp_path) is None
    newer = replace(RECORD, step=60)
    write(
        tmp_path, {"event": "start"}, event(RECORD), {"event": "step", "step": 59}, event(newer), '{"event": "waits", '
    )
    assert read_waits(tmp_path) == newer
    write(tmp_path, {"event": "start"}, event(RECORD), {"event": "start"})
    assert read_waits(tmp_path) is None


def test_a_record_of_another_form_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, event(RECORD), {"event": "waits", "step": 60}, {**event(RECORD), "labels": [{"new": 1}]})
    assert read_waits(tmp_path) == RECORD


def test_a_record_of_an_older_version_or_with_more_in_it_is_read(tmp_path: Path) -> None:
    older = {name: value for name, value in event(RECORD).items() if name not in ("kinds", "waited_s")}
    write(tmp_path, {**older, "new": 1})
    assert read_waits(tmp_path) == RECORD
    newer = replace(RECORD, kinds=(spread("all_gather", 1, 2, 3),), waited_s={0: 0.1, 1: 0.2})
    write(tmp_path, event(newer))
    assert read_waits(tmp_path) == newer


def test_the_rank_that_waits_least_in_all_is_waited_for_where_the_others_wait_longest_for_it() -> None:
    found = waited_for(RECORD)
    assert found is not None
    assert (found.ranks, found.kind, found.collective) == ((3,), "", "reduce_scatter of unit 3")
    assert round(found.lost_s, 6) == 0.014
    assert round(found.collective_s, 6) == 0.011


def waits_of(own_ms: Sequence[float], *, known: int | None = None) -> WaitRecord:
    """A step of 100 ms in which ranks take so long themselves, and all wait for the slowest in one reduction."""
    waited_s = [0.1 - each / 1000 for each in own_ms]
    least = min(range(len(waited_s)), key=waited_s.__getitem__)
    times = (1000 * statistic(waited_s) for statistic in (min, statistics.median, max))
    total = replace(spread("all", *times), least_rank=least)
    shortest = sorted(range(len(waited_s)), key=waited_s.__getitem__)[:known]
    reductions = (replace(total, label="reduce_scatter of unit 3"),)
    return replace(
        RECORD,
        ranks=len(waited_s),
        total=total,
        labels=reductions,
        kinds=(replace(total, label="reduce_scatter"),),
        waited_s={rank: waited_s[rank] for rank in shortest},
    )


@pytest.mark.parametrize(
    ("own_ms", "ranks"),
    [
        ((70, 98), (1,)),
        ((70, 70, 98), (2,)),
        ((70, 71, 98, 97), (2, 3)),
        ((70, 71, 70, 72, 98, 97, 98, 96), (4, 5, 6, 7)),
        ((70, 98, 71, 70, 97), (1, 4)),
        ((70, 98, 98), (1, 2)),
        ((90, 98, 98), None),
        ((70, 70, 70, 98, 98, 97, 98, 96), None),
        ((86, 86, 86, 98), None),
        ((90, 90, 90, 90), None),
    ],
)
def test_ranks_are_waited_for_that_are_slower_than_most_of_the_others(
    own_ms: Sequence[float], ranks: tuple[int, ...] | None
) -> None:
    found = waited_for(waits_of(own_ms))
    assert (None if found is None else found.ranks) == ranks
    if found is not None:
        assert found.lost_s == found.kind_s == found.collective_s == pytest.approx(0.0275, abs=0.002)
        assert (found.kind, found.collective) == ("reduce_scatter", "reduce_scatter of unit 3")


def test_of_many_ranks_the_slow_ones_are_among_those_that_wait_least() -> None:
    slow = (64, 65, 66, 67)
    found = waited_for(waits_of([98 if rank in slow else 70 for rank in range(100)], known=64))
    assert found is not None
    assert found.ranks == slow
    assert found.lost_s == pytest.approx(0.028)


def test_a_row_in_which_the_others_wait_for_another_rank_is_not_told_of_this_one() -> None:
    record = waits_of((70, 70, 98, 70))
    gather = spread("all_gather of unit 0", 0, 40, 50, least=1)
    found = waited_for(replace(record, labels=(gather, *record.labels)))
    assert found is not None
    assert found.collective == "reduce_scatter of unit 3"
    found = waited_for(replace(record, labels=(gather,), kinds=(gather,)))
    assert found is not None
    assert (found.ranks, found.kind, found.kind_s, found.collective, found.collective_s) == ((2,), "", 0, "", 0)


def test_where_waits_are_spread_over_many_collectives_their_kind_has_the_sum() -> None:
    labels = tuple(spread(f"reduce_scatter of unit {unit}", 1, 3 + unit / 100, 4) for unit in range(10))
    barrier = spread("barrier", 0, 5, 5)
    record = replace(RECORD, labels=(barrier, *labels), kinds=(spread("reduce_scatter", 1, 25, 26), barrier))
    found = waited_for(record)
    assert found is not None
    assert (found.kind, found.collective) == ("reduce_scatter", "reduce_scatter of unit 9")
    assert (round(found.kind_s, 6), round(found.collective_s, 6)) == (0.024, 0.00209)


def test_nobody_is_waited_for_where_the_others_wait_a_twentieth_of_a_step_longer_or_less() -> None:
    assert waited_for(replace(RECORD, step_s=0.3)) is None


def test_of_two_ranks_the_other_one_waits() -> None:
    total, barrier = spread("all", 0, 8, 16), spread("barrier", 0, 7, 14)
    found = waited_for(replace(RECORD, ranks=2, total=total, labels=(barrier,)))
    assert found == WaitedFor((3,), 0.016, "", 0.0, "barrier", 0.014)


def test_ranks_are_compared_with_the_others_the_slowest_first() -> None:
    lags = rank_lags(waits_of([100, 100, 130, 90]))
    assert [each.rank for each in lags] == [2, 0, 1, 3]
    assert [round(each.lag_s * 1000) for each in lags] == [30, 0, 0, -10]
    assert [each.is_slow for each in lags] == [True, False, False, False]
