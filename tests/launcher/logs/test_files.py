"""No byte is dropped however large a log grows, and many ranks need few descriptors."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.errors import LaunchError
from dsrun.launcher.logs.files import LogFiles, older_parts


def whole(folder: Path, rank: int = 0) -> bytes:
    return b"".join(path.read_bytes() for path in [*older_parts(folder, rank), JobPaths(folder).log(rank)])


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


def test_logs_make_room_where_the_limit_of_descriptors_is_reached(tmp_path: Path) -> None:
    files = LogFiles(tmp_path, 20, most_open=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
    try:
        for round_ in range(2):
            for rank in range(20):
                files.append(rank, b"%d\n" % round_)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files.close_all()
    assert [whole(tmp_path, rank) for rank in (0, 19)] == [b"0\n1\n"] * 2
