"""The check for machines with a GPU runs here too, on the CPU and tiny: its first run there is not the first of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.timeout(240)


def run_check(out: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    run = subprocess.run(
        ["bash", str(_SCRIPTS / "gpu_check"), "--out", str(out), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )
    return run.returncode, run.stderr, json.loads(out.read_text()) if out.exists() else {}


def test_contenders_train_one_model_and_their_rows_have_tokens_and_seconds(tmp_path: Path) -> None:
    code, talk, report = run_check(
        tmp_path / "results.json",
        *("--device", "cpu", "--size", "tiny", "--only", "llama plain,llama dsrun-3,llama fsdp2,llama deepspeed-1"),
    )
    assert code == 0, talk
    rows = {name: row for name, row in report["parts"].items() if row["state"] == "ok"}
    assert {"llama plain round 0", "llama dsrun-3 round 0", "llama fsdp2 round 0"} <= set(rows)
    losses = [[one["loss"] for one in row["result"]["rows"]] for row in rows.values()]
    # One model, data and precision: what is compared does the same work.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=2e-2)
    assert all(
        one["tokens"] == 128 and min(one["seconds"]) > 0 for row in rows.values() for one in row["result"]["rows"]
    )
    assert "llama plain round 0: ok" in talk


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    code, talk, report = run_check(tmp_path / "results.json")
    assert (code, report) == (2, {})
    assert talk.startswith("error: there is no CUDA GPU here")


def test_a_part_for_which_no_time_is_left_is_in_the_file_with_the_reason(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--size", "tiny", "--only", "overhead", "--minutes", "0.1")
    code, _, report = run_check(tmp_path / "results.json", *words)
    assert code == 0
    assert report["parts"] == {"overhead": {"state": "not run", "why": "no time was left"}}
