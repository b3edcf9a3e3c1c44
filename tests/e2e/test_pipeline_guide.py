"""docs/guides/pipeline.md: its scripts run on two ranks, its picture and its figures are those of dsrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsrun.pipeline_schedules.formulas import live_micro_batches
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.simulate import equal_costs, simulate
from support.cli import clean_environment, run_dsrun

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = (GUIDES / "pipeline.md").read_text(encoding="utf-8")
(CONFIG,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)

#: What the guide's scripts take for granted.
BEFORE = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import dsrun

torch.manual_seed(3)
tokens = torch.randint(0, 64, (40, 9), generator=torch.Generator().manual_seed(1))
pairs = [(row[:-1], row[1:]) for row in tokens]
rows = [{"input_ids": row, "labels": row} for row in tokens]
steps = 2
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

model = Model()
"""
AFTER = """
print("loss", float(loss), "outputs", None if outputs is None else len(outputs))
engine.destroy()
"""


def test_the_scripts_run_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test-zoo]'")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 4, "a plain model, one of Hugging Face's, a list of layers, an evaluation"
    (tmp_path / "train.py").write_text("\n".join((BEFORE, *blocks, AFTER)))
    (tmp_path / "ds.json").write_text(CONFIG)
    words = ("-n", "2", "--backend", "gloo", "--log-dir", "logs", "train.py", "--config", "ds.json")
    done = run_dsrun(*words, cwd=tmp_path, env=clean_environment(OMP_NUM_THREADS="1"), timeout_s=100)
    assert done.exit_code == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("dsrun: pipeline of 2 stages") == 3
    losses = dict(re.findall(r"\[(\d)\] loss (\S+) outputs", said))
    assert losses["0"] == losses["1"]
    assert "[0] loss " + losses["0"] + " outputs None" in said
    assert "[1] loss " + losses["1"] + " outputs 4" in said


def test_the_picture_is_that_of_dsrun_plan(tmp_path: Path) -> None:
    config = json.loads(CONFIG)
    config["pipeline"]["stages"] = 4
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (words,) = re.findall(r"`dsrun (plan .*?)`:\n", GUIDE)
    done = run_dsrun(*words.split(), cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "1f1b.svg").read_text() == (GUIDES / "pipeline-1f1b.svg").read_text()


@pytest.mark.parametrize(
    ("row", "name", "chunks"),
    [
        ("| `1f1b` (default) |", "1f1b", [1]),
        ("| `interleaved`, `virtual_stages` 2 / 4 |", "interleaved", [2, 4]),
        ("| `zero_bubble` |", "zero_bubble", [1]),
        ("| `zbv` (two chunks a rank) |", "zbv", [2]),
        ("| `breadth_first`, `virtual_stages` 2 |", "breadth_first", [2]),
        ("| `gpipe` |", "gpipe", [1]),
    ],
)
def test_the_table_of_schedules_has_their_figures(row: str, name: ScheduleName, chunks: list[int]) -> None:
    (line,) = (line for line in GUIDE.splitlines() if line.startswith(row))
    waits, kept = (cell.strip() for cell in line.split("|")[2:4])
    shares = [
        simulate(make_schedule(name, ranks=4, micros=8, virtual=each), equal_costs(4 * each)).bubble_share
        for each in chunks
    ]
    assert waits == " / ".join(f"{100 * share:.1f}" for share in shares) + " %"
    live = [live_micro_batches(name, ranks=4, micros=8, virtual=each) for each in chunks]
    assert kept == " / ".join(f"{number:.1f}".removesuffix(".0") for number in live)
