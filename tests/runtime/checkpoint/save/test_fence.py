"""What is being copied is waited for, and nothing else."""

from __future__ import annotations

import threading

from dsrun.runtime.checkpoint.save.fence import Fence


def test_an_open_fence_holds_nobody_up() -> None:
    fence = Fence()
    fence.wait(3)
    fence.wait_all()
    fence.close([1])
    fence.wait(3)
    assert fence.waits == 0
    assert fence.is_closed


def test_each_unit_is_waited_for_alone_and_all_of_them_together() -> None:
    fence = Fence()
    fence.close([1, 2])
    passed: list[str] = []
    came = [threading.Event(), threading.Event()]

    def one() -> None:
        fence.wait(1)
        passed.append("one")
        came[0].set()

    def all_of_them() -> None:
        fence.wait_all()
        passed.append("all")
        came[1].set()

    threads = [threading.Thread(target=one), threading.Thread(target=all_of_them)]
    for thread in threads:
        thread.start()
    fence.open(1)
    assert came[0].wait(60)
    assert passed == ["one"]
    fence.open(2)
    assert came[1].wait(60)
    for thread in threads:
        thread.join()
    assert not fence.is_closed


def test_a_copy_that_comes_to_nothing_holds_nobody_up() -> None:
    fence = Fence()
    fence.close(range(5))
    waiting = threading.Thread(target=fence.wait_all)
    waiting.start()
    fence.open_all()
    waiting.join(60)
    assert not waiting.is_alive()
