"""Short texts that ranks leave for each other, without entering a collective: any thread may, at any time.

For what is settled beside training, as the end of a save is. Who must know something at once uses a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch.distributed as dist

from ...compat import PrefixStore, Store, store_of

_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.2


class Noticeboard(Protocol):
    """Where texts stay until they are taken down."""

    def post(self, key: str, text: bytes) -> None:
        """Leaves a text under a key that nobody has used."""
        ...

    def wait(self, key: str, *, until: Callable[[], bool]) -> bytes | None:
        """Returns the text of a key once it is there; None where `until` became true before."""
        ...

    def take_down(self, key: str) -> None:
        """Removes a text that everybody has read."""
        ...


class StoreNoticeboard:
    """Texts in the store by which the ranks met.

    Args:
        store: any of torch's; a clone of it is used, so that no thread of another purpose waits for this one.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("noticeboard", cast(Any, store).clone())

    def post(self, key: str, text: bytes) -> None:
        """See `Noticeboard`."""
        self._store.set(key, text.decode())

    def wait(self, key: str, *, until: Callable[[], bool]) -> bytes | None:
        """See `Noticeboard`. Asks again and again: a wait in the store could not be broken off."""
        began = time.monotonic()
        while not self._store.check([key]):
            if until():
                return None
            # A fraction of what it has waited so far: nobody is much later for it, and a store of many ranks is not
            # asked a thousand times for what takes minutes.
            time.sleep(min(max(_SHORTEST_PAUSE_S, (time.monotonic() - began) / 16), _LONGEST_PAUSE_S))
        return bytes(self._store.get(key))

    def take_down(self, key: str) -> None:
        """See `Noticeboard`."""
        self._store.delete_key(key)


class LocalNoticeboard:
    """Texts among threads of one process, or of a rank that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def post(self, key: str, text: bytes) -> None:
        """See `Noticeboard`."""
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def wait(self, key: str, *, until: Callable[[], bool]) -> bytes | None:
        """See `Noticeboard`."""
        with self._changed:
            while key not in self._texts:
                if until():
                    return None
                self._changed.wait(_LONGEST_PAUSE_S)
            return self._texts[key]

    def take_down(self, key: str) -> None:
        """See `Noticeboard`."""
        with self._changed:
            self._texts.pop(key, None)


def noticeboard() -> Noticeboard:
    """Returns the noticeboard of the job's ranks, which have joined."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return LocalNoticeboard()
    return StoreNoticeboard(store_of(world))
