"""Which modules are blocks."""

from __future__ import annotations

from torch import nn

from dsrun.runtime.stacks import find_stacks, is_stack


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


def test_one_block_bare_layers_and_mixed_lists_are_no_stack() -> None:
    assert is_stack(blocks(2))
    assert not is_stack(blocks(1))
    assert not is_stack(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)))
    assert not is_stack(nn.ModuleList([Block(), nn.Linear(2, 2)]))
    assert not is_stack(nn.ModuleList([blocks(2), blocks(2)]))


def test_a_model_that_is_a_stack_itself_has_blocks_with_short_names() -> None:
    (stack,) = find_stacks(nn.Sequential(Block(), Block()), skip=nothing)
    assert [name for name, _ in stack.blocks] == ["0", "1"]
