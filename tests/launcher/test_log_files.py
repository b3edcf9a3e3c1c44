"""No byte is dropped however large a log grows, and many ranks need few descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import LaunchError
from dsrun.launcher.log_files import LogFiles, log_path, older_parts
from dsrun.launcher.log_parts import LogParts


def whole(folder: Path, rank: int = 0) -> bytes:
    return b"".join(path.read_bytes() for path in [*older_parts(folder, rank), log_path(folder, rank)])


def test_a_log_above_the_limit_is_continued_after_a_line_and_keeps_its_order(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 1, part_bytes=10)
    offsets = [files.append(0, data) for data in (b"one\ntwo\n", b"three\nfo", b"ur\nfive\nsix\n")]
    files.close_all()
    assert offsets == [0, 8, 16]
    assert [path.name for path in older_parts(tmp_path, 0)] == ["rank0.1.log", "rank0.2.log"]
    assert (tmp_path / "rank0.1.log").read_bytes() == b"one\ntwo\nthree\n"
    assert whole(tmp_path) == b"one\ntwo\nthree\nfour\nfive\nsix\n"


def test_a_log_without_line_ends_is_continued_too(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 1, part_bytes=10)
    for _ in range(10):
        files.append(0, b"x" * 5)
    files.close_all()
    assert len(older_parts(tmp_path, 0)) >= 2
    assert whole(tmp_path) == b"x" * 50


def test_more_ranks_than_descriptors(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 300, most_open=8)
    before = len(os.listdir("/proc/self/fd"))
    for round_ in range(3):
        for rank in range(300):
            files.append(rank, f"{round_} of {rank}\n".encode())
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    files.close_all()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "rank299.log").read_text() == "0 of 299\n1 of 299\n2 of 299\n"


def test_a_closed_log_goes_on_where_it_was(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 1)
    files.append(0, b"a\n")
    files.close(0)
    assert files.append(0, b"b\n") == 2
    files.close_all()
    assert whole(tmp_path) == b"a\nb\n"


def test_a_log_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"gone/rank0\.log: cannot be made: No such file"):
        LogFiles(tmp_path / "gone", 1)


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
