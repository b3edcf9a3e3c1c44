"""YAML text to a tree with places, built from parser events so that depth and aliases are bounded.

Plain scalars follow YAML 1.2's core schema (`5e8` and `1e-4` are numbers, `010` is ten); `yes`, `no`, `on` and `off`
are flags, as PyYAML reads them. Merge keys, tags and more than one document are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dsrun.config.text.tree import Budget, Node, Position, Scalar, printable
from dsrun.errors import ConfigError

_INT = re.compile(r"[+-]?\d+")
_FLOAT = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    ".nan": float("nan"),
    ".inf": float("inf"),
    "-.inf": float("-inf"),
}
_CORE = "tag:yaml.org,2002:"
_CORE_TYPES = ("str", "int", "float", "bool", "null", "map", "seq")


def parse_yaml(text: str, source: str) -> Node:
    """Parses one YAML document.

    Args:
        text: the YAML text.
        source: prefix of the places in messages, such as a file name.

    Raises:
        ConfigError: the text is malformed, holds several documents, or uses tags or merge keys.
    """
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _document(text, source, loader)
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        at = Position(source, mark.line + 1, mark.column + 1) if mark else Position(source)
        raise ConfigError(f"{at}: malformed YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        reason = str(getattr(error, "reason", "unreadable character"))
        raise ConfigError(f"{source}: malformed YAML: {reason}") from error


def _document(text: str, source: str, loader: Any) -> Node:
    try:
        return _Builder(yaml.parse(text, Loader=loader), source).document()
    except yaml.MarkedYAMLError as error:
        # Since PyYAML 6.0.4 the parser in C reads ahead to its own limit of 1000 levels before it tells of the first
        # one. The one in Python has none, so that ours is reached, and told with its place.
        if loader is yaml.SafeLoader or "nesting depth" not in str(error.problem):
            raise
        return _Builder(yaml.parse(text, Loader=yaml.SafeLoader), source).document()


class _Builder:
    def __init__(self, events: Iterator[Any], source: str) -> None:
        self._events = events
        self._source = source
        self._budget = Budget(source)
        self._anchors: dict[str, Node] = {}

    def document(self) -> Node:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                continue
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise ConfigError(f"{self._at(event)}: a second YAML document starts here; expected one")
                continue
            root = self._node(event, 0)
        if root is None or root.value is None:
            raise ConfigError(f"{self._source}: the file is empty; expected a YAML mapping")
        return root

    def _node(self, event: Any, depth: int) -> Node:
        at = self._at(event)
        self._budget.spend(depth, at)
        if isinstance(event, yaml.AliasEvent):
            return self._copy(self._anchored(event, at), depth)
        self._refuse_tag(event.tag, at)
        if isinstance(event, yaml.ScalarEvent):
            node = Node(_scalar(event.value, plain=bool(event.implicit[0])), at)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node(list(self._items(depth)), at)
        else:
            node = self._mapping(at, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _refuse_tag(self, tag: str | None, at: Position) -> None:
        if tag in (None, "!") or (tag.startswith(_CORE) and tag.removeprefix(_CORE) in _CORE_TYPES):
            return
        shown = printable(tag.replace(_CORE, "!!"), 60)
        raise ConfigError(f"{at}: YAML tag `{shown}` is not read; write the plain value")

    def _items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, at: Position, depth: int) -> Node:
        members: dict[str, Node] = {}
        keys_at: dict[str, Position] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_at = self._at(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise ConfigError(f"{key_at}: expected a plain key")
            key = event.value
            if key == "<<":
                raise ConfigError(f"{key_at}: YAML merge keys are not read; write the keys out")
            if key in members:
                first = keys_at[key]
                where = f"first on line {first.line}, column {first.column}"
                raise ConfigError(f"{key_at}: key `{printable(key, 60)}` is here twice; {where}")
            members[key] = self._node(next(self._events), depth + 1)
            keys_at[key] = key_at
        return Node(members, at, keys_at)

    def _anchored(self, event: Any, at: Position) -> Node:
        if event.anchor not in self._anchors:
            raise ConfigError(f"{at}: YAML alias `*{event.anchor}` has no anchor before it")
        return self._anchors[event.anchor]

    def _copy(self, node: Node, depth: int) -> Node:
        """Expands an alias, paying for every value, so that nested aliases cannot explode."""
        self._budget.spend(depth, node.at)
        if isinstance(node.value, dict):
            return Node({k: self._copy(v, depth + 1) for k, v in node.value.items()}, node.at, dict(node.keys_at))
        if isinstance(node.value, list):
            return Node([self._copy(item, depth + 1) for item in node.value], node.at)
        return Node(node.value, node.at)

    def _at(self, event: Any) -> Position:
        return Position(self._source, event.start_mark.line + 1, event.start_mark.column + 1)


def _scalar(text: str, *, plain: bool) -> Scalar:
    if not plain:
        return text
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    if len(text) <= 400:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
    return text
