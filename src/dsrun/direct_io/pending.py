"""Reads and writes under way, and threads that take them one after the other. Knows nothing of files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class PendingIo:
    """Something under way, in several parts."""

    __slots__ = ("_done", "_error", "_failed_part", "_left", "_lock")

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._failed_part = parts
        self._done = threading.Event()
        if not parts:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Returns when all of it is done.

        Raises:
            OffloadError: a part has failed; each call raises the error of the first part that has.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error

    def finish(self, part: int, error: BaseException | None) -> None:
        """Ends a part, which has failed if there is an error."""
        with self._lock:
            self._left -= 1
            if error is not None and part < self._failed_part:
                self._error, self._failed_part = error, part
            if not self._left:
                self._done.set()


class IoQueue(Generic[_Item]):
    """Threads that take items in the order in which they were put.

    Args:
        name: prefix of the threads' names.
        threads: number of threads.
        run: function that processes one item in one of the threads and gets the thread's number; `PendingIo.wait`
            raises its exception.
    """

    def __init__(self, name: str, *, threads: int, run: Callable[[_Item, int], None]) -> None:
        self._items: SimpleQueue[tuple[_Item, PendingIo, int] | None] = SimpleQueue()
        self._run = run
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        # Daemons: a process that ends with an error waits for no disk.
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds during which something was under way."""
        with self._lock:
            running_s = time.perf_counter() - self._since_s if self._under_way else 0.0
            return self._busy_s + running_s

    def put(self, items: Sequence[_Item]) -> PendingIo:
        """Hands over the parts of one piece of work."""
        pending = PendingIo(len(items))
        with self._lock:
            if not self._under_way:
                self._since_s = time.perf_counter()
            self._under_way += len(items)
        for part, item in enumerate(items):
            self._items.put((item, pending, part))
        return pending

    def stop(self) -> None:
        """Has the threads end after what was put, and waits for none."""
        for _ in self._threads:
            self._items.put(None)

    def close(self) -> None:
        """Ends the threads, after what was put."""
        self.stop()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self, number: int) -> None:
        while (taken := self._items.get()) is not None:
            item, pending, part = taken
            error: BaseException | None = None
            try:
                self._run(item, number)
            except BaseException as failure:
                error = failure
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += time.perf_counter() - self._since_s
            # Last: who waits may end the process, or hand the memory to somebody else.
            del taken, item
            pending.finish(part, error)
