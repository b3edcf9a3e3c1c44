"""Who owns a peak, what is fragmented, and what is a leak and what is not."""

from __future__ import annotations

import pytest

from dsrun.memory_use.findings import Fragmentation, fragmentation_of, growth_of, peak_of
from dsrun.memory_use.samples import ACTIVATIONS, HELD_FREE, MemorySample, TierUse

MIB = 1 << 20


def moment(phase: str, *, live: int, peak: int, step: int = 1, reserved: int = 1000) -> MemorySample:
    use = TierUse(
        tier="gpu",
        held_bytes=reserved,
        peak_bytes=peak,
        live_bytes=live,
        reserved_bytes=reserved,
        kinds=(("parameters", 100),),
    )
    return MemorySample(step=step, phase=phase, tiers=(use,))


def test_a_peak_in_the_backward_belongs_to_activations_and_what_came_on_top() -> None:
    samples = [
        moment("start", live=110, peak=110),
        moment("forward", live=410, peak=420),
        moment("backward", live=150, peak=450),
        moment("update", live=120, peak=450),
    ]
    peak = peak_of(samples, "gpu")
    assert peak is not None
    assert (peak.nbytes, peak.phase, peak.owner) == (450, "backward", ACTIVATIONS)
    assert dict(peak.parts) == {
        ACTIVATIONS: 300,
        "parameters": 100,
        "gradients and temporaries during the backward": 40,
        "other tensors": 10,
    }
    assert HELD_FREE not in dict(peak.parts)


def test_a_peak_of_the_update_is_not_blamed_on_activations() -> None:
    samples = [
        moment("start", live=110, peak=110),
        moment("forward", live=130, peak=130),
        moment("backward", live=120, peak=140),
        moment("update", live=120, peak=500),
    ]
    peak = peak_of(samples, "gpu")
    assert peak is not None
    assert peak.owner == "temporaries during the update"
    assert sum(nbytes for _, nbytes in peak.parts) == 500


def test_a_peak_that_stood_before_the_first_step_is_the_builds() -> None:
    peak = peak_of([moment("start", live=110, peak=900), moment("forward", live=400, peak=900)], "gpu")
    assert peak is not None
    assert peak.owner.startswith("before the first sampled step")


def test_a_peak_between_sampled_steps_is_shared_out_as_the_step_that_was_sampled_for_it() -> None:
    samples = [
        moment("start", live=110, peak=110),
        moment("update", live=110, peak=200),
        moment("start", live=110, peak=500, step=11),
        moment("forward", live=480, peak=500, step=11),
        moment("update", live=110, peak=500, step=11),
    ]
    peak = peak_of(samples, "gpu")
    assert peak is not None
    assert (peak.step, peak.owner) == (11, ACTIVATIONS)
    assert dict(peak.parts) == {
        ACTIVATIONS: 370,
        "parameters": 100,
        "in steps that were not sampled": 20,
        "other tensors": 10,
    }


def test_a_tier_that_was_not_sampled_has_no_peak_and_no_fragmentation() -> None:
    samples = [moment("start", live=1, peak=1)]
    assert peak_of(samples, "cpu") is None
    assert fragmentation_of(samples, "cpu") is None


def test_fragmentation_is_judged_where_most_is_in_use() -> None:
    samples = [moment("start", live=100, peak=1), moment("forward", live=750, peak=1)]
    figure = fragmentation_of(samples, "gpu")
    assert figure is not None
    assert figure.share == 0.25


@pytest.mark.parametrize(
    ("tier", "live", "word"),
    [("gpu", 600, "expandable_segments"), ("cpu", 600, "MALLOC_MMAP_THRESHOLD_"), ("gpu", 900, None)],
)
def test_much_fragmentation_says_what_to_do(tier: str, live: int, word: str | None) -> None:
    advice = Fragmentation(tier=tier, live_bytes=live * MIB, reserved_bytes=1000 * MIB).advice
    assert advice is None if word is None else advice is not None and word in advice
    small = Fragmentation(tier=tier, live_bytes=live * 1024, reserved_bytes=1000 * 1024)
    assert small.advice is None


STEPS = range(10, 61, 5)


def test_steady_growth_is_a_leak_of_so_much_a_step() -> None:
    growth = growth_of("gpu", [(step, step * 100_000) for step in STEPS])
    assert (growth.is_leak, growth.bytes_per_step, growth.steps, growth.step) == (True, 100_000, 50, 60)


def test_a_heap_that_grows_by_a_hundredth_holds_batches_of_many_lengths_and_no_leak() -> None:
    level = 250 * MIB
    assert not growth_of("cpu", [(step, level + step * 50_000) for step in STEPS]).is_leak
    assert growth_of("cpu", [(step, level + step * 200_000) for step in STEPS]).is_leak


@pytest.mark.parametrize(
    "sizes",
    [
        [0] * 11,
        [0] * 5 + [500 * MIB] * 6,
        [0, 900 * MIB] * 5 + [2 * MIB],
        [step * 1000 for step in STEPS],
        [-step * MIB for step in STEPS],
    ],
    ids=["flat", "one jump", "swings", "too little", "shrinks"],
)
def test_what_does_not_grow_steadily_is_no_leak(sizes: list[int]) -> None:
    growth = growth_of("cpu", list(zip(STEPS, sizes, strict=True)))
    assert not growth.is_leak


def test_a_single_jump_does_not_make_a_slope() -> None:
    assert growth_of("cpu", [(step, 0 if step < 55 else MIB) for step in STEPS]).bytes_per_step == 0
