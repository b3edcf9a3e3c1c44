"""The example under the real launcher: train, save, resume on other ranks; what the demo does, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "24", "--save-every", "6"]


def run_example(folder: Path, ranks: int, stage: int, *args: str) -> tuple[list[float], str]:
    """Runs the example and returns (loss of each step, stdout)."""
    config = json.loads((ROOT / f"configs/zero{stage}.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 2
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(config))
    logs = folder / f"logs-{ranks}-{stage}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "dsrun", "-n", str(ranks), "--log-dir", str(logs)]
    command += [str(ROOT / "scripts/examples/gpt.py"), "--config", str(path), *SMALL, *args]
    # One thread a rank whatever their number, so that sums inside a matrix product have one order.
    env = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    (records,) = logs.glob("*/records.jsonl")
    steps = [json.loads(line) for line in records.read_text().splitlines()]
    return [record["loss"] for record in steps if record["event"] == "step"], done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(Path(subprocess.__file__).read_bytes()[:40_000])
    return path


def test_training_goes_on_where_it_was_on_any_number_of_ranks_and_stage(tmp_path: Path, text: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    data = ["--data", str(text)]
    undisturbed, _ = run_example(tmp_path, 2, 3, *data, "--steps", "12")
    before, _ = run_example(tmp_path, 2, 3, *data, "--steps", "6", "--checkpoint", checkpoints)
    assert before == undisturbed[:6]
    same, out = run_example(tmp_path, 2, 3, *data, "--steps", "12", "--checkpoint", checkpoints)
    assert "going on from" in out
    assert same == undisturbed[6:]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (3, 2)])
def test_a_checkpoint_of_two_ranks_is_continued_by_others(tmp_path: Path, text: Path, ranks: int, stage: int) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    data = ["--data", str(text)]
    undisturbed, _ = run_example(tmp_path, 2, 3, *data, "--steps", "10", "--checkpoint", checkpoints)
    # Step 6 was saved, and then steps 7 to 10 were taken; from step 6 the others take them again.
    (Path(checkpoints) / "latest").write_text("global_step6")
    resumed, _ = run_example(tmp_path, ranks, stage, *data, "--steps", "10", "--checkpoint", checkpoints)
    assert resumed == pytest.approx(undisturbed[6:], rel=1e-6)


def test_the_example_writes_a_sample_that_rank_0_alone_prints(tmp_path: Path, text: Path) -> None:
    _, out = run_example(tmp_path, 2, 3, "--data", str(text), "--steps", "2", "--sample", "8")
    assert out.count("a sample of 8 bytes") == 1
    assert "[0] def " in out
