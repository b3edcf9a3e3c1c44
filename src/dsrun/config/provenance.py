"""Where each value of a config came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dsrun.config.text.tree import Position


class Kind(Enum):
    """Who decided a value: nobody, the file (or dict), `"auto"`, or another value it follows from."""

    DEFAULT = "default"
    FILE = "file"
    AUTO = "auto"
    DERIVED = "derived"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    Attributes:
        kind: kind of origin: the default, the file (or dict), `"auto"`, or another value from which this one follows.
        position: place where the value was written; None if it was not written anywhere.
        detail: further remark, e.g. the old name under which the value was written; may be empty.
    """

    kind: Kind
    position: Position | None = None
    detail: str = ""

    def __str__(self) -> str:
        place = str(self.position) if self.kind is Kind.FILE and self.position is not None else self.kind.value
        return f"{place}, {self.detail}" if self.detail else place


class Provenance(Mapping[str, Source]):
    """Sources by dotted path; a path that nobody set is a default."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    def __getitem__(self, path: str) -> Source:
        return self._sources.get(path, Source(Kind.DEFAULT))

    def __contains__(self, path: object) -> bool:
        """Whether somebody set the value, so that it is no default."""
        return path in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
