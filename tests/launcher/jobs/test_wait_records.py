from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.contract.wait_records import WaitRecord, WaitSpread, to_fields
from dsrun.launcher.jobs.wait_records import WaitedFor, read_waits, waited_for


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
    total=spread("all", 4, 16, 17),
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


def test_the_rank_that_waits_least_in_all_is_waited_for_where_the_others_wait_longest_for_it() -> None:
    found = waited_for(RECORD)
    assert found is not None
    assert (found.rank, found.collective) == (3, "reduce_scatter of unit 3")
    assert round(found.held_s, 6) == 0.012
    assert round(found.collective_s, 6) == 0.011


def test_nobody_is_waited_for_where_the_others_wait_a_twentieth_of_a_step_longer_or_less() -> None:
    assert waited_for(replace(RECORD, step_s=0.3)) is None


def test_of_two_ranks_the_other_one_waits() -> None:
    two = replace(RECORD, ranks=2, total=spread("all", 0, 6, 12), labels=(spread("barrier", 0, 5, 10),))
    assert waited_for(two) == WaitedFor(3, 0.012, "barrier", 0.01)
