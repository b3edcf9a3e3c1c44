"""The example of tensor parallelism under the real launcher: two ranks that share layers train as one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cli import clean_environment

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "32", "--layers", "2", "--heads", "4", "--key-heads", "2", "--context", "16"]


@dataclass
class Run:
    records: list[dict[str, Any]]
    out: str

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of each update."""
        return [(record["loss"], record["grad_norm"]) for record in self.records if record["event"] == "step"]


def run_example(folder: Path, ranks: int, *, steps: int = 3, **section: Any) -> Run:
    """Runs updates of the example, with its config, on some ranks that share layers."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_bytes(Path(subprocess.__file__).read_bytes()[:40_000])
    config = json.loads((ROOT / "configs/tensor.json").read_text())
    config["tensor_parallel"] = {"autotp_size": ranks, **section}
    path = folder / f"tensor{ranks}.json"
    path.write_text(json.dumps(config))
    logs = folder / f"logs{ranks}"
    command = [sys.executable, "-m", "dsrun", "-n", str(ranks), "--backend", "gloo", "--log-dir", str(logs)]
    command += [str(ROOT / "scripts/examples/tensor.py"), "--config", str(path), *SMALL]
    command += ["--data", "text.txt", "--steps", str(steps), "--checkpoint", "saved"]
    env = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    (records,) = logs.glob("*/records.jsonl")
    return Run([json.loads(line) for line in records.read_text().splitlines()], done.stdout + done.stderr)


def test_two_ranks_that_share_layers_train_as_one_and_either_goes_on_from_the_other(tmp_path: Path) -> None:
    one = run_example(tmp_path / "one", 1)
    two = run_example(tmp_path / "two", 2, sequence_parallel=True)
    assert len(one.steps) == 3
    for found, expected in zip(two.steps, one.steps, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert "layers cut over 2 ranks" in two.out
    starts = [next(record for record in run.records if record["event"] == "start") for run in (one, two)]
    assert starts[0]["model"] == starts[1]["model"], "the record has the whole model"
    further = run_example(tmp_path / "two", 1, steps=4)
    assert "going on from" in further.out
    assert len(further.steps) == 1
