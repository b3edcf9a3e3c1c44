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
from dsrun.runtime.parallel.tensor.styles import COLUMN, ROW, SPLIT_ROW, ModelPlan
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
    after = torch.rand(2).tolist()
    randomness.leave()
    return before, inside, [*after, torch.rand(()).item()]


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


class Gated(nn.Module):
    """Dropout on the input between two columns, in the parts, and behind them; some of it may be computed again.

    Args:
        again: name of the part that is computed again.
        options: options of torch's `checkpoint`.
    """

    def __init__(self, again: str, **options: bool) -> None:
        super().__init__()
        self.again, self.options = again, options
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.before, self.inside, self.outside = (nn.Dropout(0.5) for _ in range(3))

    def run(self, part: str, function: Any, *args: Tensor) -> Tensor:
        """Runs a function, and again in backward where it is the one."""
        return checkpoint(function, *args, **self.options) if part == self.again else function(*args)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run("all", self.all, x)

    def all(self, x: Tensor) -> Tensor:
        h = self.run("columns and what they draw", lambda x: self.inside(self.run("columns", self.columns, x)), x)
        return self.run("row", lambda h: self.outside(self.down(self.inside(h))), h)

    def columns(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.run("last column", lambda gate, x: self.inside(gate * self.up(self.before(x))), gate, x)


PARTS = ("all", "columns and what they draw", "columns", "row", "last column")
PLAN = {"gate": COLUMN, "up": COLUMN, "down": ROW}


def _computed_again() -> dict[str, Any]:
    """Two micro batches forward, then both backward, then a forward: whatever is computed again, as if nothing were."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    axis = make_mesh(divide(info.world_size, {"tensor": 2}), info, device=CPU).tensor
    found: dict[str, Any] = {}
    for again in ("", *PARTS):
        for reentrant in (False, True):
            torch.manual_seed(3)
            blocks: Any = nn.ModuleList(Gated(again, use_reentrant=reentrant) for _ in range(2)).double()
            plan = ModelPlan("the test", {f"{n}.{key}": style for n in range(2) for key, style in PLAN.items()})
            cut_layers(blocks, plan, axis, of_first_rank(axis, CPU), device=CPU)
            masks: dict[str, list[list[bool]]] = {"before": [], "outside": [], "inside": []}
            for key, seen in masks.items():
                for block in blocks:
                    block.get_submodule(key).register_forward_hook(
                        lambda _, args, out, seen=seen: seen.append((out == 0).tolist())
                    )
            outputs: list[Tensor] = []
            for _ in range(2):
                x = torch.ones(2, WIDTH, requires_grad=True, dtype=torch.float64)
                for block in blocks:
                    x = block(x)
                outputs.append(x)
            first = {key: list(seen) for key, seen in masks.items()}
            sum(out.sum() * (n + 1) for n, out in enumerate(outputs)).backward()  # type: ignore[union-attr]
            end = torch.get_rng_state().tolist()
            later = {key: len(seen) for key, seen in masks.items()}
            blocks[0](torch.ones(2, WIDTH, requires_grad=True, dtype=torch.float64))
            found[f"{again}, {reentrant}"] = {
                "grads": [param.grad for param in blocks.parameters()],
                "end": end,
                "first": first,
                "next": {key: seen[later[key] :] for key, seen in masks.items()},
            }
    return found


def test_parts_that_are_computed_again_draw_the_same_and_leave_the_common_numbers() -> None:
    zero, one = run_ranks(2, _computed_again)
    for way, found in zero.items():
        assert found["end"] == one[way]["end"], way
        for time in ("first", "next"):
            for key in ("before", "outside"):
                assert found[time][key] == one[way][time][key], (way, time, key)
            for mine, others in zip(found[time]["inside"], one[way][time]["inside"], strict=True):
                assert mine != others, (way, time)
        every = [tuple(map(tuple, mask)) for time in ("first", "next") for mask in found[time]["inside"]]
        assert len(set(every)) == len(every), way
    for ranks in (zero, one):
        expected = ranks[", False"]
        for way, found in ranks.items():
            assert {**found, "grads": None} == {**expected, "grads": None}, way
            for mine, others in zip(found["grads"], expected["grads"], strict=True):
                torch.testing.assert_close(mine, others, msg=lambda said, way=way: f"{way}: {said}")


def _without_states() -> list[Any]:
    """A part without dropout whose recomputation does not restore generators, in a block with dropout elsewhere."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    axis = make_mesh(divide(info.world_size, {"tensor": 2}), info, device=CPU).tensor
    found: list[Any] = []
    for reentrant in (False, True):
        torch.manual_seed(3)
        blocks: Any = nn.ModuleList(
            Gated("columns", use_reentrant=reentrant, preserve_rng_state=False) for _ in range(2)
        )
        for block in blocks:
            block.before = nn.Identity()
        plan = ModelPlan("the test", {f"{n}.{key}": style for n in range(2) for key, style in PLAN.items()})
        cut_layers(blocks, plan, axis, of_first_rank(axis, CPU), device=CPU)
        x = torch.ones(2, WIDTH, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.sum().backward()
        found.append(torch.get_rng_state().tolist())
    return found


def test_a_recomputation_that_restores_no_generators_leaves_ranks_alike() -> None:
    zero, one = run_ranks(2, _without_states)
    assert zero == one


class OneKeyHead(nn.Module):
    """Attention of four heads of queries and one of keys and values, whose dropout stands in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = 4, 4, 1
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.inside = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        mixed = self.inside(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Flat(nn.Module):
    """Two pairs of a column and a row in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inside, self.also = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.inside(self.value(x)))
        return x + self.down(self.also(self.up(x)))


class SplitInside(Block):
    """A row that takes whole inputs is called between a column and a row."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = self.split(x)
        return z + self.down(self.inside(y))


class RowBetween(Gated):
    """The row is defined between its columns."""

    def __init__(self) -> None:
        super().__init__("")
        self.up = self._modules.pop("up")  # type: ignore[assignment]


_STYLES = {
    **{f"{key}_proj": COLUMN for key in "qkv"},
    "o_proj": ROW,
    "value": COLUMN,
    "out": ROW,
    "up": COLUMN,
    "down": ROW,
    "split": SPLIT_ROW,
    "gate": COLUMN,
}
_KINDS: dict[str, tuple[Any, bool]] = {
    "one head of keys": (OneKeyHead, False),
    "two rows": (Flat, False),
    "exact": (lambda: Gated(""), True),
    "a row between columns": (RowBetween, False),
    "a row of whole inputs": (SplitInside, False),
}


def _masks_of_kinds() -> dict[str, Any]:
    """Masks of dropout in parts, by kind of block and module."""
    info = RankInfo.from_env()
    join(info, backend="gloo", device=CPU, timeout_s=30)
    axis = make_mesh(divide(info.world_size, {"tensor": 2}), info, device=CPU).tensor
    found: dict[str, Any] = {}
    for kind, (make, exact) in _KINDS.items():
        torch.manual_seed(3)
        blocks: Any = nn.ModuleList(make() for _ in range(2))
        modules = {
            f"{n}.{key}": _STYLES[key] for n in range(2) for key, _ in blocks[n].named_children() if key in _STYLES
        }
        cut_layers(blocks, ModelPlan("the test", modules), axis, of_first_rank(axis, CPU), device=CPU, exact=exact)
        masks: list[tuple[str, list[bool]]] = []
        for key, part in blocks.named_modules():
            if isinstance(part, nn.Dropout):
                part.register_forward_hook(
                    lambda _, args, out, key=key, masks=masks: masks.append((key, (out == 0).tolist()))
                )
        x = torch.ones(2, 8, WIDTH)
        for block in blocks:
            x = block(x)
        found[kind] = masks, torch.get_rng_state().tolist()
    return found


def test_parts_begin_behind_the_last_column_of_whatever_kind() -> None:
    """Heads that several ranks use, columns of one module before two rows, the exact mode."""
    zero, one = run_ranks(2, _masks_of_kinds)
    for kind, (masks, end) in zero.items():
        others, other_end = one[kind]
        assert end == other_end, kind
        assert masks
        for (key, mine), (_, its) in zip(masks, others, strict=True):
            is_part = key.endswith(("inside", "also"))
            assert (mine == its) != is_part, (kind, key)


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
