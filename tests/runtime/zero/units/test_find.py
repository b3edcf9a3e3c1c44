"""Units are found from the module tree alone, and hold every trainable parameter once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dsrun.checkpoint_files.index.region import Region, TensorBoxes
from dsrun.errors import ModelError
from dsrun.runtime.layout.cuts import CutParameter, Cuts, RankPlacement
from dsrun.runtime.zero.units.find import REST, UnitSpec, find_frozen_units, find_units
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


class Other(Block):
    """A block of another class, of the same size."""


def mixed(*classes: type[Block], width: int = 32) -> nn.ModuleList:
    return nn.ModuleList(cls(width, 2) for cls in classes)


def hybrid(block: nn.Module) -> nn.Module:
    """A layer around a block that others use too, as in Zamba."""
    return Sub(shared=block, linear=nn.Linear(WIDE, WIDE), own=Other(32, 2))


def shared_parts() -> nn.Module:
    block = Block(32, 2)
    return Sub(layers=nn.ModuleList([Other(32, 2), hybrid(block), Other(32, 2), hybrid(block)]))


def tied_parts() -> nn.Module:
    """The same, by parameters: each layer has a block of its own around them."""
    model = Sub(layers=nn.ModuleList([Other(32, 2), hybrid(Block(32, 2)), Other(32, 2), hybrid(Block(32, 2))]))
    first, second = model.get_submodule("layers.1.shared"), model.get_submodule("layers.3.shared")
    for name, param in list(first.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(second.get_submodule(owner), last, param)
    return model


def shared_over_lists() -> nn.Module:
    block = Block(32, 2)
    return Sub(first=nn.ModuleList([block, Block(32, 2)]), second=nn.ModuleList([Block(32, 2), block]))


_HYBRID = ["layers.0", "layers.1.shared", "layers.1.linear", "layers.1.own", "layers.2"]

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
    "blocks of several classes": (
        lambda: Sub(layers=mixed(Block, Other, Block, Other)),
        ["layers.0", "layers.1", "layers.2", "layers.3"],
    ),
    "blocks beside a layer": (
        lambda: Sub(layers=nn.ModuleList([Block(32, 2), nn.Linear(WIDE, WIDE), Other(32, 2), nn.LayerNorm(8)])),
        ["layers.0", "layers.1", "layers.2", REST],
    ),
    "lists beside blocks": (
        lambda: Sub(parts=nn.ModuleList([Block(32, 2), blocks(2), Other(32, 2)])),
        ["parts.0", "parts.1.0", "parts.1.1", "parts.2"],
    ),
    "trifles of several classes": (lambda: Sub(parts=mixed(Block, Other, width=8)), [REST]),
    "most of a list is a model": (
        lambda: Sub(parts=nn.ModuleList([Sub(layers=mixed(Block, Block, Block)), Other(32, 2)])),
        ["parts.0.layers.0", "parts.0.layers.1", "parts.0.layers.2", "parts.1"],
    ),
    "a pipeline": (
        lambda: nn.Sequential(Sub(embed=nn.Embedding(100, WIDE)), Sub(layers=blocks(3)), Other(32, 2), nn.Tanh()),
        ["0", "1.layers.0", "1.layers.1", "1.layers.2", "2"],
    ),
    "a shared part": (shared_parts, [*_HYBRID, "layers.3.linear", "layers.3.own"]),
    "tied parts": (tied_parts, [*_HYBRID, "layers.3.linear", "layers.3.own"]),
    "a block in two lists": (shared_over_lists, ["first.0", "first.1", "second.0"]),
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


TENSOR = RankPlacement(cut_over=("tensor",))


def cut_rows(model: nn.Module, first: float, last: float, *names: str) -> Cuts:
    """Leaves the parameters whose names end so the rows from one share of them to another one."""
    cuts: dict[int, CutParameter] = {}
    for name, param in model.named_parameters():
        if name.endswith(names):
            start, stop = round(first * param.shape[0]), round(last * param.shape[0])
            box = Region((start, *(0 for _ in param.shape[1:])), (stop - start, *param.shape[1:]))
            cuts[id(param)] = CutParameter(TENSOR, TensorBoxes(tuple(param.shape), (box,)))
            param.data = param.detach()[start:stop].clone()
    return cuts


def on_ranks(make: Callable[[], nn.Module], shares: list[float], *names: str) -> list[list[UnitSpec]]:
    """Returns the units that each rank finds, which has the rows from one share to the next."""
    found: list[list[UnitSpec]] = []
    for first, last in zip([0.0, *shares], [*shares, 1.0], strict=True):
        model = make()
        found.append(find_units(model, cuts=cut_rows(model, first, last, *names)))
    return found


def names_in(units: list[UnitSpec]) -> list[tuple[str, RankPlacement, list[str]]]:
    return [(unit.name, unit.placement, [name for name, _ in unit.params]) for unit in units]


@pytest.mark.parametrize("shares", [[0.5], [0.125], [0.125, 0.25, 0.875]])
def test_a_block_that_is_cut_in_part_is_one_unit_and_its_norm_in_the_rest(shares: list[float]) -> None:
    cut = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    ranks = on_ranks(lambda: Sub(blocks=blocks(2)), shares, *cut)
    weights = {name for name, _ in Sub(blocks=blocks(2)).named_parameters() if name.endswith(cut)}
    others = {name for name, _ in Sub(blocks=blocks(2)).named_parameters()} - weights
    assert any("norm" in name for name in others)
    for units in ranks:
        assert names_in(units) == names_in(ranks[0]), "every rank finds the same, whatever part it has"
        first, second, rest = units
        assert (first.name, second.name, rest.name) == ("blocks.0", "blocks.1", REST)
        assert first.placement == second.placement == TENSOR
        assert {name for unit in (first, second) for name, _ in unit.params} == weights
        assert {name for name, _ in rest.params} == others
        assert (rest.module, rest.boxes, rest.placement.cut_over) == (None, {}, ())
        assert {*first.boxes, *second.boxes} == weights


def mostly_norms() -> nn.Module:
    """A stack of blocks in which the weights have more elements than the norms, but not on a rank with few of them."""
    return Sub(blocks=nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(12)) for _ in range(2)))


@pytest.mark.parametrize("shares", [[0.5], [0.125], [0.875]])
def test_what_most_of_a_block_is_goes_by_whole_parameters(shares: list[float]) -> None:
    ranks = on_ranks(mostly_norms, shares, "0.weight")
    for units in ranks:
        assert names_in(units) == names_in(ranks[0])
        assert [unit.placement for unit in units[:2]] == [TENSOR] * 2


@pytest.mark.parametrize("shares", [[0.5], [0.25], [0.75]])
def test_what_is_large_enough_for_a_unit_goes_by_whole_parameters(shares: list[float]) -> None:
    ranks = on_ranks(lambda: Sub(head=nn.Linear(64, 80, bias=False), norm=nn.LayerNorm(8)), shares, "head.weight")
    for units in ranks:
        assert [unit.name for unit in units] == ["head", REST]


def test_a_frozen_part_is_as_large_as_the_whole() -> None:
    for last in (0.1, 0.9):
        model = Sub(head=nn.Linear(64, 80))
        cuts = cut_rows(model, 0.0, last, "head.weight")
        model.get_parameter("head.bias").requires_grad_(False)
        assert [unit.name for unit in find_units(model, cuts=cuts)] == ["head"]
        assert [unit.name for unit in find_frozen_units(model, cuts=cuts)] == ["head"]


def test_frozen_parameters_that_are_cut_are_refused_and_all_named() -> None:
    model = Sub(blocks=blocks(2))
    cuts = cut_rows(model, 0.0, 0.5, "up.weight")
    find_units(model, cuts=cuts)
    model.requires_grad_(False)
    with pytest.raises(ModelError) as raised:
        find_units(model, cuts=cuts)
    assert [problem.message for problem in raised.value.problems] == [
        f"model: `blocks.{number}.up.weight` is cut over tensor, and frozen" for number in range(2)
    ]


def test_rest_units_of_pieces_do_not_depend_on_how_many_pieces_a_rank_has() -> None:
    def found(names: tuple[str, ...]) -> dict[str, list[str]]:
        model = nn.ModuleDict({name: nn.LayerNorm(4) for name in names})
        shared = nn.Parameter(torch.zeros(4))
        model.register_parameter(f"use_{names[-1]}", shared)
        cuts = {id(shared): CutParameter(RankPlacement(stages=() if len(names) == 2 else (0, 1)), name="use_a")}
        units = find_units(model, cuts=cuts, piece_of=lambda name: name[0])
        return {unit.name.removesuffix(" of stages 0 and 1"): [name for name, _ in unit.params] for unit in units}

    whole = found(("a", "b"))
    assert whole == {**found(("a",)), **found(("b",))}
    assert [*whole] == ["rest of a", "rest of b", "rest `use_a`"]
