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
from gpu.offload_floor import Machine, floor_s

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


def test_offload_stands_beside_its_floor(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--size", "tiny", "--only", "floors,offload tiny compute,offload tiny dsrun")
    code, talk, report = run_check(tmp_path / "results.json", *words)
    assert code == 0, talk
    (short, long) = report["offload"]
    assert (short["contender"], short["tokens"], long["tokens"]) == ("dsrun-cpu", 1024, 2048)
    assert all(row["of_floor"] == pytest.approx(row["floor_s"] / row["seconds"]) for row in (short, long))


@pytest.mark.parametrize(
    ("tier", "micro_batches", "expected_s"),
    [
        ("gpu", 2, 6.0),
        # Gradients (4 s in bf16) outlast backward, the host's step (28 s) the next forward.
        ("cpu", 1, 4.0 + 28.0),
        # Sums in fp32 take 8 s; the first micro batch computes alone.
        ("cpu", 2, 3.0 + 8.0 + 28.0),
        # Parameters take 2 s for each pass of each micro batch.
        ("ram", 2, 2.0 + 2.0 + 8.0 + 28.0),
        ("disk", 1, 4.0 + 12.0 / 0.5 + 12.0),
    ],
)
def test_a_floor_is_what_nothing_can_hide(tier: str, micro_batches: int, expected_s: float) -> None:
    machine = Machine(to_device=1.0, to_host=0.5, host_step=1.0, disk_read=0.5, disk_write=1.0)
    took_s = floor_s(tier, numel=1, micro_batches=micro_batches, forward_s=1.0, backward_s=2.0, machine=machine)
    assert took_s == pytest.approx(expected_s)


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
