"""An example of scripts/examples under the real launcher, small, with its own config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import clean_environment

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """What a run has left.

    Attributes:
        records: the job's records, in order.
        out: everything that it has printed.
    """

    records: list[dict[str, Any]]
    out: str

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of each update."""
        return [(record["loss"], record["grad_norm"]) for record in self.records if record["event"] == "step"]

    @property
    def flops_a_token(self) -> float:
        """Operations of the model's forward and backward, of all ranks together."""
        record = next(record for record in self.records if record["event"] == "step")
        return record["model_tflops"] * 1e12 / record["tokens_per_s"]


def run_example(
    folder: Path, name: str, *words: str, ranks: int, layers: int, config: Mapping[str, Mapping[str, Any]]
) -> ExampleRun:
    """Trains an example on a text of 40 kB.

    Args:
        folder: folder of its text, config, logs and checkpoints; those of an earlier run may be there.
        name: name of the script and of its config.
        words: further words of its command line.
        ranks: number of ranks.
        layers: number of blocks, of width 32.
        config: keys that take the place of the config's, by section.
    """
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_bytes(Path(subprocess.__file__).read_bytes()[:40_000])
    settings = json.loads((_ROOT / f"configs/{name}.json").read_text())
    for section, keys in config.items():
        settings[section] |= keys
    path = folder / f"{name}{ranks}.json"
    path.write_text(json.dumps(settings))
    logs = folder / f"logs{ranks}"
    command = [sys.executable, "-m", "dsrun", "-n", str(ranks), "--backend", "gloo", "--log-dir", str(logs)]
    command += [str(_ROOT / f"scripts/examples/{name}.py"), "--config", str(path), "--data", "text.txt", *words]
    command += ["--width", "32", "--layers", str(layers), "--heads", "4", "--key-heads", "2", "--context", "16"]
    # Sums inside a matrix product have one order if ranks have as many threads each.
    env = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    (records,) = logs.glob("*/records.jsonl")
    return ExampleRun([json.loads(line) for line in records.read_text().splitlines()], done.stdout + done.stderr)
