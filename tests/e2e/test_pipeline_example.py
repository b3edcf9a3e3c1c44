"""The example of pipeline stages under the real launcher: two stages train with the bits of one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import clean_environment

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "32", "--layers", "4", "--heads", "4", "--key-heads", "2", "--context", "16"]


@dataclass
class Run:
    records: list[dict[str, Any]]
    out: str

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of each update."""
        return [(record["loss"], record["grad_norm"]) for record in self.records if record["event"] == "step"]


def run_example(folder: Path, stages: int) -> Run:
    """Runs three updates of the example on as many ranks as stages."""
    folder.mkdir()
    (folder / "text.txt").write_bytes(Path(subprocess.__file__).read_bytes()[:40_000])
    config = json.loads((ROOT / "configs/pipeline.json").read_text())
    config["pipeline"]["stages"] = stages
    path = folder / f"stages{stages}.json"
    path.write_text(json.dumps(config))
    logs = folder / "logs"
    command = [sys.executable, "-m", "dsrun", "-n", str(stages), "--backend", "gloo", "--log-dir", str(logs)]
    command += [str(ROOT / "scripts/examples/pipeline.py"), "--config", str(path), *SMALL]
    command += ["--data", "text.txt", "--steps", "3"]
    # Sums inside a matrix product have one order if ranks have as many threads each.
    env = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    (records,) = logs.glob("*/records.jsonl")
    return Run([json.loads(line) for line in records.read_text().splitlines()], done.stdout + done.stderr)


def test_two_stages_name_themselves_and_have_the_losses_and_norms_of_one_to_the_bit(tmp_path: Path) -> None:
    one, two = (run_example(tmp_path / f"{stages}", stages) for stages in (1, 2))
    assert len(one.steps) == 3
    assert two.steps == one.steps

    assert "the first of 2 pipeline stages" in two.out
    line = "dsrun: pipeline of 2 stages: layers 0 to 1 | 2 to 3; 1f1b over 8 micro batches, bubble 11.1 %"
    assert two.out.count(line) == 1
    (record,) = (record for record in two.records if record["event"] == "pipeline")
    assert record["layers"] == [[0, 2], [2, 4]]
    assert record["stage_of_chunk"] == [0, 1]
    assert (record["schedule"], record["micro_batches"], record["live_micro_batches"]) == ("1f1b", 8, 2)
