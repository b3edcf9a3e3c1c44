"""Which modules are blocks."""

from __future__ import annotations

from torch import nn

from dsrun.runtime.stacks import blocks_of, find_stacks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class Model(nn.Module):
    """Two towers, one of them below another module, and a list of bare layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"layers": blocks(3)})
        self.decoder = blocks(2)
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def nothing(module: nn.Module) -> bool:
    return False


def test_stacks_are_found_in_order_of_registration_with_qualified_names() -> None:
    model = Model()
    encoder, decoder = find_stacks(model, skip=nothing)
    assert (encoder.name, [name for name, _ in encoder.blocks]) == (
        "encoder.layers",
        ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"],
    )
    assert [module for _, module in decoder.blocks] == list(model.decoder)


def test_what_is_skipped_is_not_looked_into() -> None:
    model = Model()
    assert [stack.name for stack in find_stacks(model, skip=lambda module: module is model.encoder)] == ["decoder"]


def is_stack(module: nn.Module) -> bool:
    return [block for _, block in blocks_of(module)] == list(module.children())


class Large(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)


class Other(Large):
    pass


def test_one_block_bare_layers_and_lists_of_lists_are_no_stack() -> None:
    assert is_stack(blocks(2))
    assert not blocks_of(blocks(1))
    assert not blocks_of(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)))
    assert not blocks_of(nn.ModuleList([blocks(2), blocks(2)]))
    assert not blocks_of(Block())


def test_blocks_of_several_classes_are_one_stack_without_what_is_small_or_bare() -> None:
    for container in (nn.ModuleList, nn.Sequential):
        assert is_stack(container([Large(), Other()]) if container is nn.ModuleList else container(Large(), Other()))
    mixed = nn.ModuleList([Large(), nn.Linear(64, 64), Other(), Block(), blocks(2), nn.ReLU()])
    assert [name for name, _ in blocks_of(mixed)] == ["0", "2"]
    assert [[name for name, _ in stack.blocks] for stack in find_stacks(mixed, skip=nothing)] == [
        ["0", "2"],
        ["4.0", "4.1"],
    ]


def test_a_pipeline_and_a_model_beside_trifles_are_looked_into() -> None:
    """A plain convolutional network has no blocks: its layers are bare."""
    deep = nn.Sequential(Large(), Large())
    assert [name for name, _ in blocks_of(nn.Sequential(nn.Conv2d(8, 8, 3), deep, Other(), nn.ReLU()))] == ["2"]
    assert [name for name, _ in blocks_of(nn.ModuleList([nn.ModuleDict({"layers": deep}), Other()]))] == ["1"]
    whole = Model()
    whole.decoder.extend(Large() for _ in range(3))
    assert [name for name, _ in blocks_of(nn.ModuleList([whole, Other()]))] == ["1"]
    assert not blocks_of(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)))


def test_a_model_that_is_a_stack_itself_has_blocks_with_short_names() -> None:
    (stack,) = find_stacks(nn.Sequential(Block(), Block()), skip=nothing)
    assert [name for name, _ in stack.blocks] == ["0", "1"]
