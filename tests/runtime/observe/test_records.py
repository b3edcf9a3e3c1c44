"""Records are JSON lines, one an event."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import MappingProxyType

import pytest

from dsrun.runtime.observe.records import RecordWriter


def test_records_are_appended_as_lines_in_a_folder_made_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "run" / "records.jsonl"
    for number in range(2):
        RecordWriter(path).write("step", {"step": number, "loss": float("inf") if number else 0.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "step"]
    assert [line["loss"] for line in lines] == [0.5, None]  # JSON has no inf
    assert lines[0]["time"] <= lines[1]["time"]


def test_a_record_written_while_the_interpreter_ends_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    source = f"""
import weakref
from pathlib import Path
import pytest

from dsrun.runtime.observe.records import RecordWriter
class Late: ...
late, writer = Late(), RecordWriter(Path({str(path)!r}))
weakref.finalize(late, lambda: writer.write("late", {{}}))  # made first, so called last
writer.write("early", {{}})
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["early", "late"]


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    assert RecordWriter(None).write("step", {})
    assert not list(tmp_path.iterdir())


def test_a_record_that_finds_no_room_is_named_with_its_file_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not RecordWriter(Path("/dev/full")).write("start", {})
    assert capsys.readouterr().out == "dsrun: records: /dev/full: No space left on device; `start` is not recorded\n"


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert not RecordWriter(tmp_path / "file" / "job" / "records.jsonl").write("start", {})
    assert capsys.readouterr().out == (
        f"dsrun: records: {tmp_path}/file/job/records.jsonl: Not a directory; `start` is not recorded\n"
    )


def test_records_behind_the_step_are_written_in_order_and_say_which_engine(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path, engine=1)
    for number in range(100):
        writer.write_behind("step", lambda number=number: {"step": number, "loss": float("nan")})
    writer.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(100))
    assert {(line["engine"], line["loss"]) for line in lines} == {(1, None)}


def test_an_event_that_others_act_upon_stands_behind_the_steps_before_it(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    for number in range(3):
        writer.write_behind("step", lambda number=number: {"step": number})
    writer.write("checkpoint", {"step": 2})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["step"] * 3 + ["checkpoint"]


def test_a_mapping_of_any_kind_is_written(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RecordWriter(path).write("step", {"memory": MappingProxyType({"cpu": 5, "gpu": float("inf")})})
    assert json.loads(path.read_text())["memory"] == {"cpu": 5, "gpu": None}


def test_a_process_that_ends_writes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    source = f"""
from pathlib import Path
from dsrun.runtime.observe.records import RecordWriter
writer = RecordWriter(Path({str(path)!r}))
for number in range(1000):
    writer.write_behind("step", lambda number=number: {{"step": number}})
"""
    subprocess.run([sys.executable, "-c", source], timeout=60, check=True)
    assert len(path.read_text().splitlines()) == 1000


def test_a_disk_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    """A pipe that nobody reads takes some lines, and then none."""
    path = tmp_path / "records.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a reader alone finds an end where the thread is late
    writer = RecordWriter(path)
    for number in range(2000):
        writer.write_behind("step", lambda number=number: {"step": number, "text": "x" * 100})
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as file:
        lines = [json.loads(file.readline()) for _ in range(2000)]
    assert [line["step"] for line in lines] == list(range(2000))


def test_a_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    writer = RecordWriter(Path("/dev/full"))
    for number in range(3):
        writer.write_behind("step", lambda number=number: {"step": number})
    writer.flush()
    assert capsys.readouterr().out == "dsrun: records: /dev/full: No space left on device; steps are not recorded\n"


def test_a_full_disk_is_told_once_an_event_and_after_the_end_too(capsys: pytest.CaptureFixture[str]) -> None:
    writer = RecordWriter(Path("/dev/full"))
    writer.write_behind("step", dict)
    assert writer._behind is not None
    writer._behind.end()
    for _ in range(2):
        writer.write_behind("step", dict)
        writer.write("checkpoint", {})
    told = "dsrun: records: /dev/full: No space left on device"
    assert capsys.readouterr().out == f"{told}; steps are not recorded\n{told}; `checkpoint` is not recorded\n"


def test_numbers_that_are_not_finite_are_left_out_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.write_behind("step", lambda: {"lrs": (float("nan"), 0.5), "phases": {"step": float("inf")}})
    writer.write_behind("step", lambda: {"lr": 0.5})
    writer.flush()
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["lrs"], first["phases"], second["lr"]) == ([None, 0.5], {"step": None}, 0.5)


def test_a_record_that_cannot_be_written_down_is_named_and_those_behind_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.write_behind("odd", lambda: {"value": object()})
    writer.write_behind("step", lambda: {"step": 1})
    writer.flush()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["step"]
    assert "a record of 'odd' is not written: Object of type object" in capsys.readouterr().out


def test_a_torn_line_takes_no_record_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"event": "step", "st')  # a process was killed
    writer = RecordWriter(path)
    writer.write("start", {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        assert not writer.write("step", {"step": 1})
        assert capsys.readouterr().out.endswith("No space left on device; `step` is not recorded\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write("step", {"step": 2})
    torn, start, torn_too, step = path.read_text().splitlines()
    assert (json.loads(start)["event"], json.loads(step)["step"]) == ("start", 2)
    assert len(torn) < 30 > len(torn_too)


def test_a_forked_process_waits_for_no_records_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    os.mkfifo(path)
    source = f"""
import os, sys, time
from pathlib import Path
from dsrun.runtime.observe.records import RecordWriter
reader = os.open({str(path)!r}, os.O_RDONLY | os.O_NONBLOCK)
writer = RecordWriter(Path({str(path)!r}))
for number in range(2000):
    writer.write_behind("step", lambda number=number: {{"step": number, "text": "x" * 100}})
begun = time.monotonic()
if not (child := os.fork()):
    sys.exit(0)
os.waitpid(child, 0)
print(time.monotonic() - begun)
sys.stdout.flush()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 4, "less than the patience for a disk"


class Kept:
    """What a record's fields are made of."""


def test_the_thread_keeps_nothing_of_a_record_that_is_written(tmp_path: Path) -> None:
    """An engine that a thread kept would outlive the interpreter, whose process then ends by SIGABRT."""
    writer, kept = RecordWriter(tmp_path / "records.jsonl"), Kept()
    gone = threading.Event()
    weakref.finalize(kept, gone.set)
    writer.write_behind("step", lambda kept=kept: {"name": type(kept).__name__})
    del kept
    assert gone.wait(10)
