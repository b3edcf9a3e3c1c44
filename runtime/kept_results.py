"""What a call that is recomputed keeps of its first run because making it again would involve other ranks.

On a floor below both that know of it: whoever recomputes calls, and whoever sums over ranks inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class KeptResults:
    """Results of a call's first run, in order, for its further runs.

    They are kept as they are, and not copied: one that was written to since is made again, as on all other ranks.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, int]] = []
        self._next: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(result.nbytes for result, _ in self._results)

    def run_again(self) -> None:
        """A further run begins."""
        self._next = 0

    def clear(self) -> None:
        """Lets go of what is kept: no further run comes."""
        self._results.clear()
        self._next = None

    def get(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns what `make` returns, or has returned at this place of the first run."""
        if self._next is None:
            made = make()
            kept = made.detach()
            self._results.append((kept, kept._version))  # pyright: ignore[reportPrivateUsage]
            return made
        number, self._next = self._next, self._next + 1
        if number >= len(self._results):
            return make()
        result, version = self._results[number]
        return result.detach() if result._version == version else make()  # pyright: ignore[reportPrivateUsage]


_present: ContextVar[KeptResults | None] = ContextVar("dsrun_kept_results", default=None)


@contextmanager
def keeping(results: KeptResults | None) -> Generator[None]:
    """Inside, a call runs whose results these are; None: what runs is part of no call."""
    token = _present.set(results)
    try:
        yield
    finally:
        _present.reset(token)


def kept_result(make: Callable[[], Tensor]) -> Tensor:
    """Returns what `make` returns; in a further run of a recomputed call, what it has returned in the first one."""
    present = _present.get()
    return make() if present is None else present.get(make)
