"""The summary of memory at the end of a run: once, from rank 0, after an update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dsrun.runtime.observe.peaks import PeakSummary, process_peak_bytes
from dsrun.runtime.observe.records import RecordWriter

MIB = 1 << 20


def summary(path: Path | None, *, rank: int = 0) -> PeakSummary:
    return PeakSummary(RecordWriter(path), rank=rank, device=torch.device("cpu"), predicted_state_bytes=10 * MIB)


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = summary(tmp_path / "records.jsonl")
    peaks.take_state(11 * MIB)
    peaks.report()
    said = capsys.readouterr().out
    assert said.startswith("dsrun: memory of rank 0: model state 10.0 MiB predicted, 11.0 MiB measured; peak ")
    assert said.endswith((" MiB of host memory\n", " GiB of host memory\n"))
    record = json.loads((tmp_path / "records.jsonl").read_text())
    assert (record["event"], record["state_predicted_bytes"], record["state_bytes"]) == ("memory", 10 * MIB, 11 * MIB)
    assert record["process_peak_bytes"] > 50 * MIB
    assert record["gpu_peak_bytes"] is None


def test_it_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = summary(None)
    peaks.take_state(MIB)
    peaks.report()
    peaks.report()
    assert capsys.readouterr().out.count("\n") == 1


def test_without_an_update_there_is_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = summary(None)
    assert peaks.wants_state
    peaks.report()
    assert capsys.readouterr().out == ""


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = summary(None, rank=1)
    peaks.take_state(MIB)
    peaks.report()
    assert capsys.readouterr().out == ""


def test_the_process_peak_grows_with_what_is_held() -> None:
    before = process_peak_bytes()
    held = torch.ones(before // 4 + 64 * MIB // 4)
    assert process_peak_bytes() >= before + 32 * MIB
    del held
