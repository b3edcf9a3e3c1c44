"""Units are found from the module tree alone, and hold every trainable parameter once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dsrun.runtime.zero.units import REST, UnitSpec, find_units
from support.models import Block, TinyGPT

WIDE = 80


class Sub(nn.Module):
    """The class of a model around others; its forward does not matter here."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block(8, 2) for _ in range(count))


def like_huggingface() -> nn.Module:
    inner = Sub(embed_tokens=nn.Embedding(100, WIDE), layers=blocks(2), norm=nn.LayerNorm(WIDE))
    return Sub(model=inner, lm_head=nn.Linear(WIDE, 100, bias=False))


def tied() -> nn.Module:
    return TinyGPT(tied=True)


def shared_block() -> nn.Module:
    block = Block(8, 2)
    return Sub(blocks=nn.ModuleList([block, block, Block(8, 2)]))


def frozen_block() -> nn.Module:
    model = Sub(blocks=blocks(3))
    model.get_submodule("blocks.1").requires_grad_(False)
    return model


def weight_shared_between_blocks() -> nn.Module:
    model = Sub(blocks=blocks(2))
    model.blocks[1].qkv.weight = model.blocks[0].qkv.weight  # type: ignore[index, union-attr]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt": (
        lambda: TinyGPT(width=72),
        ["embed", "blocks.0", "blocks.1", "blocks.2", "head", REST],
    ),
    "tied": (tied, ["blocks.0", "blocks.1", "blocks.2", REST]),
    "huggingface": (like_huggingface, ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", REST]),
    "one linear": (lambda: nn.Linear(WIDE, WIDE), [REST]),
    "leaves in a row": (lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 3)), ["0", REST]),
    "a list of leaves": (
        lambda: Sub(parts=nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))),
        ["parts.0", "parts.1"],
    ),
    "the root is a stack": (lambda: nn.Sequential(Block(8, 2), Block(8, 2)), ["0", "1"]),
    "stages of blocks": (
        lambda: Sub(stages=nn.ModuleList([blocks(2), blocks(3)])),
        ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.1.2"],
    ),
    "a stack of one": (lambda: Sub(blocks=blocks(1)), [REST]),
    "two towers": (lambda: Sub(text=blocks(2), image=blocks(2)), ["text.0", "text.1", "image.0", "image.1"]),
    "shared block": (shared_block, ["blocks.0", "blocks.2"]),
    "frozen block": (frozen_block, ["blocks.0", "blocks.2"]),
    "weight shared between blocks": (weight_shared_between_blocks, ["blocks.0", "blocks.1", REST]),
    "attention": (lambda: Sub(attention=nn.MultiheadAttention(WIDE, 5)), ["attention"]),
}


@pytest.mark.parametrize("case", CASES)
def test_units_of_a_model(case: str) -> None:
    make, expected = CASES[case]
    model = make()
    units = find_units(model)
    assert [unit.name for unit in units] == expected
    found = [id(param) for unit in units for _, param in unit.params]
    trainable = [id(param) for param in model.parameters() if param.requires_grad]
    assert sorted(found) == sorted(trainable)
    names = dict(model.named_parameters())
    assert all(names[name] is param for unit in units for name, param in unit.params)


def rest_of(units: list[UnitSpec]) -> set[str]:
    return {name for unit in units if unit.name == REST for name, _ in unit.params}


def test_the_rest_holds_root_parameters_small_modules_and_ties() -> None:
    assert rest_of(find_units(TinyGPT(tied=True))) == {"embed.weight", "position", "norm.weight", "norm.bias"}
    assert rest_of(find_units(weight_shared_between_blocks())) == {"blocks.0.qkv.weight"}


def test_a_parameter_that_a_module_outside_holds_too_is_no_blocks_own() -> None:
    model = Sub(blocks=blocks(2))
    model.register_parameter("bias", model.blocks[0].norm_1.bias)  # type: ignore[index, union-attr, arg-type]
    assert rest_of(find_units(model)) == {"bias"}


def test_a_model_without_parameters_has_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.Dropout())) == []
    assert find_units(nn.Module()) == []


def test_modules_of_units_are_called_and_not_mere_containers() -> None:
    for make, _ in CASES.values():
        for unit in find_units(make()):
            assert not isinstance(unit.module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
    assert isinstance(find_units(tied())[0].module, Block)
    assert torch.is_tensor(find_units(tied())[-1].params[0][1])
