"""Figures of a script that lie on a device, on their way to the records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsrun.runtime.observe.records import RecordWriter
from dsrun.runtime.observe.steps.script_figures import ScriptFigures


@dataclass
class Copied:
    """A point behind a copy."""

    has_come: bool = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.has_come = True


class Device:
    """Copies numbers that it counts, as late as a test wants."""

    def __init__(self) -> None:
        self.copies: list[Copied] = []

    def copy(self, value: Tensor) -> tuple[Tensor, Copied]:
        assert value.device.type == "meta"
        self.copies.append(Copied())
        return torch.tensor(float(len(self.copies)), dtype=torch.float64), self.copies[-1]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["values"] for line in path.read_text().splitlines()] if path.exists() else []


def test_without_steps_figures_of_a_device_are_recorded_with_the_next_ones(tmp_path: Path) -> None:
    records, device = RecordWriter(tmp_path / "records.jsonl"), Device()
    figures = ScriptFigures(records, is_first=True, copy=device.copy)
    on_device = torch.zeros(1, device="meta")
    figures.log({"eval/loss": on_device}, step=0, samples=0)
    figures.log({"eval/f1": 0.5}, step=0, samples=0)
    records.flush()
    assert written(tmp_path / "records.jsonl") == [], "in order, and the first is on its way"
    device.copies[0].has_come = True
    figures.log({"eval/loss": on_device}, step=0, samples=0)
    records.flush()
    assert written(tmp_path / "records.jsonl") == [{"eval/loss": 1.0}, {"eval/f1": 0.5}]


def test_figures_that_come_at_the_end_are_recorded_where_no_thread_begins_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    figures = ScriptFigures(RecordWriter(tmp_path / "records.jsonl"), is_first=True, copy=Device().copy)
    figures.log({"eval/loss": torch.zeros(1, device="meta")}, step=0, samples=0)
    monkeypatch.setattr("threading.Thread.start", refuse)
    del figures
    assert written(tmp_path / "records.jsonl") == [{"eval/loss": 1.0}]


@pytest.mark.cuda
@pytest.mark.gpu_seconds(0.1)
def test_figures_of_a_gpu_are_recorded(tmp_path: Path) -> None:
    records = RecordWriter(tmp_path / "records.jsonl")
    figures = ScriptFigures(records, is_first=True)
    figures.log({"loss": torch.full((1, 1), 2.5, device="cuda", requires_grad=True)}, step=0, samples=0)
    torch.cuda.synchronize()
    figures.settle()
    records.flush()
    assert written(tmp_path / "records.jsonl") == [{"loss": 2.5}]
