"""Bytes to and from disks, a step and a day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.direct_io.counts import IoCounts
from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.observe.wear import DiskWear

MIB = 1 << 20


def wear_of(path: Path, rank: int = 0) -> tuple[DiskWear, list[IoCounts], list[float]]:
    counts, now = [IoCounts(written_bytes=5)], [100.0]
    wear = DiskWear(lambda: counts[-1], ["/nvme"], RecordWriter(path), rank=rank, clock=lambda: now[-1])
    return wear, counts, now


def test_each_step_tells_what_was_moved_since_the_last(tmp_path: Path) -> None:
    wear, counts, _ = wear_of(tmp_path / "r")
    counts.append(IoCounts(read_bytes=7, written_bytes=10))
    assert wear.take_step() == {"disk_read_bytes": 7, "disk_written_bytes": 5}
    assert wear.take_step() == {"disk_read_bytes": 0, "disk_written_bytes": 0}


def test_the_end_tells_a_step_and_a_day_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wear, counts, now = wear_of(tmp_path / "r")
    counts.append(IoCounts(read_bytes=MIB, written_bytes=5 + 10 * MIB))
    for _ in range(5):
        wear.take_step()
    now.append(100.0 + 8640)
    wear.report()
    wear.report()
    said = "dsrun: rank 0 has written 10.0 MiB to /nvme: 2.0 MiB a step, 100.0 MiB a day at this pace\n"
    assert capsys.readouterr().out == said
    (record,) = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert (record["event"], record["steps"], record["read_bytes"]) == ("disk_wear", 5, MIB)
    assert (record["written_bytes_a_step"], record["written_bytes_a_day"]) == (2 * MIB, 100 * MIB)


@pytest.mark.parametrize(("rank", "steps"), [(0, 0), (1, 3)])
def test_without_a_step_or_on_another_rank_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, steps: int
) -> None:
    wear, _, _ = wear_of(tmp_path / "r", rank)
    for _ in range(steps):
        wear.take_step()
    wear.report()
    assert capsys.readouterr().out == ""
