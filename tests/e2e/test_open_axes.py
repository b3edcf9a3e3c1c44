"""Sizes of axes that a config leaves to a plan: planned by the launch, trained with by its ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.cli import Result, clean_environment, run_dsrun

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
SCRIPT = """
import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import dsrun

torch.manual_seed(3)
shape = json.load(open("config.json"))
model = AutoModelForCausalLM.from_config(LlamaConfig(**{key: shape[key] for key in shape if key != "model_type"}))
engine, *_ = dsrun.initialize(model=model)
tokens = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(1))
loss = engine(input_ids=tokens, labels=tokens).loss
engine.backward(loss)
engine.step()
print("told", engine.autotp_size(), engine.dp_world_size, f"{loss.item():.6f}")
"""


def run(folder: Path, *words: str) -> Result:
    (folder / "train.py").write_text(SCRIPT) if not (folder / "train.py").exists() else None
    return run_dsrun(
        *("-n", "2", "--backend", "gloo", "--log-dir", "logs"),
        *words,
        *("train.py", "--config", "ds.json"),
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1"),
        timeout_s=100,
    )


def test_ranks_train_with_the_sizes_that_the_launch_has_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tensor_parallel": {"autotp_size": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    named = run(tmp_path, "--model", "config.json")
    assert named.exit_code == 0, named.stderr
    (size,) = re.findall(r'^dsrun: `tensor_parallel.autotp_size` "auto" is (\d) ', named.stderr, re.MULTILINE)
    assert size == "2", "eight tokens a layer are fewer bytes than its gradients"
    told = re.findall(r"told (\d) (\d) (\S+)", named.stdout)
    assert [one[:2] for one in told] == [("2", "1")] * 2
    again = run(tmp_path)
    assert again.exit_code == 0, again.stderr
    assert "speeds are not known here" in again.stderr
    assert re.findall(r"told (\d) (\d) (\S+)", again.stdout) == told, "its last run says what the model is"
