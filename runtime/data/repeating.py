"""A loader that begins again where it ends, for scripts that count steps and not epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from dsrun.errors import ModelError

_Batch = TypeVar("_Batch")


class RepeatingLoader(Generic[_Batch]):
    """Iterates over `loader` for ever; a new iteration of it is an epoch.

    Args:
        loader: anything that can be iterated over again.
    """

    def __init__(self, loader: Iterable[_Batch]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        """Returns the next batch.

        Raises:
            ModelError: the loader is empty.
        """
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        for batch in self._batches:
            return batch
        raise ModelError(
            f"RepeatingLoader: an iteration over the {type(self.loader).__name__} yields nothing",
            hint="pass a loader that can be iterated over again; an iterator cannot",
        )
