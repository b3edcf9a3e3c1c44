"""What ranks shall do, as a value that travels as JSON; each benchmark has a job of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

_Job = TypeVar("_Job", bound="JsonJob")


class Job(Protocol):
    """What a team knows of its job.

    Attributes:
        program: module that a rank runs, with the job as its argument; see `rank.py`.
    """

    program: ClassVar[str]

    @property
    def contender(self) -> str:
        """Name of whose ranks they are."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    def to_json(self) -> str:
        """Returns the job as text."""
        ...


@dataclass(frozen=True, slots=True)
class JsonJob:
    """Stands before a job whose fields are plain values."""

    def to_json(self) -> str:
        """Returns the job as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[_Job], text: str) -> _Job:
        """Reads what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields)
