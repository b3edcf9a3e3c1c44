"""A run leaves what the next plan needs, and says at its end what it needed itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.cli import clean_environment, run_dsrun

SCRIPT = """\
import torch
import dsrun

model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
engine, *_ = dsrun.initialize(model=model)
engine.backward(engine(torch.ones(1, 300)).square().mean())
engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def test_a_run_ends_with_its_memory_and_is_planned_by_its_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    env = clean_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    run = run_dsrun("-n", "2", "--backend", "gloo", "train.py", "--config", "ds.json", cwd=tmp_path, env=env)
    assert run.exit_code == 0, run.stderr
    summary = re.findall(
        r"^\[0\] dsrun: memory of rank 0: model state ([0-9.]+ MiB) predicted, ([0-9.]+ MiB) measured; "
        r"peak [0-9.]+ MiB of host memory$",
        run.stdout,
        re.M,
    )
    assert len(summary) == 1
    assert summary[0][0] == summary[0][1]
    (records,) = (tmp_path / "state").glob("dsrun/jobs/*/records.jsonl")
    events = [json.loads(line) for line in records.read_text().splitlines()]
    assert [one["event"] for one in events if one["event"] != "memory_sample"] == ["start", "step", "memory"]

    plan = run_dsrun("plan", "train.py", "--config", "ds.json", "-n", "2", "--json", cwd=tmp_path, env=env)
    assert plan.exit_code == 0, plan.stderr
    found = json.loads(plan.stdout)
    assert found["model"]["parameters"] == 2 * 300 * 301
    assert found["model_state_bytes"] == events[-1]["state_predicted_bytes"]
