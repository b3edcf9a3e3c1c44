"""What a block is does not depend on how a model is cut: stages, and classes that tensor ranks put before blocks.

A stage has some blocks of a stack, whose class tensor ranks have put one of their own before, and places of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.inside_engine import units_of
from support.layouts import BLOCKS, Layout, Trained, counting_llama, on_layout, train, trained_with_seeds
from support.llama import VOCAB, Layer, Mlp, TinyLlama
from support.ranks import run_ranks

WIDTH = 32


class Part(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), Mlp(WIDTH, 96, bias=True), nn.Dropout(chance)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Block(nn.Module):
    """A block that has a stack of its own, as one of experts has."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(chance)
        self.parts = nn.ModuleList(Part(chance) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(x))
        for part in self.parts:
            y = part(y)
        return x + y


class Nested(nn.Module):
    """Blocks with stacks, in a Sequential: where these are of several classes, it is looked into the blocks."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(Block(chance) for _ in range(BLOCKS)))
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.lm_head(self.layers(self.embed_tokens(tokens_BT)))


def _nested(layout: Layout) -> Trained:
    model = Nested(0.2)
    torch.manual_seed(13)
    return trained_with_seeds(model, layout)


def test_blocks_that_have_stacks_draw_the_same_in_any_stages_of_cut_layers() -> None:
    one = run_ranks(2, _nested, Layout(tensor=2))
    assert run_ranks(4, _nested, Layout(tensor=2, pipe=2, stage=1)) == [one[0]] * 4


def test_blocks_that_have_stacks_are_units_in_any_stages_of_cut_layers() -> None:
    def names(engine: Any) -> set[str]:
        return {unit.name for unit in units_of(engine)}

    whole = on_layout(Layout(tensor=2, stage=3), names, Nested)[0]
    assert "layers.0" in whole
    cut = Layout(tensor=2, pipe=2, stage=3, virtual=2, schedule="breadth_first")
    assert set().union(*on_layout(cut, names, Nested)) == whole


def test_small_parts_of_blocks_are_recomputed_in_stages_as_in_one() -> None:
    """Of a quarter of these blocks a rank has fewer parameters than what is left alone where nothing repeats it."""
    section = {"activation_checkpointing": {"policy": "every_block"}}

    def body(engine: Any) -> Trained:
        return train(engine, layout, range(2))

    layout = Layout(tensor=4).having(**section)
    expected = on_layout(layout, body, counting_llama)[0]
    layout = Layout(tensor=4, pipe=2).having(**section)
    assert on_layout(layout, body, counting_llama) == [expected] * 8


class OtherLayer(Layer):
    """Of another class, so that a stack counts as mixed, in which small parts are no blocks."""


def mixed_llama() -> TinyLlama:
    """Of 51 columns one rank has 26 and one 25: its blocks have more, and fewer, parameters than small ones."""
    torch.manual_seed(11)
    model = TinyLlama(width=32, inner=51, layers=0, bias=False)
    kinds = (Layer, OtherLayer)
    model.layers = nn.ModuleList(kinds[n % 2](32, 4, 2, 51, bias=False, dropout=0.0) for n in range(BLOCKS))
    return model


def test_ranks_with_unequal_parts_find_the_same_blocks() -> None:
    def names(engine: Any) -> list[str]:
        return [unit.name for unit in units_of(engine)]

    one, other = on_layout(Layout(tensor=2, stage=3), names, mixed_llama)
    assert one == other
    assert "layers.0" in one
