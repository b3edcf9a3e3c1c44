"""A tiled MLP: plain gradients, dropout drawn the same again, memory of one tile, and every stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsrun.errors import ModelError
from dsrun.long_sequence import TiledMLP, linear_cross_entropy, tiled
from support.allocations import allocations, peak_of
from support.ranks import run_ranks
from support.training import config, full_parameters, make_engine

WIDTH, INNER = 24, 75


class MLP(nn.Module):
    """With a gate, a bias and dropout."""

    def __init__(self, *, dropout: float = 0.0, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.gate = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


def make(*, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[MLP, Tensor]:
    torch.manual_seed(4)
    mlp = MLP(dropout=dropout).to(dtype)
    return mlp, torch.randn(2, 22, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def by_hand(module: nn.Module, x: Tensor, size: int) -> Tensor:
    """Tiles under plain autograd."""
    return torch.cat([module(tile) for tile in x.split(size, dim=-2)], dim=-2)


def gradients(run: Callable[[], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the input and of all parameters, after the same random draws."""
    torch.manual_seed(9)
    output = run()
    torch.manual_seed(123)  # backward must not depend on where the generators are by then
    wanted = [x, *(param for param in module.parameters() if param.requires_grad)]
    grads = torch.autograd.grad(output.sin().sum(), wanted)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(123).get_state()), "nothing is drawn in backward"
    return [output.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_one_tile_has_the_bits_of_the_module(dtype: torch.dtype, dropout: float) -> None:
    mlp, x = make(dropout=dropout, dtype=dtype)
    found = gradients(lambda: tiled(mlp, x, tile_size=22), mlp, x)
    for ours, theirs in zip(found, gradients(lambda: mlp(x), mlp, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 5, 11, 21, 100])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tiles_give_the_gradients_of_plain_autograd_through_the_same_tiles(size: int, dropout: float) -> None:
    mlp, x = make(dropout=dropout, dtype=torch.float64)
    found = gradients(lambda: tiled(mlp, x, tile_size=size), mlp, x)
    expected = gradients(lambda: by_hand(mlp, x, size), mlp, x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1]), "a position has nothing to do with the other tiles"
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_16_bit_gradients_are_added_up_in_fp32_and_rounded_once() -> None:
    mlp, x = make(dtype=torch.bfloat16)
    output = tiled(mlp, x, tile_size=1)
    (found,) = torch.autograd.grad(output.sum(), mlp.down.bias)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [44.0] * WIDTH, "one a position; every sum of ones is exact"
    layer = nn.Linear(WIDTH, 3, bias=False, dtype=torch.bfloat16)
    (weight,) = torch.autograd.grad(tiled(layer, x, tile_size=1).sum(), layer.weight)
    parts = x.detach().sum(0).double()  # over the samples of a tile, rounded as its product is
    assert torch.equal(weight, parts.sum(0).to(torch.bfloat16).expand(3, WIDTH))


def test_autocast_of_the_forward_is_that_of_the_backward() -> None:
    mlp, x = make()

    def run(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def inside() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call()

        return inside

    found = gradients(run(lambda: tiled(mlp, x, tile_size=22)), mlp, x)
    expected = gradients(run(lambda: mlp(x)), mlp, x)
    assert found[0].dtype == torch.bfloat16
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_with_all_around_it_nothing_changes(use_reentrant: bool) -> None:
    mlp, x = make(dropout=0.3)
    weight = torch.randn(31, WIDTH, generator=torch.Generator().manual_seed(6)).requires_grad_()
    targets = torch.arange(44).view(2, 22) % 31

    def loss_of(value: Tensor) -> Tensor:
        return linear_cross_entropy(tiled(mlp, value, tile_size=5), weight, targets, chunk_size=9, kernel="chunks")

    wanted = [x, weight, *mlp.parameters()]
    found: list[list[Tensor]] = []
    for call in (loss_of, lambda value: checkpoint(loss_of, value, use_reentrant=use_reentrant)):
        for tensor in wanted:
            tensor.grad = None
        torch.manual_seed(9)
        call(x).backward()
        found.append([tensor.grad for tensor in wanted if tensor.grad is not None])
    assert len(found[0]) == len(found[1]) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_frozen_or_unused_or_shared_is_treated_as_by_autograd() -> None:
    mlp, x = make(dtype=torch.float64)
    mlp.up.weight.requires_grad_(False)
    mlp.spare = nn.Linear(2, 2, dtype=torch.float64)
    mlp.gate.weight = nn.Parameter(mlp.up.weight.detach() * 2)
    mlp.again = mlp.down
    tiled(mlp, x, tile_size=7).sin().sum().backward()
    found = {name: param.grad for name, param in mlp.named_parameters()}
    mlp.zero_grad()
    mlp(x).sin().sum().backward()
    assert found["up.weight"] is None
    assert found["spare.weight"] is None
    for name, param in mlp.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-12)


