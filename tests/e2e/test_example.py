"""The example under the real launcher: train, save, resume on other ranks; what the demo does, small."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import clean_environment

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "24"]


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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[list[float], str]:
    """Losses and output of a run of 12 steps on two ranks, which writes a sample in the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_example(folder, 2, 3, "--data", str(text), "--steps", "12", "--sample", "8")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[list[float], Path]:
    """Losses of a run of 6 steps on two ranks, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("interrupted")
    checkpoints = folder / "checkpoints"
    losses, _ = run_example(
        folder, 2, 3, "--data", str(text), "--steps", "6", "--checkpoint", str(checkpoints), "--save-every", "6"
    )
    return losses, checkpoints


Ran = tuple[list[float], str]


def go_on(folder: Path, text: Path, checkpoints: Path, ranks: int, stage: int, *, until: int) -> Ran:
    """Goes on from a copy of the checkpoints."""
    copied = folder / "checkpoints"
    shutil.copytree(checkpoints, copied)
    return run_example(folder, ranks, stage, "--data", str(text), "--steps", str(until), "--checkpoint", str(copied))


def test_training_goes_on_where_it_was_on_any_number_of_ranks_and_stage(
    tmp_path: Path, text: Path, undisturbed: Ran, interrupted: tuple[list[float], Path]
) -> None:
    before, checkpoints = interrupted
    assert before == undisturbed[0][:6]
    same, out = go_on(tmp_path, text, checkpoints, 2, 3, until=12)
    assert "going on from" in out
    assert same == undisturbed[0][6:]


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [pytest.param(1, 1, marks=pytest.mark.soak("three ranks at stage 2, which go on from two at stage 3")), (3, 2)],
)
def test_a_checkpoint_of_two_ranks_is_continued_by_others(
    tmp_path: Path, text: Path, undisturbed: Ran, interrupted: tuple[list[float], Path], ranks: int, stage: int
) -> None:
    _, checkpoints = interrupted
    resumed, _ = go_on(tmp_path, text, checkpoints, ranks, stage, until=10)
    assert resumed == pytest.approx(undisturbed[0][6:10], rel=1e-6)


def test_the_example_writes_a_sample_that_rank_0_alone_prints(undisturbed: Ran) -> None:
    _, out = undisturbed
    assert out.count("a sample of 8 bytes") == 1
    assert "[0] def " in out
