"""A moment's bytes: shared out over owners without loss, and the same after a record."""

from __future__ import annotations

import json

import pytest

from dsrun.memory_use.samples import (
    ACTIVATIONS,
    HELD_FREE,
    MemorySample,
    TierUse,
    from_record,
    latest_step,
    owners_of,
    parts_of,
    to_record,
)

KINDS = (("parameters", 100), ("gradients", 50), ("moved-out gradients", 0))


def gpu(live: int, *, reserved: int = 400, peak: int = 300) -> TierUse:
    return TierUse(
        tier="gpu", held_bytes=reserved, peak_bytes=peak, live_bytes=live, reserved_bytes=reserved, kinds=KINDS
    )


def test_every_byte_that_is_held_has_one_owner() -> None:
    parts = parts_of(gpu(260), gpu(180))
    assert dict(parts) == {"parameters": 100, "gradients": 50, ACTIVATIONS: 80, "other tensors": 30, HELD_FREE: 140}
    assert sum(nbytes for _, nbytes in parts) == 400


def test_at_the_start_of_a_step_there_are_no_activations() -> None:
    assert ACTIVATIONS not in dict(parts_of(gpu(180), gpu(180)))
    assert ACTIVATIONS not in dict(parts_of(gpu(180), None))


def test_pages_nobody_has_written_never_make_the_rest_negative() -> None:
    use = TierUse(tier="cpu", held_bytes=120, peak_bytes=130, live_bytes=60, reserved_bytes=90, kinds=KINDS)
    assert dict(parts_of(use, use)) == {"parameters": 100, "gradients": 50}


def test_an_allocator_that_does_not_tell_leaves_the_rest_whole() -> None:
    use = TierUse(tier="cpu", held_bytes=220, peak_bytes=230, live_bytes=None, reserved_bytes=None, kinds=KINDS)
    assert dict(parts_of(use, use)) == {"parameters": 100, "gradients": 50, "rest of the process": 70}


def test_a_sample_is_the_same_after_its_record() -> None:
    sample = MemorySample(step=3, phase="forward", tiers=(gpu(260),))
    assert from_record(json.loads(json.dumps(to_record(sample)))) == sample


def test_owners_stand_in_one_order_whichever_moment_has_them() -> None:
    start, forward = parts_of(gpu(180), gpu(180)), parts_of(gpu(260), gpu(180))
    assert owners_of([start, forward]) == ["parameters", "gradients", ACTIVATIONS, "other tensors", HELD_FREE]


@pytest.mark.parametrize(("phases_of_last", "expected"), [(("start", "forward"), 2), (None, 3)])
def test_the_last_step_that_was_sampled_whole_is_shown(phases_of_last: tuple[str, ...] | None, expected: int) -> None:
    whole = ("start", "forward", "backward", "update")
    samples = [MemorySample(step=2, phase=phase, tiers=()) for phase in whole]
    samples += [MemorySample(step=3, phase=phase, tiers=()) for phase in phases_of_last or whole]
    assert {sample.step for sample in latest_step(samples)} == {expected}
    assert latest_step([]) == []