def test_an_input_without_a_gradient_and_a_module_without_parameters() -> None:
    mlp, x = make()
    tiled(mlp, x.detach(), tile_size=7).sum().backward()
    assert mlp.up.weight.grad is not None
    (grad,) = torch.autograd.grad(tiled(nn.Tanh(), x, tile_size=7).sum(), x)
    torch.testing.assert_close(grad, 1 - torch.tanh(x).square())
    with torch.no_grad():
        assert torch.equal(tiled(mlp, x, tile_size=7), by_hand(mlp, x, 7))
    assert tiled(mlp, x[:, :0], tile_size=7).shape == (2, 0, WIDTH)


def test_the_module_form_and_the_default_size() -> None:
    mlp, x = make()
    wrapped = TiledMLP(mlp)
    assert torch.equal(wrapped(x), tiled(mlp, x, tile_size=WIDTH))
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in mlp.state_dict()]


def test_a_compiled_caller_gets_the_same() -> None:
    mlp, x = make()
    compiled = torch.compile(lambda value: tiled(mlp, value * 2, tile_size=7), backend="eager")
    assert torch.equal(compiled(x), tiled(mlp, x * 2, tile_size=7))


def test_mistakes_are_named() -> None:
    mlp, x = make()
    with pytest.raises(ModelError, match="tile_size is 0"):
        tiled(mlp, x, tile_size=0)
    with pytest.raises(ModelError, match="tile_size is -1"):
        TiledMLP(mlp, tile_size=-1)
    with pytest.raises(ModelError, match="the input has 1 dimensions"):
        tiled(mlp, x[0, 0], tile_size=2)
    with pytest.raises(ModelError, match=r"Flatten made \[2, 168\] of a tile \[2, 7, 24\]"):
        tiled(nn.Flatten(), x, tile_size=7)
    with pytest.raises(ModelError, match=r"GRU made tuple of a tile"):
        tiled(nn.GRU(WIDTH, 3), x, tile_size=7)


TOKENS, TILE, BIG = 512, 32, 256


def _peaks() -> list[tuple[int, int]]:
    """Peaks of forward and backward: plain, and by tiles."""
    torch.manual_seed(0)
    mlp = MLP(width=32, inner=BIG)
    for param in mlp.parameters():
        param.grad = torch.zeros_like(param)
    x = torch.randn(1, TOKENS, 32, requires_grad=True)
    x.grad = torch.zeros_like(x)
    grad = torch.ones_like(x)
    peaks: list[tuple[int, int]] = []
    for call in (mlp, lambda value: tiled(mlp, value, tile_size=TILE)):
        step: Any = lambda run=call: run(x).backward(grad)  # noqa: E731
        step()
        sizes = allocations(step)
        peaks.append((peak_of(sizes), max(sizes)))
    return peaks


