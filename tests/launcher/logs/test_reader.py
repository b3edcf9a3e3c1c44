"""What a job wrote is read back whole, in order, also while it runs and where its index is damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsrun.contract.job_paths import JobPaths
from dsrun.launcher.logs.files import LogFiles
from dsrun.launcher.logs.output_index import IndexWriter, LogStream
from dsrun.launcher.logs.reader import LogLine, read_lines, read_log


class Job:
    """A job folder that is written to as a job does."""

    def __init__(self, folder: Path, *, ranks: int = 2, part_bytes: int = 1 << 20) -> None:
        self.folder = folder
        self.files = LogFiles(folder, ranks, part_bytes=part_bytes)
        self.index = IndexWriter(folder)

    def write(self, time_s: float, rank: int, data: bytes, stream: LogStream = "stdout") -> None:
        self.index.add(time_s, rank, stream, self.files.append(rank, data), len(data))

    def note(self, time_s: float, text: str) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "start", "time": time_s}) + "\n")
            file.write(json.dumps({"event": "note", "time": time_s, "text": text}) + "\n")

    def read(self, **options: object) -> list[tuple[float, int | None, str]]:
        lines = read_log(self.folder, **options)  # type: ignore[arg-type]
        return [(line.time_s, line.rank, line.text) for line in lines]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_lines_of_all_ranks_come_in_order_of_arrival(job: Job) -> None:
    job.write(1, 0, b"a\nb")
    job.write(2, 1, b"x\n")
    job.write(3, 0, b"c\n", "stderr")
    job.write(4, 0, b" more\n")
    assert list(read_log(job.folder)) == [
        LogLine(1, 0, "stdout", "a"),
        LogLine(2, 1, "stdout", "x"),
        LogLine(3, 0, "stderr", "c"),
        LogLine(4, 0, "stdout", "b more"),
    ]


def test_notes_of_dsrun_come_between_the_lines_around_them(job: Job) -> None:
    job.note(0.5, "job starts")
    job.write(1, 0, b"a\n")
    job.note(1.5, "stopping")
    job.write(2, 0, b"b\n")
    job.note(3, "done")
    assert [text for _, _, text in job.read()] == ["job starts", "a", "stopping", "b", "done"]
    assert [line.stream for line in read_log(job.folder)] == ["dsrun", "stdout", "dsrun", "stdout", "dsrun"]


def test_only_the_ranks_that_are_asked_for(job: Job) -> None:
    job.write(1, 0, b"a\n")
    job.write(2, 1, b"x\n")
    job.note(3, "done")
    assert job.read(ranks=frozenset({1})) == [(2, 1, "x"), (3, None, "done")]


def test_only_what_came_since_with_lines_that_were_begun_before(job: Job) -> None:
    job.write(1, 0, b"a\n")
    job.note(1, "early")
    job.write(2, 0, b"b\nhalf ")
    job.write(2, 1, b"x\n")
    job.write(5, 0, b"of it\n")
    job.write(6, 1, b"y\n")
    assert job.read(since_s=4.5) == [(5, 0, "half of it"), (6, 1, "y")]


def test_only_lines_in_which_something_is_found(job: Job) -> None:
    job.write(1, 0, b"loss 3\nlr 1\nloss 2\n")
    assert job.read(grep=re.compile(r"loss \d")) == [(1, 0, "loss 3"), (1, 0, "loss 2")]


def test_any_bytes_come_back(job: Job) -> None:
    job.write(1, 0, b"10%\r20%\rdone\nnul\0 bad\xff \xc3")
    job.write(2, 0, b"\xa4\nno end")
    assert [text for _, _, text in job.read()] == ["done", "nul\0 bad\udcff ä", "no end"]


def test_parts_of_a_log_read_as_one(tmp_path: Path) -> None:
    job = Job(tmp_path, part_bytes=64)
    for number in range(100):
        job.write(number, number % 2, f"line {number}\n".encode())
    assert (tmp_path / "rank0.3.log").exists()
    assert [text for _, _, text in job.read()] == [f"line {number}" for number in range(100)]


def test_another_attempt_ends_a_line_that_the_one_before_left(job: Job) -> None:
    job.write(1, 0, b"half a line")
    job.write(2, 0, b"\n--- attempt 2 ---\n", "dsrun")
    job.write(3, 0, b"a\n")
    assert list(read_log(job.folder)) == [
        LogLine(2, 0, "stdout", "half a line"),
        LogLine(2, 0, "dsrun", "--- attempt 2 ---"),
        LogLine(3, 0, "stdout", "a"),
    ]


def test_bytes_that_no_record_names_are_not_lost(job: Job) -> None:
    job.write(1, 0, b"a\n")
    job.files.append(0, b"gap\n")
    job.write(2, 0, b"b\n")
    job.files.append(0, b"behind\n")
    job.files.append(1, b"other rank\n")
    assert [(rank, text) for _, rank, text in job.read()] == [
        (0, "a"),
        (0, "gap"),
        (0, "b"),
        (0, "behind"),
        (1, "other rank"),
    ]


def test_without_an_index_logs_come_rank_by_rank(job: Job) -> None:
    job.write(1, 1, b"x\n")
    job.write(2, 0, b"a\n")
    JobPaths(job.folder).output_index.unlink()
    assert [(rank, text) for _, rank, text in job.read()] == [(0, "a"), (1, "x")]


def test_a_record_of_bytes_that_never_reached_the_disk_ends_nothing(job: Job) -> None:
    job.index.add(1, 0, "stdout", 0, 100)
    job.write(2, 1, b"x\n")
    assert job.read() == [(2, 1, "x")]


def test_an_empty_folder_has_no_lines(tmp_path: Path) -> None:
    assert list(read_log(tmp_path)) == []


def test_following_yields_what_comes_until_the_job_is_over(job: Job) -> None:
    job.write(1, 0, b"a\nb")
    rounds = iter(
        [
            lambda: (job.write(2, 0, b"b\n"), job.note(2.5, "hm"), True)[-1],
            lambda: True,
            lambda: (job.write(3, 0, b"last"), False)[-1],
        ]
    )
    seen: list[str] = []

    def follow() -> bool:
        seen.append(f"asked after {len(texts)}")
        return next(rounds)()

    texts: list[str] = []
    for line in read_log(job.folder, follow=follow):
        texts.append(line.text)
    assert texts == ["a", "bb", "hm", "last"]
    assert seen == ["asked after 1", "asked after 3", "asked after 3"]


def test_a_torn_event_waits_for_its_rest(job: Job) -> None:
    events = job.folder / "events.jsonl"
    events.write_text('{"event": "note", "time": 1, "te')

    def finish() -> bool:
        with events.open("a") as file:
            file.write('xt": "whole"}\nnot "note" json\n')
        return False

    assert job.read(follow=finish) == [(1, None, "whole")]


def test_lines_that_came_together_come_in_one_bunch(job: Job) -> None:
    job.write(1, 0, b"a\nb\nc\n")
    assert [bunch.texts for bunch in read_lines(job.folder)] == [["a", "b", "c"]]
