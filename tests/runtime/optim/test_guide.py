"""The bytes of docs/guides/optimizers.md are those of real states, and config, plan and runtime agree on them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsrun.config.load import load
from dsrun.config.sections.optimizer import OPTIMIZERS
from dsrun.config.sections.scheduler import SCHEDULERS
from dsrun.estimate.run.settings import read_settings
from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.registry import factory_of, states_per_element
from dsrun.runtime.optim.sharded import ShardOptimizer
from dsrun.runtime.protocols import OwnedRange

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "optimizers.md").read_text()
#: Large enough that rows, columns and blocks are small beside it.
MATRIX = ("layer.weight", (512, 1024))
#: Bytes of state a parameter of a matrix; of Muon's and Adafactor's likewise.
BYTES: dict[str, float] = {
    "Adam": 8,
    "AdamW": 8,
    "SGD": 0,
    "Adagrad": 4,
    "Lamb": 8,
    "Lion": 4,
    "Muon": 4,
    "Adafactor": 4 * (512 + 1024) / (512 * 1024),
    "AdamMini": 4 + 4 / 1024,
    "Adam8bit": 2 + 2 * 4 / 256,
    "AdamW8bit": 2 + 2 * 4 / 256,
    "Lion8bit": 1 + 4 / 256,
    "RMSprop": 4,
    "Adadelta": 8,
    "Adamax": 8,
    "NAdam": 8,
    "RAdam": 8,
}


def stepped(name: str, tensors: list[tuple[str, tuple[int, ...]]], **params: Any) -> ShardOptimizer:
    layout = lay_out("unit", tensors, world_size=1)
    owned = OwnedRange(layout, 0, torch.ones(layout.padded_numel), torch.ones(layout.padded_numel), (0,) * len(tensors))
    shards = ShardOptimizer([owned], group_count=1)
    section = OPTIMIZERS.models[name].model_validate(params)
    shards.drive(factory_of(name, section.model_dump())([{"params": shards.shards_by_group()[0]}]))
    shards.step()
    return shards


def state_bytes(shards: ShardOptimizer) -> int:
    """What its states take, without counts of steps and the buffers of Muon."""
    return sum(t.nbytes for t in shards.tensors() if t.ndim and t.dtype != torch.bfloat16)


@pytest.mark.parametrize("name", BYTES)
def test_states_take_the_bytes_that_are_documented(name: str) -> None:
    shards = stepped(name, [MATRIX])
    assert state_bytes(shards) / torch.Size(MATRIX[1]).numel() == BYTES[name]
    assert states_per_element(shards.torch_optimizer) * 4 == BYTES[name]


@pytest.mark.parametrize("name", BYTES)
def test_the_plan_counts_the_same(name: str) -> None:
    config = load({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name}})
    assert read_settings(config, ranks=1).states_per_element * 4 == pytest.approx(BYTES[name], abs=0.012)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("SGD", {"momentum": 0.9}, 4),
        ("Adam", {"amsgrad": True}, 12),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 12),
    ],
)
def test_options_cost_the_states_that_are_documented(name: str, params: dict[str, Any], expected: int) -> None:
    shards = stepped(name, [MATRIX], **params)
    assert state_bytes(shards) / torch.Size(MATRIX[1]).numel() == expected
    config = load({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": params}})
    assert read_settings(config, ranks=1).states_per_element * 4 == expected


def test_what_is_no_matrix_and_what_is_small_keeps_more() -> None:
    embedding = [("embed.weight", (64, 64))]
    for name, tensors, expected in (
        ("Muon", embedding, 8),
        ("Adafactor", [("norm.weight", (4096,))], 4),
        ("Adam8bit", [("norm.weight", (4032,))], 8),
        ("Adam8bit", embedding, BYTES["Adam8bit"]),
    ):
        shards = stepped(name, tensors)
        assert state_bytes(shards) / torch.Size(tensors[0][1]).numel() == expected
        assert states_per_element(shards.torch_optimizer) * 4 == expected


def test_8_bit_adam_keeps_at_most_2_1_bytes_a_pair() -> None:
    assert BYTES["Adam8bit"] <= 2.1


def test_the_guide_names_every_type_with_its_bytes() -> None:
    rows = [line for line in GUIDE.splitlines() if line.startswith("| `")]
    named = {name for row in rows for cell in row.split("|")[1:3] for name in re.findall(r"`(\w+)`", cell)}
    assert set(OPTIMIZERS.models) | set(SCHEDULERS.models) <= named
    for row in rows:
        names = re.findall(r"`(\w+)`", row.split("|")[1])
        if names[0] in BYTES and names[0] not in ("Adafactor",):
            assert re.match(rf" {BYTES[names[0]]:.3g} bytes", row.split("|")[3]), row
