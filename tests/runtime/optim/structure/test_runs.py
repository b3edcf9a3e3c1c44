"""Owned ranges are cut where the group or the kind of tensor changes, and nowhere else."""

from __future__ import annotations

import torch

from dsrun.runtime.layout.unit_layout import lay_out
from dsrun.runtime.optim.structure.runs import Run, cut_runs
from dsrun.runtime.protocols import OwnedRange

TENSORS = [("a", (10, 10)), ("none", (0, 4)), ("b", (70,)), ("c", (8, 8)), ("d", (300,))]


def runs(groups: tuple[int, ...], *, rank: int = 0, size: int = 1, by_dims: bool = False) -> list[Run]:
    layout = lay_out("unit", TENSORS, world_size=size)
    start, stop = layout.shard_range(rank)
    owned = OwnedRange(layout, start, torch.zeros(stop - start), torch.zeros(stop - start), groups)
    return list(cut_runs(owned, lambda _, shape: str(len(shape)))) if by_dims else list(cut_runs(owned))


def described(found: list[Run]) -> list[tuple[int, int, list[str]]]:
    return [(run.group, run.start, [piece.extent.name for piece in run.pieces()]) for run in found]


def test_one_group_of_one_kind_is_one_run() -> None:
    assert described(runs((0,) * 5)) == [(0, 0, ["a", "b", "c", "d"])]


def test_a_group_begins_a_run() -> None:
    assert described(runs((0, 0, 0, 1, 1))) == [(0, 0, ["a", "b"]), (1, 256, ["c", "d"])]


def test_a_kind_begins_a_run_and_tensors_without_elements_do_not() -> None:
    found = runs((0,) * 5, by_dims=True)
    assert described(found) == [(0, 0, ["a"]), (0, 128, ["b"]), (0, 256, ["c"]), (0, 320, ["d"])]
    assert [run.kind for run in found] == ["2", "1", "2", "1"]
    assert all(run.start % 64 == 0 for run in found)


def test_a_rank_has_the_runs_of_its_slice() -> None:
    for rank, expected in ((0, ["a", "b"]), (1, ["c", "d"]), (2, ["d"])):
        (found,) = described(runs((0,) * 5, rank=rank, size=3))
        assert found[2] == expected


def test_leaves_and_gradients_are_views_of_the_range() -> None:
    (run,) = runs((0,) * 5, rank=1, size=2)
    run.owned.master.fill_(2.0)
    run.owned.grad_sum.fill_(3.0)
    assert float(run.param.detach().sum()) == 2.0 * run.numel
    assert run.param.grad is run.grad
    assert float(run.grad.sum()) == 3.0 * run.numel
