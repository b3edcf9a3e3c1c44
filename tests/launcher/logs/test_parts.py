"""A log reads as one run of bytes, whatever parts it has and while it grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.launcher.logs.files import LogFiles
from dsrun.launcher.logs.parts import LogParts


@given(chunks=st.lists(st.sampled_from([b"a\n", b"bcd", b"\n", b"efgh\nij"]), max_size=30), cut=st.integers(1, 9))
def test_parts_read_as_one_whatever_is_asked(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    files, parts = LogFiles(folder, 1, part_bytes=7), LogParts(folder)
    written, read = b"", b""
    for data in chunks:
        assert files.append(0, data) == len(written)
        written += data
        while piece := parts.read(0, len(read), cut):
            read += piece
        assert read == written
    assert parts.read(0, 0, len(written) + 1) == written
    parts.close()
    files.close_all()


def test_there_is_nothing_to_read_where_there_is_no_log(tmp_path: Path) -> None:
    parts = LogParts(tmp_path)
    assert (parts.read(3, 0, 10), parts.last_write_s(3)) == (b"", 0.0)


def test_reading_many_logs_takes_few_descriptors(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 200)
    for rank in range(200):
        files.append(rank, b"%d\n" % rank)
    files.close_all()
    before = len(os.listdir("/proc/self/fd"))
    parts = LogParts(tmp_path)
    for round_ in range(2):
        assert [parts.read(rank, 0, 1 + round_) for rank in (0, 150, 199)] == (
            [b"0", b"1", b"1"] if round_ == 0 else [b"0\n", b"15", b"19"]
        )
        for rank in range(200):
            parts.read(rank, 0, 4)
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    parts.close()
    assert len(os.listdir("/proc/self/fd")) == before
