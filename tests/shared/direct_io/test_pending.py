"""Threads take items in order, errors reach who waits, and time is counted once."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from dsrun.direct_io.pending import IoQueue, PendingIo

DEADLINE_S = 60


def test_items_are_taken_in_the_order_in_which_they_were_put() -> None:
    taken: list[int] = []
    queue = IoQueue[int]("test", threads=1, run=lambda item, number: taken.append(item))
    queue.put([3, 1])
    queue.put([2]).wait()
    queue.close()
    assert taken == [3, 1, 2]


def test_several_threads_work_at_once_each_with_its_number() -> None:
    meeting = threading.Barrier(3)
    numbers: set[int] = set()

    def run(item: int, number: int) -> None:
        meeting.wait(DEADLINE_S)  # all three are inside, or nobody gets out
        numbers.add(number)

    queue = IoQueue[int]("test", threads=3, run=run)
    queue.put([0, 0, 0]).wait()
    queue.close()
    assert numbers == {0, 1, 2}


def test_an_error_is_raised_by_each_wait_after_all_parts_have_ended() -> None:
    ended: list[int] = []

    def run(item: int, number: int) -> None:
        ended.append(item)
        if item == 0:
            raise ValueError("the first")

    queue = IoQueue[int]("test", threads=1, run=run)
    pending = queue.put([0, 1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="the first"):
            pending.wait()
    assert ended == [0, 1, 2]
    queue.put([3]).wait()  # the queue itself goes on
    queue.close()


def test_of_several_errors_that_of_the_first_part_is_raised() -> None:
    pending = PendingIo(2)
    pending.finish(1, ValueError("part 1"))
    pending.finish(0, ValueError("part 0"))
    with pytest.raises(ValueError, match="part 0"):
        pending.wait()


def test_nothing_to_do_is_done_at_once() -> None:
    assert PendingIo(0).is_done
    queue = IoQueue[int]("test", threads=1, run=lambda item, number: None)
    queue.put([]).wait()
    queue.close()
    assert queue.busy_s == 0


def test_time_under_way_is_counted_once_however_many_items_there_are() -> None:
    go = threading.Event()

    def run(item: int, number: int) -> None:
        assert go.wait(DEADLINE_S)

    queue = IoQueue[int]("test", threads=2, run=run)
    pending = queue.put([0, 0])
    while not (running_s := queue.busy_s):
        pass
    assert queue.busy_s >= running_s
    go.set()
    pending.wait()
    ended_s = queue.busy_s
    assert queue.busy_s == ended_s
    queue.close()


def test_what_was_put_is_done_before_a_queue_closes() -> None:
    taken: list[int] = []
    queue = IoQueue[int]("test", threads=2, run=lambda item, number: taken.append(item))
    queue.put(range(100))
    queue.close()
    assert sorted(taken) == list(range(100))


def test_items_are_let_go_when_they_are_done() -> None:
    class Item:
        pass

    item = Item()
    left = weakref.ref(item)
    queue = IoQueue[Item]("test", threads=1, run=lambda item, number: None)
    queue.put([item]).wait()
    del item
    queue.close()
    gc.collect()
    assert left() is None
