"""The fastest plan within a budget, beside all plans there are."""

from __future__ import annotations

import itertools
import random

import pytest

from dsrun.runtime.activation.choose.budget import BlockCosts, Cost, least_bytes, solve
from dsrun.runtime.activation.choose.policy import Treatment


def peak_of(blocks: list[BlockCosts], chosen: tuple[Treatment, ...]) -> int:
    """Walks through forward and backward."""
    kept = [block.costs[kind].kept_bytes for block, kind in zip(blocks, chosen, strict=True)]
    most = sum(kept)
    for position in range(len(blocks) - 1, -1, -1):
        most = max(most, sum(kept[:position]) + max(kept[position], blocks[position].live_bytes))
    return most


def random_blocks(seed: int) -> list[BlockCosts]:
    draw = random.Random(seed)
    blocks: list[BlockCosts] = []
    for _ in range(6):
        live = draw.randint(10, 40)
        blocks.append(
            BlockCosts(
                live,
                {
                    Treatment.KEEP: Cost(live, 0.0),
                    Treatment.RECOMPUTE: Cost(draw.randint(1, 5), draw.uniform(1, 3)),
                    Treatment.MOVE: Cost(0, draw.uniform(2, 6)),
                },
            )
        )
    return blocks


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_within_the_budget_is_faster(seed: int) -> None:
    blocks = random_blocks(seed)
    plans = list(itertools.product(*[list(block.costs) for block in blocks]))
    for budget in (20, 45, 60, 90, 120, 250):
        seconds = [
            sum(block.costs[kind].seconds for block, kind in zip(blocks, chosen, strict=True))
            for chosen in plans
            if peak_of(blocks, chosen) <= budget
        ]
        found = solve(blocks, budget)
        if found is None:
            assert not seconds
            assert least_bytes(blocks) > budget
            continue
        assert found.seconds == pytest.approx(min(seconds))
        assert found.peak_bytes == peak_of(blocks, found.treatments) <= budget
        assert least_bytes(blocks) <= budget


def test_equal_blocks_are_recomputed_at_the_front_and_kept_at_the_back() -> None:
    block = BlockCosts(16, {Treatment.KEEP: Cost(16, 0.0), Treatment.RECOMPUTE: Cost(1, 1.0)})
    found = solve([block] * 12, 12 * 16 - 16)
    assert found is not None
    assert found.treatments == (Treatment.RECOMPUTE,) * 2 + (Treatment.KEEP,) * 10


def test_plans_too_many_to_follow_all_still_fit_and_are_nearly_the_fastest() -> None:
    draw = random.Random(5)
    blocks: list[BlockCosts] = []
    for _ in range(16):  # a second for each MB that is saved: none of 65536 plans beats another in bytes and seconds
        live, kept = draw.randint(10**6, 10**7), draw.randint(1, 10**5)
        recompute = Cost(kept, (live - kept) / 10**6)
        blocks.append(BlockCosts(live, {Treatment.KEEP: Cost(live, 0.0), Treatment.RECOMPUTE: recompute}))
    whole = sum(block.live_bytes for block in blocks)
    budget = whole // 2
    found = solve(blocks, budget)
    assert found is not None
    assert found.peak_bytes == peak_of(blocks, found.treatments) <= budget
    least_s = (whole - budget) / 10**6
    assert least_s <= found.seconds <= 1.01 * least_s
