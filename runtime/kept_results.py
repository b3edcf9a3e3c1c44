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

    They are kept as they are, and not copied: one that was written to since is made again, as on all other ranks. Where
    products are kept too, one of which the product was let go is kept as a copy, for it cannot be made again.

    Attributes:
        beside_products: whether the results of matrix products are kept, too.

    Args:
        beside_products: the attribute of that name.
    """

    def __init__(self, *, beside_products: bool = False) -> None:
        self.beside_products = beside_products
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

    def get(self, make: Callable[[], Tensor], *, once: bool = False) -> Tensor:
        """Returns what `make` returns, or has returned at this place of the first run.

        Args:
            make: function that makes the result.
            once: whether it can be called in the first run alone.
        """
        if self._next is None:
            made = make()
            kept = made.detach().clone() if once else made.detach()
            self._results.append((kept, kept._version))  # pyright: ignore[reportPrivateUsage]
            return made
        number, self._next = self._next, self._next + 1
        if number >= len(self._results):
            return make()
        result, version = self._results[number]
        if once:
            return result.clone()
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


def kept_without_product(product: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Returns what `kept_result` does, and lets go of a product that only `make` reads, where products are kept.

    Its memory goes and the tensor stays, for the shape: a further run takes it in place of the product, and never reads
    it.

    Args:
        product: result of a matrix product, with memory that nothing else has.
        make: function that makes the result of it.
    """
    present = _present.get()
    if present is None or not present.beside_products:
        return kept_result(make)
    result = present.get(make, once=True)
    product.untyped_storage().resize_(0)
    return result
