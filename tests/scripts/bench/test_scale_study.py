"""docs/scale.md is what scripts/bench/scale_study.py writes, and its bars are met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.core_speed import least_seconds

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "bench" / "scale_study.py"


def study(option: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), option], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    """What was counted of 4,096 ranks, in a process of its own."""
    return json.loads(study("--on-paper"))


def test_the_page_and_its_picture_are_what_the_script_writes() -> None:
    assert study("--check") == ""


def test_published_speeds_are_predicted_within_the_bars() -> None:
    found = json.loads(study("--json"))
    assert found["llama3"] == pytest.approx([1, 1, 1], abs=0.03)
    assert found["titan"] == pytest.approx(1, abs=0.05)
    assert found["simulated"] == pytest.approx(1, abs=0.02)


def test_every_rank_of_4096_has_its_groups_schedule_bytes_and_state(paper: dict[str, Any]) -> None:
    assert not paper["torch"]
    assert paper["ranks"] == paper["ranks with all groups"] == 4096
    # The world, stages, replicas of a stage's cut layers, ranks that share layers, pipelines.
    assert paper["groups"] == 1 + 16 + 16 * 8 + 16 * 32 + 32 * 8
    assert len(paper["bytes of stages"]) == len(paper["state of stages"]) == 16
    assert all(stage.keys() == {"data 256", "data 32", "tensor 8", "pipe 16"} for stage in paper["bytes of stages"])
    # Interleaved: (p - 1) forwards and backwards of a chunk beyond those of 64 micro batches in 8 chunks.
    assert paper["units of time"] == 3 * (64 * 8 + 15)
    assert paper["megabytes"] <= 200


@pytest.mark.depends_on_speed("it bounds processor seconds, of which a shared core takes more")
def test_4096_ranks_are_counted_within_a_second() -> None:
    assert least_seconds(lambda: json.loads(study("--on-paper"))["seconds"], tries=2) <= 1
