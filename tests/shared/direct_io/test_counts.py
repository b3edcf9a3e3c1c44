"""What was moved between two moments."""

from __future__ import annotations

from dsrun.direct_io.counts import IoCounts, IoTally


def test_counts_tell_what_came_since_earlier_ones() -> None:
    earlier, now = IoCounts(10, 1, 0.5, 20, 2, 0.25), IoCounts(15, 3, 1.0, 40, 4, 0.5)
    assert now.since(earlier) == IoCounts(5, 2, 0.5, 20, 2, 0.25)
    assert now.since(IoCounts()) == now


def test_a_tally_adds_up_calls() -> None:
    tally = IoTally()
    tally.add(4096)
    tally.add(1)
    assert (tally.moved, tally.calls) == (4097, 2)
