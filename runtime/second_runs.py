"""Which operations of a forward run again in its backward, and how often: told by who runs them, read by who counts.

On a floor below both. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class SecondRun:
    """How often the operations of one call run again in backward.

    A run that is cut ends with the last tensor that autograd saved in the call: what comes behind it does not run.

    Attributes:
        saved: Tensors that autograd has saved in the call so far.
        whole: Further runs of the whole call.
        cut: Further runs that are cut.
        keeps_products: Whether products are kept, and not made again.

    Args:
        whole: Value of that attribute.
        cut: Value of that attribute.
        keeps_products: Value of that attribute.
    """

    __slots__ = ("cut", "keeps_products", "saved", "whole")

    def __init__(self, *, whole: int = 0, cut: int = 0, keeps_products: bool = False) -> None:
        self.saved = 0
        self.whole = whole
        self.cut = cut
        self.keeps_products = keeps_products

    def times(self, saved: int) -> int:
        """Returns how often an operation runs again, as far as is known.

        Args:
            saved: Value of the attribute when the operation ran.
        """
        return self.whole + (self.cut if saved < self.saved else 0)


_present: ContextVar[tuple[SecondRun, ...]] = ContextVar("dsrun_second_runs", default=())
_begun: ContextVar[list[SecondRun] | None] = ContextVar("dsrun_second_runs_begun", default=None)


def second_runs() -> tuple[SecondRun, ...]:
    """Returns the further runs that the present operation is part of, the outermost first."""
    return _present.get()


@contextmanager
def running_again(run: SecondRun) -> Generator[None]:
    """Inside, operations are those of a call that runs again.

    Args:
        run: Further runs of the call.
    """
    begun = _begun.get()
    if begun is not None:
        begun.append(run)
    token = _present.set((*_present.get(), run))
    try:
        yield
    finally:
        _present.reset(token)


@contextmanager
def collecting_second_runs() -> Generator[list[SecondRun]]:
    """Collects the further runs of calls that begin inside, in order."""
    runs: list[SecondRun] = []
    token = _begun.set(runs)
    try:
        yield runs
    finally:
        _begun.reset(token)
