"""A run leaves what the next plan needs, and says at its end what it needed itself."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment, run_dsrun

SCRIPT = """\
import torch
import dsrun

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU()) for _ in range(4)))
engine, *_ = dsrun.initialize(model=model)
pair = (torch.ones(1, 300), torch.zeros(1, 300))
engine.train_batch(iter([pair] * engine.gradient_accumulation_steps()), loss_fn=torch.nn.functional.mse_loss)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "gradient_accumulation_steps": 4,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended.

    Attributes:
        folder: folder of the script and of its configs.
        state: folder of its job's state.
        out: what its ranks have printed.
    """

    folder: Path
    state: Path
    out: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which its record is found."""
        return clean_environment(XDG_STATE_HOME=str(self.state))

    @property
    def job(self) -> Path:
        """Folder of its job."""
        (found,) = self.state.glob("dsrun/jobs/*")
        return found

    def plan(self, config: str) -> dict[str, Any]:
        """Returns the plan of a config by its record, without the job's name."""
        words = ("plan", "train.py", "--config", config, "-n", "2", "--json")
        plan = run_dsrun(*words, cwd=self.folder, env=self.environment)
        assert plan.exit_code == 0, plan.stderr
        return json.loads(plan.stdout.replace(self.job.name, "JOB"))


def run(folder: Path, name: str, config: dict[str, Any]) -> Run:
    """Trains a step of a config of that name, which keeps its record in a folder of its own."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / f"{name}.json").write_text(json.dumps(config))
    found = Run(folder, folder / name)
    words = ("-n", "2", "--backend", "gloo", "train.py", "--config", f"{name}.json")
    result = run_dsrun(*words, cwd=folder, env=found.environment)
    assert result.exit_code == 0, result.stderr
    return replace(found, out=result.stdout)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without stages."""
    return run(tmp_path_factory.mktemp("runs"), "whole", CONFIG)


def test_a_run_ends_with_its_memory_and_is_planned_by_its_record(whole: Run) -> None:
    summary = re.findall(
        r"^\[0\] dsrun: memory of rank 0: model state ([0-9.]+ MiB) predicted, ([0-9.]+ MiB) measured; "
        r"peak [0-9.]+ MiB of host memory$",
        whole.out,
        re.M,
    )
    assert len(summary) == 1
    assert summary[0][0] == summary[0][1]
    events = [json.loads(line) for line in (whole.job / "records.jsonl").read_text().splitlines()]
    assert [one["event"] for one in events if one["event"] != "memory_sample"] == ["start", "step", "memory"]

    found = whole.plan("whole.json")
    assert found["model"]["parameters"] == 4 * 300 * 301
    assert found["model_state_bytes"] == events[-1]["state_predicted_bytes"]


def test_a_run_in_pipeline_stages_is_planned_as_one_without_them(whole: Run) -> None:
    staged = run(whole.folder, "stages", {**CONFIG, "pipeline": {"stages": 2}})
    first, second = (each.plan("stages.json") for each in (whole, staged))
    assert first["model"]["parameters"] == 4 * 300 * 301
    assert len(first["pipeline"]["stages"]) == 2
    for name in ("model", "pipeline", "model_state_bytes"):
        assert first[name] == second[name], name
