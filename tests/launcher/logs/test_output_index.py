"""A record that is read was written whole; a torn one waits, or is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError
from dsrun.launcher.logs.output_index import RECORD_BYTES, IndexReader, IndexRecord, IndexWriter

FIRST = IndexRecord(1.5, 0, "stdout", 0, 10)
SECOND = IndexRecord(1.25, 4095, "stderr", 1 << 40, 1 << 20)
THIRD = IndexRecord(2.0, 0, "dsrun", 10, 3)


def write(folder: Path, *records: IndexRecord) -> None:
    writer = IndexWriter(folder)
    for record in records:
        writer.add(record.time_s, record.rank, record.stream, record.offset, record.length)
    writer.close()


def test_records_come_back_in_order_of_arrival_at_24_bytes_each(tmp_path: Path) -> None:
    write(tmp_path, FIRST, SECOND, THIRD)
    assert list(IndexReader(tmp_path).read()) == [FIRST, SECOND, THIRD]
    assert JobPaths(tmp_path).output_index.stat().st_size == 3 * 24 == 3 * RECORD_BYTES


def test_a_reader_goes_on_with_what_came_since(tmp_path: Path) -> None:
    reader = IndexReader(tmp_path)
    assert list(reader.read()) == []
    writer = IndexWriter(tmp_path)
    writer.add(*FIRST)
    assert list(reader.read()) == [FIRST]
    assert list(reader.read()) == []
    writer.add(*SECOND)
    assert list(reader.read()) == [SECOND]
    writer.close()
    writer.add(*THIRD)
    assert list(reader.read()) == []


@pytest.mark.parametrize("lost", range(1, RECORD_BYTES))
def test_a_torn_last_record_is_left_out(tmp_path: Path, lost: int) -> None:
    write(tmp_path, FIRST, SECOND)
    path = JobPaths(tmp_path).output_index
    path.write_bytes(path.read_bytes()[:-lost])
    assert list(IndexReader(tmp_path).read()) == [FIRST]


def test_an_index_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"gone/output\.index: cannot be made"):
        IndexWriter(tmp_path / "gone")
