"""Sizes that a config leaves open are planned at a launch for the model that is launched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsrun.contract.environment import PLANNED_AXES_ENV
from dsrun.launcher.estimate.open_axes import with_planned_axes
from dsrun.launcher.launch.checked_launch import Launch, Request
from dsrun.launcher.launch.host_placement import HostRequest
from dsrun.launcher.launch.resolve import resolve

WIDTH = 10**9
#: A model that fits no machine, so that the sizes that need the least are taken on any. A block has 18 parameters for
#: each of its width, two of which are norms that no rank shares: half of the others are 8, less than ten.
WIDE = {
    "model_type": "llama",
    "num_hidden_layers": 1000,
    "hidden_size": WIDTH,
    "intermediate_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "vocab_size": 2,
    "max_position_embeddings": 8,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("wide").mkdir()
    Path("wide/config.json").write_text(json.dumps(WIDE))


def launched(**zero: Any) -> Launch:
    """Two ranks on the CPU that train the wide model; how many share a layer is left open."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero},
        "tensor_parallel": {"autotp_size": "auto", "sequence_parallel": True},
    }
    Path("ds.json").write_text(json.dumps(config))
    hosts = HostRequest(ranks_per_host=2)
    request = Request(words=("train.py",), hosts=hosts, config="ds.json", backend="gloo")
    launch = resolve(request, environ=os.environ, verbs=[])
    return with_planned_axes(launch, model="wide", jobs=[], environ=os.environ, is_allowed=True)


@pytest.mark.parametrize(("limit", "size"), [(100_000, 2), (10 * WIDTH, 1), ("auto", 1)])
def test_limits_that_follow_from_the_models_width_count_as_what_they_come_to(limit: int | str, size: int) -> None:
    """With ten widths as the limit, halves of blocks stay gathered and need more than whole blocks that do not."""
    launch = launched(stage3_param_persistence_threshold=limit)
    assert launch.env[PLANNED_AXES_ENV] == f"tensor={size}"


def test_samples_have_no_more_tokens_than_the_model_is_made_for() -> None:
    (note,) = launched().notes
    assert "for wide with 8 tokens a sample on 2 ranks on the CPU of this machine" in note
