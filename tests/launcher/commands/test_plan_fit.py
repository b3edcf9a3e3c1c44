"""`dsrun plan --fit` changes nothing that an option says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def fitted(*words: str) -> tuple[dict[str, Any], str]:
    """Returns the config that is printed, and what is said of it."""
    Path("ds.json").write_text(json.dumps(CONFIG))
    result = invoke("plan", *words, "--config", "ds.json", "--fit")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.parametrize(
    ("axes", "sections"),
    [
        ("p2v2", {"pipeline": {"stages": 2, "schedule": "interleaved", "virtual_stages": 2}}),
        ("t2", {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}),
        ("t1p1", {}),
    ],
)
def test_sizes_of_axes_that_are_given_stay(axes: str, sections: dict[str, Any]) -> None:
    found, _ = fitted("13B", "--gpus", "8xA100-80G", "--seq", "2048", "--axes", axes)
    for name in ("pipeline", "tensor_parallel"):
        if name in sections or axes == "t1p1":
            assert found.get(name) == sections.get(name)


def test_recomputation_that_is_given_stays() -> None:
    """With nothing recomputed, fewer samples fit at once; what the script recomputes stands in no config."""
    words = ("13B", "--gpus", "8xA100-80G", "--seq", "8192", "--recompute")
    found, said = fitted(*words, "blocks")
    assert "activation_checkpointing" not in found
    assert "where the script recomputes its blocks" in said
    refused = invoke("plan", *words, "none", "--config", "ds.json", "--axes", "t1p1", "--fit")
    assert refused.exit_code == 2
    assert "fits" in refused.stderr
