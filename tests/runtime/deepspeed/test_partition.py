"""Parts are those of DeepSpeed 0.19.8, and a tensor that ranks share comes back whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsrun
from dsrun.errors import LayoutError
from dsrun.runtime.deepspeed.partition import (
    PartitionedTensor,
    partition_balanced,
    partition_uniform,
    prefix_sum_inc,
)
from support.ranks import run_ranks

#: Recorded from DeepSpeed 0.19.8's `partition_balanced`: weights, parts, positions.
RECORDED: list[tuple[list[float], int, list[int]]] = [
    ([0, 0.39, 0.767, 0.266, 0.591, 1, 0], 2, [0, 4, 7]),
    ([0.496, 1, 2, 0.258, 5], 4, [0, 2, 3, 4, 5]),
    ([10, 10, 3, 10, 0.974], 2, [0, 2, 5]),
    ([0.838, 0.344, 0.687, 3], 3, [0, 1, 3, 4]),
    ([0, 0.97, 0.111, 3, 0.891, 0.469, 1], 3, [0, 3, 4, 7]),
    ([0.411, 0.304, 1, 2, 1, 5], 3, [0, 3, 5, 6]),
    ([1, 3, 0.739, 2, 0, 3, 0.645, 0.892], 3, [0, 2, 5, 8]),
    ([3, 0, 0, 0.697, 0.832], 3, [0, 3, 4, 5]),
    ([1, 1, 0.546, 0.85, 1, 0.987, 10], 4, [0, 2, 4, 6, 7]),
    ([3, 1, 0.183, 0, 3, 0.035, 0, 1], 2, [0, 4, 8]),
]


@pytest.mark.parametrize(("weights", "parts", "positions"), RECORDED)
def test_balanced_parts_are_deepspeeds(weights: list[float], parts: int, positions: list[int]) -> None:
    assert partition_balanced(weights, parts) == positions


def test_balanced_parts_have_the_least_difference_that_there_is_for_two() -> None:
    draw = random.Random(3)
    for _ in range(50):
        weights = [draw.randint(0, 9) for _ in range(draw.randint(3, 12))]
        _, middle, _ = partition_balanced(weights, 2)
        differences = [abs(sum(weights[:cut]) - sum(weights[cut:])) for cut in range(1, len(weights))]
        assert abs(sum(weights[:middle]) - sum(weights[middle:])) == min(differences)


@pytest.mark.parametrize(
    ("items", "parts", "positions"),
    [
        (10, 3, [0, 4, 7, 10]),
        (9, 3, [0, 3, 6, 9]),
        (11, 4, [0, 3, 6, 9, 11]),
        (2, 4, [0, 1, 2, 2, 2]),
        (0, 2, [0, 0, 0]),
        (5, 1, [0, 5]),
    ],
)
def test_equal_parts_are_deepspeeds(items: int, parts: int, positions: list[int]) -> None:
    assert partition_uniform(items, parts) == positions


def test_sums_of_prefixes() -> None:
    assert prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert prefix_sum_inc([]) == []


def _share() -> list[Any]:
    dsrun.init_distributed("gloo")
    seen: list[Any] = []
    for shape in ((4, 3), (5,), (7, 1), (1,), (0, 3), ()):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
        part = PartitionedTensor(whole, dist.group.WORLD)
        again = PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD, device="cpu")
        seen.append(
            (
                torch.equal(part.full(), whole),
                torch.equal(again.full(), whole),
                again.full_size() == list(shape),
                again.full("cpu").dtype == whole.dtype,
                again.local_size() == part.local_size(),
                part.to_meta().tolist(),
                part.data().tolist(),
            )
        )
        whole.add_(1)  # the part is a copy
        assert part.data().tolist() == seen[-1][-1]
    part = PartitionedTensor(torch.ones(3), dist.group.WORLD)
    meta = part.to_meta()
    meta[3] = 1 - meta[3]
    with pytest.raises(LayoutError, match="expected part"):
        PartitionedTensor.from_meta(meta, part.data(), dist.group.WORLD)
    return seen


def test_a_tensor_that_ranks_share_comes_back_whole() -> None:
    for rank, seen in enumerate(run_ranks(2, _share)):
        assert [found[:5] for found in seen] == [(True,) * 5] * 6
        # Of shape (4, 3): as DeepSpeed 0.19.8 writes it down.
        assert seen[0][5] == [2, 4, 3, 2, rank, 0, 6, 12]
        assert seen[1][6] == ([4.0, 5.0] if rank else [1.0, 2.0, 3.0])
