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
#: Of a parameter in fp32 with AdamW: it, its gradient, two states.
STATE_BYTES = 16
TOLD = r"told (\d) (\d)"
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
print("told", engine.autotp_size(), engine.dp_world_size)
"""


def run(folder: Path, *words: str) -> Result:
    return run_dsrun(
        *("-n", "2", "--backend", "gloo", "--log-dir", "logs"),
        *words,
        *("train.py", "--config", "ds.json"),
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1"),
        timeout_s=100,
    )


@pytest.mark.timeout(600)
def test_ranks_train_with_the_sizes_that_the_launch_has_planned(tmp_path: Path) -> None:
    """Of a model whose states fit here once and not twice, two ranks share the layers; the script's own fits twice."""
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tensor_parallel": {"autotp_size": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    here = json.loads(run_dsrun("probe", "--json", cwd=tmp_path, env=clean_environment()).stdout)["memory"]
    fits_once = int(0.6 * (here["usable_bytes"] + (here["swap_free_bytes"] or 0)) / STATE_BYTES)
    named = run(tmp_path, "--model", f"{fits_once // 1_000_000}M")
    assert named.exit_code == 0, named.stderr
    assert '`tensor_parallel.autotp_size` "auto" is 2 (of 1, 2): ' in named.stderr
    assert re.findall(TOLD, named.stdout) == [("2", "1")] * 2
    again = run(tmp_path)
    assert again.exit_code == 0, again.stderr
    assert (
        '"auto" is 1 (of 1, 2): the smallest of those that fit, for speeds are not known here, for LlamaForCausalLM'
        in again.stderr
    )
    assert re.findall(TOLD, again.stdout) == [("1", "2")] * 2
