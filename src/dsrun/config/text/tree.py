"""A parsed config before it has a schema: plain values, each with the place it was written at.

Parsers (JSON, YAML, dict) make it, legacy translation edits it, validation reads it. Nothing here knows a key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, cast

from dsrun.errors import ConfigError

#: Deepest nesting a config may have; real ones stay below ten.
MAX_DEPTH = 64
#: Most values a config may hold; bounds time and memory for hostile input.
MAX_VALUES = 100_000

Scalar: TypeAlias = "str | int | float | bool | None"


class Position(NamedTuple):
    """Where something was written; line and column count from 1, 0 means the source has no places (a dict)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


class Node:
    """One value and its place. Containers hold nodes; `keys_at` has the places of an object's keys."""

    __slots__ = ("at", "keys_at", "value")

    def __init__(
        self,
        value: Scalar | list[Node] | dict[str, Node],
        at: Position,
        keys_at: dict[str, Position] | None = None,
    ) -> None:
        self.value = value
        self.at = at
        self.keys_at: dict[str, Position] = {} if keys_at is None else keys_at

    @property
    def members(self) -> dict[str, Node] | None:
        """The members where this is an object."""
        return self.value if isinstance(self.value, dict) else None

    def plain(self) -> Any:
        """Returns the value without places: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(slots=True)
class Budget:
    """Counts what a parser has made, so that no input can ask for unbounded work."""

    source: str
    left: int = field(default=MAX_VALUES)

    def spend(self, depth: int, at: Position) -> None:
        """Takes one value at `depth`.

        Raises:
            ConfigError: the config is deeper or larger than any real one.
        """
        if depth > MAX_DEPTH:
            raise ConfigError(f"{at}: nested more than {MAX_DEPTH} deep; no config key is")
        self.left -= 1
        if self.left < 0:
            raise ConfigError(f"{at}: more than {MAX_VALUES:,} values; no config has that many")


def from_plain(value: Any, source: str) -> Node:
    """Makes a tree of a dict given in code.

    Raises:
        ConfigError: a key is no text, a value is nothing JSON can hold, or the nesting is too deep (or endless).
    """
    return _convert(value, Position(source), "", 0, Budget(source))


def _convert(value: Any, at: Position, path: str, depth: int, budget: Budget) -> Node:
    budget.spend(depth, at)
    if isinstance(value, Mapping):
        members: dict[str, Node] = {}
        for key, item in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                raise ConfigError(f"{at}: key {show(key)} in {place_name(path)} is no text")
            members[key] = _convert(item, at, join(path, key), depth + 1, budget)
        return Node(members, at, dict.fromkeys(members, at))
    if isinstance(value, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return Node([_convert(item, at, f"{path}[{i}]", depth + 1, budget) for i, item in enumerate(items)], at)
    if isinstance(value, Enum):
        return _convert(value.value, at, path, depth, budget)
    if value is None or isinstance(value, (str, bool, int, float)):
        return Node(value, at)
    if isinstance(value, os.PathLike):
        return _convert(os.fspath(cast("os.PathLike[Any]", value)), at, path, depth, budget)
    if type(value).__name__ == "dtype":  # torch's, which is not imported here
        return Node(str(value), at)
    scalar = getattr(value, "item", None)  # a tensor or numpy scalar with one element
    if callable(scalar) and getattr(value, "ndim", None) == 0:
        return _convert(scalar(), at, path, depth, budget)
    raise ConfigError(f"{at}: `{path}` is of type {type(value).__name__}; expected a value that JSON can hold")


def join(path: str, key: str) -> str:
    """`a.b` and `c` -> `a.b.c`."""
    return f"{path}.{key}" if path else key


def place_name(path: str) -> str:
    """How a message names the object at `path`."""
    return f"`{path}`" if path else "the config"


def show(value: Any) -> str:
    """A value as a message shows it: as JSON, cut to a readable length."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return printable(text, 60)


def printable(text: str, length: int) -> str:
    """Text from a file as a message may carry it: nothing that moves a cursor, at most `length` characters."""
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: length + 1])
    return text if len(text) <= length else text[: length - 3] + "..."
