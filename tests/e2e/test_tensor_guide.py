"""docs/guides/tensor.md under the real launcher: its script trains on two ranks, a wrong plan ends as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.cli import Result, clean_environment, run_dsrun

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "tensor.md").read_text(encoding="utf-8")

#: What the guide's script takes for granted.
BEFORE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import dsrun

torch.manual_seed(3)
tokens = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)
"""
AFTER = """
print("loss", float(loss))
"""
#: Layers with names of a column and a row, between which each number depends on those before it.
WRONG = """
import torch
from torch import nn

import dsrun

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.fc2(self.fc1(x).cumsum(-1))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

engine, *_ = dsrun.initialize(model=Model())
engine.backward(engine(torch.ones(2, 3, 16)).square().mean())
"""


def run(folder: Path, script: str) -> Result:
    (folder / "train.py").write_text(script)
    (config, _) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    assert json.loads(config)["tensor_parallel"] == {"autotp_size": 2}
    (folder / "ds.json").write_text(config)
    words = ("-n", "2", "--backend", "gloo", "--log-dir", "logs", "train.py", "--config", "ds.json")
    return run_dsrun(*words, cwd=folder, env=clean_environment(OMP_NUM_THREADS="1"), timeout_s=100)


def test_the_script_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    done = run(tmp_path, "\n".join((BEFORE, script, AFTER)))
    assert done.exit_code == 0, done.stderr
    said = done.stdout + done.stderr
    assert "layers cut over 2 ranks" in said
    losses = re.findall(r"\[\d\] loss (\S+)", said)
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_a_wrong_plan_ends_with_the_error_of_the_guide(tmp_path: Path) -> None:
    done = run(tmp_path, WRONG)
    assert done.exit_code != 0
    (shown,) = re.findall(r"```\n(error: .*)\n```", GUIDE)
    begin, end = shown.split("(plan of ...)")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line.startswith(begin)
    assert re.sub(r"by \S+ of", "by 0.52 of", line.rpartition(")")[2]).startswith(end), line
