"""A run leaves what the next plan needs, and says at its end what it needed itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


SCRIPT_OF_BATCHES = """\
import torch
import dsrun

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU()) for _ in range(4)))
engine, *_ = dsrun.initialize(model=model)
pair = (torch.ones(1, 300), torch.zeros(1, 300))
engine.train_batch(iter([pair] * engine.gradient_accumulation_steps()), loss_fn=torch.nn.functional.mse_loss)
"""


def test_a_run_in_pipeline_stages_is_planned_as_one_without_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT_OF_BATCHES)
    config = {**CONFIG, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
    (tmp_path / "whole.json").write_text(json.dumps(config))
    (tmp_path / "stages.json").write_text(json.dumps({**config, "pipeline": {"stages": 2}}))
    plans: list[dict[str, Any]] = []
    for name in ("whole.json", "stages.json"):
        env = clean_environment(XDG_STATE_HOME=str(tmp_path / name.removesuffix(".json")))
        run = run_dsrun("-n", "2", "--backend", "gloo", "train.py", "--config", name, cwd=tmp_path, env=env)
        assert run.exit_code == 0, run.stderr
        (job,) = (tmp_path / name.removesuffix(".json")).glob("dsrun/jobs/*")
        plan = run_dsrun("plan", "train.py", "--config", "stages.json", "-n", "2", "--json", cwd=tmp_path, env=env)
        assert plan.exit_code == 0, plan.stderr
        plans.append(json.loads(plan.stdout.replace(job.name, "JOB")))
    assert plans[0]["model"]["parameters"] == 4 * 300 * 301
    assert len(plans[0]["pipeline"]["stages"]) == 2
    for name in ("model", "pipeline", "model_state_bytes"):
        assert plans[0][name] == plans[1][name], name
