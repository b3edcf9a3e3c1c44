"""Batches as they are drawn, with word of when a rank waits for one: for the launcher, and for what seconds go to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from dsrun.contract.heartbeats import SCRIPT_PHASE

#: Phase of a rank that draws a batch.
DATA_PHASE = "data"
_Batch = TypeVar("_Batch")


def in_this_thread(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Returns what tells a phase in this thread alone: a thread that draws batches ahead is no wait of the rank's.

    Args:
        tell: function that is told the phase.
    """
    mine = threading.get_ident()

    def tell_here(phase: str) -> None:
        if threading.get_ident() == mine:
            tell(phase)

    return tell_here


def drawing(batches: Iterator[_Batch], tell: Callable[[str], None] | None) -> Iterator[_Batch]:
    """Yields batches, and tells when one is waited for and when it is there.

    Args:
        batches: batches to draw.
        tell: function that is told the phase; None: nobody is.
    """
    while True:
        try:
            batch = draw(batches, tell)
        except StopIteration:
            return
        yield batch


def draw(batches: Iterator[_Batch], tell: Callable[[str], None] | None) -> _Batch:
    """Returns the next batch, see `drawing`.

    Raises:
        StopIteration: there is none.
    """
    if tell is None:
        return next(batches)
    tell(DATA_PHASE)
    try:
        return next(batches)
    finally:
        tell(SCRIPT_PHASE)
