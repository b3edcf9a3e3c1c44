"""The words of recomputed calls: what they mean where nothing is said, and that the parts fit them."""

from __future__ import annotations

import dataclasses

import pytest

from dsrun.runtime.activation.choose.profile import Profile
from dsrun.runtime.activation.keep.keeper import AsItIs
from dsrun.runtime.activation.recompute.options import CallOptions, Observer
from dsrun.runtime.activation.recompute.rng import RngTracker


def test_where_nothing_is_said_randomness_is_kept_and_nobody_waits_or_listens() -> None:
    options = CallOptions(AsItIs(), RngTracker())
    assert options.preserve_rng
    assert not options.synchronize
    assert (options.contexts, options.observer) == (None, None)


def test_options_under_way_do_not_change() -> None:
    options = CallOptions(AsItIs(), RngTracker())
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.synchronize = True  # type: ignore[misc]


def test_a_profile_is_an_observer() -> None:
    observer: Observer = Profile()
    options = CallOptions(AsItIs(), RngTracker(), observer=observer)
    assert options.observer is observer
    observer.ran("block", seconds=1.0, kept_bytes=2, dropped_bytes=3)
    observer.ran_again("block", seconds=0.5)
    assert "block" in str(observer)
