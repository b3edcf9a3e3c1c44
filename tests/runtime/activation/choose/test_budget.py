"""The fastest plan within a budget, beside all plans there are."""

from __future__ import annotations

import itertools
import random

import pytest

from dsrun.pipeline_schedules.actions import Kind, Schedule
from dsrun.pipeline_schedules.generate import ScheduleName, make_schedule
from dsrun.pipeline_schedules.live import live_moments
from dsrun.runtime.activation.choose.budget import BlockCosts, Cost, least_bytes, solve
from dsrun.runtime.activation.choose.policy import Treatment


def peak_of(blocks: list[BlockCosts], chosen: tuple[Treatment, ...]) -> int:
    """Walks through forward and backward."""
    kept = [block.costs[kind].kept_bytes for block, kind in zip(blocks, chosen, strict=True)]
    most = sum(kept)
    for position in range(len(blocks) - 1, -1, -1):
        most = max(most, sum(kept[:position]) + max(kept[position], blocks[position].live_bytes))
    return most


def seconds_of(blocks: list[BlockCosts], chosen: tuple[Treatment, ...]) -> float:
    return sum(block.costs[kind].seconds for block, kind in zip(blocks, chosen, strict=True))


def random_blocks(seed: int, count: int = 6, chunks: int = 1) -> list[BlockCosts]:
    draw = random.Random(seed)
    blocks: list[BlockCosts] = []
    for number in range(count):
        live = draw.randint(10, 40)
        blocks.append(
            BlockCosts(
                live,
                {
                    Treatment.KEEP: Cost(live, 0.0),
                    Treatment.RECOMPUTE: Cost(draw.randint(1, 5), draw.uniform(1, 3)),
                    Treatment.MOVE: Cost(0, draw.uniform(2, 6)),
                },
                chunk=number * chunks // count,
            )
        )
    return blocks


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_within_the_budget_is_faster(seed: int) -> None:
    blocks = random_blocks(seed)
    plans = list(itertools.product(*[list(block.costs) for block in blocks]))
    for budget in (20, 45, 60, 90, 120, 250):
        seconds = [seconds_of(blocks, chosen) for chosen in plans if peak_of(blocks, chosen) <= budget]
        found = solve(blocks, budget)
        if found is None:
            assert not seconds
            assert least_bytes(blocks) > budget
            continue
        assert found.seconds == pytest.approx(min(seconds))
        assert found.peak_bytes == peak_of(blocks, found.treatments) <= budget
        assert least_bytes(blocks) <= budget


def scheduled_peak(schedule: Schedule, rank: int, blocks: list[BlockCosts], chosen: tuple[Treatment, ...]) -> int:
    """Walks through the actions of a rank, block by block."""
    own = schedule.chunks_of(rank)
    held = most = 0
    for action in schedule.actions[rank]:
        part = [
            (block.live_bytes, block.costs[kind].kept_bytes)
            for block, kind in zip(blocks, chosen, strict=True)
            if own[block.chunk] == action.chunk
        ]
        if action.kind is Kind.FORWARD:
            held += sum(kept for _, kept in part)
            most = max(most, held)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADS):
            for live, kept in reversed(part):
                held += live - kept
                most = max(most, held, held + kept - live)
                held -= live if action.kind is Kind.BACKWARD else 0
        elif action.kind is Kind.WEIGHT_GRADS:
            held -= sum(live for live, _ in part)
    assert held == 0
    return most


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "micros"),
    [
        ("1f1b", 3, 1, 5),
        ("gpipe", 2, 1, 3),
        ("interleaved", 2, 2, 4),
        ("interleaved", 2, 3, 4),
        ("breadth_first", 2, 2, 3),
        ("zero_bubble", 3, 1, 5),
        ("zbv", 2, 2, 5),
    ],
)
def test_no_plan_of_several_micro_batches_and_chunks_is_faster(
    name: ScheduleName, ranks: int, virtual: int, micros: int, seed: int
) -> None:
    schedule = make_schedule(name, ranks=ranks, micros=micros, virtual=virtual)
    for rank in range(ranks):
        blocks, moments = random_blocks(10 * seed + rank, chunks=virtual), live_moments(schedule, rank)
        peaks = {
            chosen: scheduled_peak(schedule, rank, blocks, chosen)
            for chosen in itertools.product(*[list(block.costs) for block in blocks])
        }
        least, largest = min(peaks.values()), max(peaks.values())
        assert least_bytes(blocks, moments=moments) == least
        assert solve(blocks, least - 1, moments=moments) is None
        for budget in (least + step * (largest - least) // 4 for step in range(5)):
            found = solve(blocks, budget, moments=moments)
            assert found is not None
            assert found.peak_bytes == peaks[found.treatments] <= budget
            fastest = min(seconds_of(blocks, chosen) for chosen, peak in peaks.items() if peak <= budget)
            assert found.seconds == pytest.approx(fastest)


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


def test_plans_of_several_chunks_too_many_to_follow_all_still_fit_and_are_nearly_the_fastest() -> None:
    draw = random.Random(6)
    moments = live_moments(make_schedule("breadth_first", ranks=2, micros=4, virtual=2), 0)
    blocks: list[BlockCosts] = []
    for number in range(24):
        live, kept = draw.randint(10**6, 10**7), draw.randint(1, 10**5)
        recompute = Cost(kept, (live - kept) / 10**6)
        blocks.append(
            BlockCosts(live, {Treatment.KEEP: Cost(live, 0.0), Treatment.RECOMPUTE: recompute}, chunk=number // 12)
        )
    whole = sum(block.live_bytes for block in blocks)
    found = solve(blocks, 2 * whole, moments=moments)  # of four times that
    assert found is not None
    assert found.peak_bytes <= 2 * whole
    least_s = whole / 2 / 10**6
    assert least_s <= found.seconds <= 1.03 * least_s


def test_of_plans_too_many_to_follow_all_the_one_with_the_least_bytes_is_followed() -> None:
    first = BlockCosts(10**6, {Treatment.KEEP: Cost(10**6, 0.0)})
    behind = [
        BlockCosts(10 + 2**n, {Treatment.KEEP: Cost(10 + 2**n, 0.0), Treatment.RECOMPUTE: Cost(10, 2.0**n)})
        for n in range(14)  # 16384 plans, each with bytes of its own, of which neighbours are followed as one
    ]
    blocks = [first, *behind]
    found = solve(blocks, least_bytes(blocks))
    assert found is not None
    assert found.treatments.count(Treatment.RECOMPUTE) == 14


def test_late_stages_recompute_less_within_one_budget() -> None:
    block = BlockCosts(16, {Treatment.KEEP: Cost(16, 0.0), Treatment.RECOMPUTE: Cost(1, 1.0)})
    schedule = make_schedule("1f1b", ranks=4, micros=8, virtual=1)
    counts: list[int] = []
    for rank in range(4):
        found = solve([block] * 4, 120, moments=live_moments(schedule, rank))
        assert found is not None
        counts.append(found.treatments.count(Treatment.RECOMPUTE))
    # Of four micro batches one block each fits (4 x 19 bytes), of three two (3 x 34), of two three (2 x 49).
    assert counts == [3, 2, 1, 0]
