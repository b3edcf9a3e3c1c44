"""What a comparison leaves as it was, and what is compared only when it is called."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW
from support.compared_blocks import RIGHT, Block, Stack, X, checked, of_all_blocks, refusal


class Bad(nn.Module):
    """A norm of all that a column has cut, where it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *, bad: bool = True) -> Tensor:
        y = self.up(x)
        return self.down(F.layer_norm(y, y.shape[-1:]) if bad else y.sin())


@pytest.mark.parametrize("kind", ["list", "tensor", "dict", "object"])
def test_what_blocks_keep_in_attributes_is_as_without_a_comparison(kind: str) -> None:
    class Keeping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.mean = torch.zeros(())
            self.counts = {"calls": 0}
            self.state = types.SimpleNamespace(calls=0)

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y = super().forward(x)
            match kind:
                case "list":  # as auxiliary losses of mixtures are kept, with their graphs
                    self.seen.append(y.square().mean())
                    self.last = self.seen[-1]
                    y = y * len(self.seen)
                case "tensor":
                    y = y + self.mean.mul_(0.9).add_(y.detach().mean())
                case "dict":
                    self.counts["calls"] += 1
                    y = y * self.counts["calls"]
                case _:
                    self.state.calls += 1
                    y = y * self.state.calls
            return y

    def call(mine: Any) -> tuple[Tensor, Tensor]:
        y = mine(X)
        loss = y.square().mean() + sum(one for block in mine.blocks for one in block.seen)
        loss.backward()
        return y.detach(), mine.blocks[0].norm.weight.grad

    model = Stack(Keeping)
    expected = call(copy.deepcopy(model))
    for found, said, mine in checked(model, RIGHT, 2, call):
        assert said == []
        torch.testing.assert_close(found, expected)
        assert all(block.counts["calls"] == (kind == "dict") for block in mine.blocks)


def test_a_branch_that_comes_later_is_compared_when_it_comes() -> None:
    class Branching(Block):
        def __init__(self) -> None:
            super().__init__()
            self.extra = Bad()

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            y = super().forward(x)
            return y + self.extra(x, bad=more[0] == "bad") if more else y

    styles = {"up": COLUMN, "down": ROW, "extra.up": COLUMN, "extra.down": ROW}
    model = Stack(Branching)
    for found, said, mine in checked(model, of_all_blocks(styles), 2, lambda one: [one(X), one(X, "good"), one(X)]):
        assert said == []
        torch.testing.assert_close(found, [model(X), model(X, "good"), model(X)])
        assert not any(part._forward_pre_hooks for part in mine.modules())
        assert all("_dsrun_tensor_comparison" not in vars(part) for part in mine.modules())

    def call(mine: nn.Module) -> None:
        mine(X)
        mine(X)
        mine(X, "bad")

    assert "`blocks.0.extra` (Bad)" in refusal(model, of_all_blocks(styles), 2, call)


def test_an_expert_without_tokens_is_compared_when_it_gets_some() -> None:
    """The block around runs it in its own loop, so the expert alone has no column and no row of its own."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
            self.down = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))

        def forward(self, x: Tensor, *more: Any) -> Tensor:
            number = more[0] if more else 0
            y = self.up[number](x)
            return x + self.down[number](F.layer_norm(y, y.shape[-1:]) if number else y.sin())

    styles = {f"{name}.{number}": style for name, style in (("up", COLUMN), ("down", ROW)) for number in range(2)}
    for found, said, _ in checked(Stack(Loop), of_all_blocks(styles), 2, lambda mine: mine(X)):
        assert said == []
        assert found.isfinite().all()

    def call(mine: nn.Module) -> None:
        mine(X)
        mine(X, 1)

    assert "`blocks.0` (Loop)" in refusal(Stack(Loop), of_all_blocks(styles), 2, call)
