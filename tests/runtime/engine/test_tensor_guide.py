"""What docs/guides/tensor.md shows does what it says: the rules, and the model that they are for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.errors import ModelError
from support.llama import VOCAB, Ended, on_threads

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "tensor.md"
WIDTH, HEADS = 24, 4


def rules() -> dict[str, Any]:
    """Returns the section of the config that the guide writes out with rules in it."""
    blocks = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "layer_specs" in block)
    section: dict[str, Any] = json.loads("{" + block + "}")["tensor_parallel"]
    assert section.pop("autotp_size") == 2
    return section


class Attention(nn.Module):
    """Queries, keys and values in one weight, side by side; heads are counted by the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of that attention, with an MLP of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norms[0](x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norms[1](x_BTD))))


class Model(nn.Module):
    """A language model of these blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def model() -> nn.Module:
    torch.manual_seed(5)
    return Model()


def test_the_rules_of_the_guide_cut_the_model_that_they_are_for() -> None:
    (expected,) = on_threads(1, 1, make=model)
    for found in on_threads(2, 2, make=model, tensor_parallel=rules()):
        assert_near(found, expected)


def test_rules_without_the_shape_are_refused_and_the_hint_names_it() -> None:
    section = rules()
    del section["partition_config"]["layer_specs"][0]["shape"]
    with pytest.raises(ModelError) as caught:
        on_threads(2, 2, make=model, tensor_parallel=section)
    message = caught.value.render()
    assert "`blocks.0` (Block) does something else than whole" in message
    assert '"shape" for what stands side by side in one weight (queries, keys and values; none where' in message


def assert_near(found: Ended, expected: Ended) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-6)


def test_the_rules_of_a_hint_cut_the_model_that_they_are_for() -> None:
    nothing = {"partition_config": {"layer_specs": [{"patterns": ["no_such_layer"], "partition_type": "column"}]}}
    with pytest.raises(ModelError) as caught:
        on_threads(2, 2, make=model, tensor_parallel=nothing)
    hint = caught.value.hint or ""
    section = json.loads("{" + hint[hint.index('"tensor_parallel"') :] + "}")["tensor_parallel"]
    assert section.pop("autotp_size") == 2
    (expected,) = on_threads(1, 1, make=model)
    for found in on_threads(2, 2, make=model, tensor_parallel=section):
        assert_near(found, expected)
