"""All three ways to cut calls keep as many bytes on their way."""

from __future__ import annotations

import pytest

from dsrun.direct_io.settings import ALIGN, IoSettings, round_up

MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "calls", "call_bytes"),
    [
        (IoSettings(), 2, 4 * MIB),
        (IoSettings(overlap_events=False), 1, 8 * MIB),
        (IoSettings(single_submit=True), 8, MIB),
        (IoSettings(single_submit=True, overlap_events=False, threads=3), 24, MIB),
        (IoSettings(threads=4, queue_depth=32), 8, 16 * MIB),
        (IoSettings(queue_depth=1), 1, MIB),
        (IoSettings(queue_depth=3), 2, 2 * MIB),
    ],
)
def test_depth_becomes_calls(settings: IoSettings, calls: int, call_bytes: int) -> None:
    assert (settings.calls_at_once, settings.call_bytes) == (calls, call_bytes)
    assert calls * call_bytes >= settings.block_bytes * settings.queue_depth * settings.threads


def test_calls_are_multiples_of_a_disks_block() -> None:
    assert IoSettings(block_bytes=5000, queue_depth=1).call_bytes == 2 * ALIGN
    assert [round_up(count) for count in (1, ALIGN, ALIGN + 1)] == [ALIGN, ALIGN, 2 * ALIGN]


@pytest.mark.parametrize("wrong", [{"block_bytes": 0}, {"queue_depth": 0}, {"threads": 0}])
def test_sizes_below_one_are_a_mistake_of_the_caller(wrong: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match="at least 1"):
        IoSettings(**wrong)