def test_what_is_between_the_matrices_is_one_tile_large() -> None:
    (((plain, widest), (by_tiles, largest)),) = run_ranks(1, _peaks)
    inner, tile, states = TOKENS * BIG * 4, TILE * BIG * 4, TOKENS * 32 * 4
    params = (3 * 32 * BIG + BIG + 32) * 4
    assert widest == inner
    assert plain > 4 * inner, "both matrices, the gate's activation, and their product"
    # The output and the input's gradient whole, gradients of a tile and their sums, and at most eight states of a tile.
    assert by_tiles <= 2 * states + 2 * params + 8 * tile
    assert largest < inner / 4


class Block(nn.Module):
    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(dropout=0.2)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (self.mlp(h) if self.size is None else tiled(self.mlp, h, tile_size=self.size))


Form = Literal["in blocks", "wrapped", "bare"]


class Stack(nn.Module):
    """Blocks that tile their MLP; MLPs wrapped, each a unit with its tiles; or bare ones, of which a tile is a call."""

    def __init__(self, size: int | None, form: Form) -> None:
        super().__init__()
        made = {
            "in blocks": lambda: Block(size),
            "wrapped": lambda: TiledMLP(MLP(dropout=0.2), size),
            "bare": lambda: MLP(dropout=0.2),
        }
        self.blocks = nn.ModuleList(made[form]() for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.size, self.form = size, form

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + tiled(block, x, tile_size=self.size) if self.form == "bare" else block(x)
        return self.out(x)


def train(settings: dict[str, Any], size: int | None, form: Form = "in blocks") -> tuple[Any, ...]:
    """Losses, weights and collective calls of three steps on this rank's share of four samples."""
    torch.manual_seed(2)
    engine = make_engine(settings, model=Stack(size, form))
    micro = engine.train_micro_batch_size_per_gpu()
    torch.manual_seed(50)
    losses: list[float] = []
    for step in range(3):
        x = torch.randn(4, 9, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to(torch.bfloat16 if settings["bf16"]["enabled"] else torch.float32)
        for part in range(engine.gradient_accumulation_steps()):
            first = (part * engine.world_size + engine.global_rank) * micro
            loss = engine(x[first : first + micro]).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    calls = dict(engine.counters().collectives.calls)
    weights = full_parameters(engine)
    engine.destroy()
    return losses, weights, calls


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("in blocks", {}),
        ("in blocks", {"bf16": True}),
        ("in blocks", {"activation_checkpointing": {"policy": "every_block"}}),
        ("wrapped", {}),
        ("bare", {}),
        ("bare", {"bf16": True}),
    ],
)
def test_every_stage_trains_alike(form: Form, more: dict[str, Any]) -> None:
    expected = train(config(0, micro=4, **more), 4, form)
    for stage in (1, 2, 3):
        losses, weights, _ = train(config(stage, micro=4, **more), 4, form)
        assert losses == expected[0]
        assert all(torch.equal(weights[name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("stage", [0, 3])
def test_one_tile_trains_as_the_module_does(stage: int) -> None:
    plain, one = (train(config(stage, micro=4), size) for size in (None, 9))
    assert plain[0] == one[0]
    assert all(torch.equal(one[1][name], value) for name, value in plain[1].items())


FORMS: tuple[Form, ...] = ("in blocks", "wrapped", "bare")


def _on_two_ranks() -> dict[str, list[tuple[Any, ...]]]:
    """Of each form: stage 0 with tiles, stage 3 with tiles, and stage 3 with one tile."""
    return {
        form: [train(config(stage, micro=2), size, form) for stage, size in ((0, 4), (3, 4), (3, 9))] for form in FORMS
    }


def test_on_two_ranks_a_unit_is_gathered_once_for_all_tiles() -> None:
    for found in run_ranks(2, _on_two_ranks):
        for form, ((losses, weights, _), (losses3, weights3, calls3), (_, _, calls_of_one)) in found.items():
            assert losses == losses3
            assert all(torch.equal(weights3[name], value) for name, value in weights.items())
            if form != "bare":
                assert calls3 == calls_of_one
