"""Layers draw the same numbers wherever they are, whatever ran before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsrun.config.sections.activation import ActivationCheckpointing
from dsrun.runtime.activation.activate import activate
from dsrun.runtime.activation.recompute.rng import RngTracker
from dsrun.runtime.parallel.pipeline.seeds import LayerSeeds
from support.core_speed import core_seconds

WIDTH = 64


class Block(nn.Module):
    """A residual layer with dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Dropout(0.3)
        self.second = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.layer(self.first(x))))


def blocks_of(count: int = 4) -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def seeds_of(blocks: Sequence[nn.Module], first: int = 0, *, seed: int = 5, data_rank: int = 0) -> LayerSeeds:
    return LayerSeeds({block: first + n for n, block in enumerate(blocks)}, seed, data_rank=data_rank)


def run(blocks: Sequence[nn.Module], x: Tensor, *, recompute: bool = False) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    return x


def micros_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(count)]


@contextmanager
def nothing_drawn() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def switch_on_recomputation(blocks: Sequence[nn.Module]) -> None:
    """Has dsrun recompute every block."""
    section = ActivationCheckpointing.model_validate({"policy": "every_block"})
    model = nn.ModuleList(blocks)
    assert activate(model, section, skip=lambda _: False, script_chooses=False, tracker=RngTracker(), say=print)


def outputs_and_grads(*, recompute: bool = False) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns what one rank computes with all blocks, micro batch by micro batch."""
    blocks = blocks_of()
    seeds = seeds_of(blocks)
    outputs: list[Tensor] = []
    for number, micro in enumerate(micros_of(4)):
        with seeds.running(3, number):
            output = run(blocks, micro, recompute=recompute)
            output.square().sum().backward()
        outputs.append(output.detach())
    return outputs, [param.grad for block in blocks for param in block.parameters()]


@pytest.mark.parametrize("recomputed_by", ["nobody", "torch", "dsrun"])
def test_two_chunks_in_another_order_draw_what_one_does(recomputed_by: str) -> None:
    expected, expected_grads = outputs_and_grads()
    blocks = blocks_of()
    halves = blocks[:2], blocks[2:]
    recompute = recomputed_by == "torch"
    if recomputed_by == "dsrun":
        for half in halves:
            switch_on_recomputation(half)
    # A rank each: the second one knows nothing of the first one's blocks.
    first_seeds, second_seeds = seeds_of(halves[0]), seeds_of(halves[1], 2)
    micros = micros_of(4)
    sent: dict[int, Tensor] = {}
    received: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    with nothing_drawn():
        for number in (0, 1, 2, 3):
            with first_seeds.running(3, number):
                sent[number] = run(halves[0], micros[number], recompute=recompute)
        for number in (3, 1, 0, 2):
            received[number] = sent[number].detach().requires_grad_()
            with second_seeds.running(3, number):
                outputs[number] = run(halves[1], received[number], recompute=recompute)
        for number in range(4):
            with second_seeds.running(3, number):
                outputs[number].square().sum().backward()
            grad = received[number].grad
            assert grad is not None
            with first_seeds.running(3, number):
                sent[number].backward(grad)
    assert all(torch.equal(outputs[number].detach(), output) for number, output in enumerate(expected))
    found = [param.grad for block in blocks for param in block.parameters()]
    for mine, theirs in zip(found, expected_grads, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


def test_recomputation_changes_no_bits() -> None:
    plain, plain_grads = outputs_and_grads()
    again, again_grads = outputs_and_grads(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    for a, b in zip(plain_grads, again_grads, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "other",
    [{"update": 4}, {"micro": 1}, {"seed": 6}, {"data_rank": 1}, {"piece": 1}],
    ids=lambda other: next(iter(other)),
)
def test_each_coordinate_gives_other_numbers(other: dict[str, int]) -> None:
    def drawn(update: int = 3, micro: int = 0, seed: int = 5, data_rank: int = 0, piece: int = 0) -> Tensor:
        layer = nn.Dropout(0.5)
        seeds = LayerSeeds({layer: piece}, seed, data_rank=data_rank)
        with seeds.running(update, micro):
            return layer(torch.ones(1000))

    assert torch.equal(drawn(), drawn())
    same = (drawn() == drawn(**other)).float().mean().item()
    assert 0.4 < same < 0.6


def test_what_a_model_draws_between_layers_is_the_same_without_them() -> None:
    class Absent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def drawn_between(first: nn.Module) -> list[Tensor]:
        second = nn.Dropout(0.5)
        seeds = LayerSeeds({first: 0, second: 1}, 5, data_rank=0)
        with seeds.running(0, 0):
            found = [torch.rand(4)]
            first(torch.ones(100))
            found.append(torch.rand(4))
            second(torch.ones(100))
            return [*found, torch.rand(4)]

    drawn, without = drawn_between(nn.Dropout(0.5)), drawn_between(Absent())
    assert all(torch.equal(a, b) for a, b in zip(drawn, without, strict=True))
    assert not torch.equal(drawn[0], drawn[1])


def test_outside_layers_draw_from_the_script_s_generator() -> None:
    blocks = blocks_of(1)
    seeds = seeds_of(blocks)
    (x,) = micros_of(1)
    with seeds.running(0, 0):
        inside = blocks[0](x)
    torch.manual_seed(11)
    first = blocks[0](x)
    torch.manual_seed(11)
    assert torch.equal(blocks[0](x), first)
    assert not torch.equal(inside, first)
    seeds.remove()
    assert not blocks[0]._forward_pre_hooks
    assert not blocks[0]._forward_hooks


def test_the_script_s_numbers_go_on_after_a_forward_that_raises() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise ValueError("of the model")

    layer = Fails()
    seeds = LayerSeeds({layer: 0}, 5, data_rank=0)
    with nothing_drawn(), pytest.raises(ValueError, match="of the model"), seeds.running(0, 0):
        layer(torch.ones(1))
    with nothing_drawn():
        torch.ones(1)


@pytest.mark.depends_on_speed("15 us of a core")
def test_a_layer_costs_at_most_15_us_of_processor_time() -> None:
    layers = [nn.Identity() for _ in range(200)]
    x = torch.ones(1)

    def run() -> None:
        for layer in layers:
            layer(x)

    bare = core_seconds(run, tries=10)
    seeds = LayerSeeds({layer: n for n, layer in enumerate(layers)}, 5, data_rank=0)
    with seeds.running(0, 0):
        seeded = core_seconds(run, tries=10)
    assert (seeded - bare) / len(layers) < 15e-6
