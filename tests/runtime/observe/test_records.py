"""Records are JSON lines, one an event."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    RecordWriter(None).write("step", {})
    assert not list(tmp_path.iterdir())


def test_a_record_that_finds_no_room_names_its_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        RecordWriter(Path("/dev/full")).write("step", {})
