"""Word of when a rank waits for a batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dsrun.runtime.data.drawing import draw, drawing, in_this_thread


def test_a_wait_for_a_batch_is_told_from_its_begin_to_its_end() -> None:
    told: list[str] = []
    assert list(drawing(iter([1, 2]), told.append)) == [1, 2]
    assert told == ["data", "script"] * 3, "the end is looked for as well"
    with pytest.raises(StopIteration):
        draw(iter([]), told.append)
    assert told[-1] == "script"


def test_batches_that_another_thread_draws_ahead_are_no_wait() -> None:
    told: list[str] = []
    tell = in_this_thread(told.append)
    with ThreadPoolExecutor(1) as ahead:
        assert ahead.submit(lambda: list(drawing(iter([1, 2]), tell))).result() == [1, 2]
    assert told == []
    assert draw(iter([3]), tell) == 3
    assert told == ["data", "script"]
