"""Reversible stacks: plain gradients to rounding, inputs made again within a bound, and memory without blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsrun.checkpointing import Reversible, ReversibleStack
from dsrun.errors import ModelError
from dsrun.zero import set_leaf_modules
from support.training import config, make_engine

WIDTH = 24


def make(layers: int, *, dropout: float = 0.0) -> ReversibleStack:
    torch.manual_seed(4)

    def part() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))

    return ReversibleStack([Reversible(part(), part()) for _ in range(layers)])


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x1, x2 = torch.randn(2, 6, WIDTH, generator=generator).to(dtype)
    return x1.requires_grad_(), x2.requires_grad_()


def gradients(stack: ReversibleStack, *, plain: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x1, x2 = inputs(dtype)
    torch.manual_seed(9)
    if plain:
        y1, y2 = x1, x2
        for block in stack.blocks:
            y1, y2 = block(y1, y2)
    else:
        y1, y2 = stack(x1, x2)
    (y1.sin() + y2.square()).sum().backward()
    found = [x1.grad, x2.grad, *(param.grad for param in stack.parameters())]
    stack.zero_grad()
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_of_plain_autograd_to_rounding(layers: int, dropout: float) -> None:
    stack = make(layers, dropout=dropout)
    for found, expected in zip(gradients(stack, plain=False), gradients(stack, plain=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_in_fp64_they_agree_to_twelve_digits() -> None:
    stack = make(8).double()
    pairs = zip(
        gradients(stack, plain=False, dtype=torch.float64),
        gradients(stack, plain=True, dtype=torch.float64),
        strict=True,
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_input_comes_back_within_the_bound_of_its_two_sums() -> None:
    u = 2.0**-24
    (block,) = make(1).blocks
    assert isinstance(block, Reversible)
    with torch.no_grad():
        x1, x2 = inputs()
        y1, y2 = block(x1, x2)
        back1, back2 = block.invert(y1, y2)
        error2 = (back2 - x2).abs()
        assert bool((error2 <= u * (y2.abs() + back2.abs()) + 1e-12).all())
        # F is Lipschitz: what an error of x2 does to it, measured.
        carried = (block.f(back2) - block.f(x2)).abs()
        assert bool(((back1 - x1).abs() <= u * (y1.abs() + back1.abs()) + carried + 1e-12).all())


def test_what_is_kept_does_not_grow_with_the_blocks() -> None:
    def kept(layers: int) -> int:
        stack = make(layers)
        ids = {param.data_ptr() for param in stack.parameters()}
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += 0 if tensor.data_ptr() in ids else tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            stack(*inputs())
        return total

    assert kept(2) == kept(12) == 2 * 6 * WIDTH * 4


def test_a_stack_of_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="there are no blocks"):
        ReversibleStack([])


class Model(nn.Module):
    """A reversible stack between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 2 * WIDTH)
        self.stack = make(3)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.inp(x).chunk(2, dim=-1)
        return torch.cat(self.stack(x1, x2), dim=-1)


def test_every_stage_trains_it_alike_where_the_stack_is_a_leaf() -> None:
    losses: list[list[float]] = []
    for stage in (0, 2, 3):
        torch.manual_seed(2)
        model = Model()
        set_leaf_modules(model, [ReversibleStack])
        engine = make_engine(config(stage, micro=6), model=model)
        found: list[float] = []
        for seed in range(3):
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        losses.append(found)
    assert losses[0] == losses[1] == losses[2]
