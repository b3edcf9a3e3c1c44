"""Dropout is alike where ranks hold the whole, and different in their parts.

Whole models are cut in processes, for threads share generators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsrun.config.axes import divide
from dsrun.contract.environment import RankInfo
from dsrun.runtime.mesh.alone import AloneCollectives
from dsrun.runtime.mesh.join.groups import join, make_mesh
from dsrun.runtime.parallel.tensor.cut import cut_layers, of_first_rank
from dsrun.runtime.parallel.tensor.part_randomness import PartRandomness, draws
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, ModelPlan
from support.ranks import run_ranks

CPU = torch.device("cpu")
WIDTH = 64


def numbers(seed: int, rank: int) -> tuple[list[float], list[float], list[float]]:
    """Returns what a rank draws before parts, in them and behind them."""
    randomness = PartRandomness(rank, CPU)
    torch.manual_seed(seed)
    before = torch.rand(3).tolist()
    randomness.enter()
    randomness.enter()
    inside = torch.rand(3).tolist()
    randomness.leave()
    randomness.leave()
    return before, inside, torch.rand(3).tolist()


def test_ranks_draw_alike_outside_of_parts_and_unlike_in_them() -> None:
    found = [numbers(5, rank) for rank in range(8)]
    assert len({tuple(before) for before, _, _ in found}) == 1
    assert len({tuple(after) for _, _, after in found}) == 1
    assert len({tuple(inside) for _, inside, _ in found}) == 8
    assert all(len({*before, *inside, *after}) == 9 for before, inside, after in found)


def test_each_block_and_each_step_draws_other_numbers_in_its_parts() -> None:
    randomness = [PartRandomness(1, CPU) for _ in range(2)]
    torch.manual_seed(5)
    found: list[float] = []
    for _ in range(2):
        for one in randomness:
            one.enter()
            found.append(torch.rand(()).item())
            one.leave()
    assert len(set(found)) == 4


def test_what_starts_again_from_the_same_state_draws_the_same() -> None:
    assert numbers(5, 3) == numbers(5, 3)
    assert numbers(5, 3)[1] != numbers(6, 3)[1]


def test_to_leave_where_nobody_entered_changes_nothing() -> None:
    state = torch.get_rng_state()
    PartRandomness(1, CPU).leave()
    assert torch.equal(torch.get_rng_state(), state)


class Chance(nn.Module):
    """A block with one attribute.

    Args:
        name: name of the attribute.
        value: its value.
    """

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.inner = nn.Module()
        setattr(self.inner, name, value)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.AlphaDropout(0.1)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.PReLU()), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (Chance("attention_dropout", 0.1), True),
        (Chance("attn_pdrop", 0.1), True),
        (Chance("hidden_dropout_prob", 0.0), False),
        (Chance("p", 0.1), False),
        (Chance("eps", 0.1), False),
        (Chance("dropout", None), False),
    ],
)
def test_blocks_that_draw_are_known_by_their_dropout(block: nn.Module, expected: bool) -> None:
    assert draws(block) is expected


class Block(nn.Module):
    """Dropout in the parts, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(self.down(self.inside(self.up(x))))


def _trained() -> dict[str, Any]:
    """Trains two blocks on this rank, made from its own seed, and returns what was drawn, and how states stand."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    mesh = make_mesh(divide(info.world_size, {"tensor": 2}), info, device=CPU)
    axis = mesh.tensor
    torch.manual_seed(100 + axis.rank)
    blocks: Any = nn.ModuleList(Block() for _ in range(2))
    plan = ModelPlan(
        "the test", {f"{i}.{key}": style for i in range(2) for key, style in (("up", COLUMN), ("down", ROW))}
    )
    cut_layers(blocks, plan, axis, of_first_rank(axis, CPU), device=CPU)
    start = torch.get_rng_state()
    masks: dict[str, list[list[bool]]] = {"inside": [], "outside": []}
    for block in blocks:
        for key, seen in masks.items():
            block.get_submodule(key).register_forward_hook(
                lambda _, args, out, seen=seen: seen.append((out == 0).tolist())
            )
    grads: dict[str, list[Tensor]] = {}
    for way in ("kept", "recomputed", "recomputed from the block's beginning"):
        torch.set_rng_state(start)
        blocks.zero_grad()
        x = torch.ones(2, WIDTH, requires_grad=True)
        for block in blocks:
            x = block(x) if way == "kept" else checkpoint(block, x, use_reentrant="beginning" in way)  # type: ignore[assignment]
        middle = torch.get_rng_state()
        x.sum().backward()
        assert torch.equal(torch.get_rng_state(), middle), way
        grads[way] = [param.grad.clone() for param in blocks.parameters()]
    for way, found in grads.items():
        assert all(torch.equal(one, other) for one, other in zip(found, grads["kept"], strict=True)), way
    blocks.eval()
    return {
        "start": start.tolist(),
        "end": torch.get_rng_state().tolist(),
        "masks": {key: seen[:2] for key, seen in masks.items()},
    }


def test_dropout_of_a_cut_model_in_processes() -> None:
    zero, one = run_ranks(2, _trained)
    assert zero["start"] == one["start"], "generators begin where those of the first rank stand"
    assert zero["end"] == one["end"], "and are behind the blocks where they would be without parts"
    assert zero["masks"]["outside"] == one["masks"]["outside"]
    for mine, others in zip(zero["masks"]["inside"], one["masks"]["inside"], strict=True):
        assert mine != others
    assert zero["masks"]["inside"][0] != zero["masks"]["inside"][1]
    assert zero["masks"]["outside"][0] != zero["masks"]["outside"][1]


def test_a_model_without_dropout_draws_nothing() -> None:
    blocks: Any = nn.ModuleList(Block() for _ in range(2))
    for block in blocks:
        block.inside, block.outside = nn.Identity(), nn.Identity()
    axis = AloneCollectives()
    cut_layers(
        blocks, ModelPlan("the test", {"0.up": COLUMN, "0.down": ROW}), axis, of_first_rank(axis, CPU), device=CPU
    )
    state = torch.get_rng_state()
    blocks[0](torch.ones(2, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)


class Failing(nn.Module):
    """A block whose forward fails between a column and a row, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.fails:
            raise RuntimeError("out of memory")
        return self.down(self.dropout(y))


def test_a_block_that_fails_between_a_column_and_a_row_leaves_the_common_numbers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Failing() for _ in range(2))

    model = Model()
    modules = {f"blocks.{n}.{name}": style for n in range(2) for name, style in (("up", COLUMN), ("down", ROW))}
    alone = AloneCollectives()
    cut_layers(model, ModelPlan("a test", modules), alone, of_first_rank(alone, CPU), device=CPU)
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.blocks[0](torch.ones(1, 8))
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.randint((1 << 63) - 1, ())  # the number that the parts begin with
    assert torch.equal(after, torch.rand(1))
