"""Two jobs with the same script, config and settings train beside each other on one host, and neither notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment, start_dsrun

pytestmark = pytest.mark.timeout(180)
DEADLINE_S = 120.0
STEPS = 6

#: Joins, says where, and trains when as many jobs as the second word says have joined as well.
TRAIN = f"""
import os, pathlib, sys, time, torch, dsrun
from torch import nn
met, jobs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(7)
engine, *_ = dsrun.initialize(model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
rank = engine.global_rank
if rank == 0:
    place = met / os.environ["DSRUN_JOB_ID"]
    place.write_text(f"{{os.environ['DSRUN_NONCE']}} {{os.environ['MASTER_PORT']}}")
    place.rename(place.with_suffix(".joined"))
while len(list(met.glob("*.joined"))) < jobs:
    time.sleep(0.02)
for step in range({STEPS}):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, 6, generator=generator)[rank * 2 : rank * 2 + 2]
    engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
    engine.step()
engine.destroy()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "zero_optimization": {"stage": 2},
}


def run_jobs(folder: Path, count: int) -> tuple[list[list[tuple[Any, ...]]], list[list[str]]]:
    """Runs jobs at the same time.

    Returns:
        for each job what it recorded of its steps; and nonce and port that its rank 0 had.
    """
    work, met, logs = folder / "work", folder / f"met{count}", folder / f"logs{count}"
    for path in (work, met):
        path.mkdir(exist_ok=True)
    (work / "train.py").write_text(TRAIN)
    (work / "ds.json").write_text(json.dumps(CONFIG))
    words = ["-n", "2", "--config", "ds.json", "--backend", "gloo", "--log-dir", str(logs)]
    # One thread a rank, so that sums inside a matrix product have one order however many cores there are.
    env = clean_environment(OMP_NUM_THREADS="1", XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")
    jobs = [start_dsrun(*words, "train.py", str(met), str(count), cwd=work, env=env) for _ in range(count)]
    try:
        for job in jobs:
            _, said = job.communicate(timeout=DEADLINE_S)
            assert job.returncode == 0, said.decode()
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    records = [path.read_text().splitlines() for path in sorted(logs.glob("*/records.jsonl"))]
    steps = [[record for line in lines if (record := json.loads(line))["event"] == "step"] for lines in records]
    known = [[(step["step"], step["loss"], step["grad_norm"]) for step in job] for job in steps]
    return known, [path.read_text().split() for path in sorted(met.glob("*.joined"))]


@pytest.mark.soak("A22 in test_faults_environment.py")
def test_two_jobs_with_the_same_settings_train_at_once_as_each_does_alone(tmp_path: Path) -> None:
    (alone,), _ = run_jobs(tmp_path, 1)
    assert [step for step, *_ in alone] == list(range(1, STEPS + 1))
    both, places = run_jobs(tmp_path, 2)
    assert both == [alone, alone]
    (nonce, port), (other_nonce, other_port) = places
    assert nonce != other_nonce
    assert port != other_port
