"""The JSON and YAML forms of a hostfile: a tree with places -> entries. Knows the shapes; not what the keys mean.

    [{"host": "worker-0", "slots": 4, "env": {"NCCL_DEBUG": "WARN"}}, ...]      a list of objects
    {"worker-[0-3]": 8, "worker-4": {"gpus": [0, 2], "port": 2222}}             hosts by name

The parsers are those of the training config: bounded in depth, values and aliases, and keys given twice are refused.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from dsrun.errors import ConfigError, HostfileError

from ..excerpts import Place, quoted
from .fields import Entry, Fault, Field

if TYPE_CHECKING:
    from dsrun.config.text.tree import Node, Position

Form = Literal["lines", "json", "yaml"]

#: The YAML parser may be the slow one in Python.
_MAX_YAML_CHARS = 1 << 18

# `[{` and `["` begin a list of JSON, `[::1]` and `[fd00::4]:8` a line.
_JSON_START = re.compile(r"\{|\[\s*(?:[{\"\]]|$)")
_YAML_START = re.compile(r"---(?:\s|$)|-(?:\s|$)|[^\s#]+:(?:\s|$)|%YAML")
_COMMENTS = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*")
_SHAPE = 'expected `[{"host": "worker-0", "slots": 4}]` or `{"worker-0": 4}`'


def find_form(text: str, *, name: str) -> Form:
    """Tells which form a hostfile has: by the ending of its name, else by its first word."""
    ending = PurePath(name).suffix.lower()
    if ending == ".json":
        return "json"
    if ending in (".yaml", ".yml"):
        return "yaml"
    match = _COMMENTS.match(text)
    assert match is not None, "the pattern matches the empty text"
    if _JSON_START.match(text, match.end()):
        return "json"
    return "yaml" if _YAML_START.match(text, match.end()) else "lines"


def read_tree(text: str, *, name: str, form: Form) -> tuple[list[Entry], list[Fault]]:
    """Reads a hostfile in JSON or YAML.

    Args:
        text: the whole file.
        name: name of the hostfile in messages.
        form: `json` or `yaml`.

    Raises:
        HostfileError: the text is malformed, too large or too deep.
    """
    try:
        if form == "json":
            from dsrun.config.text.json_parser import parse_json

            root = parse_json(text, name)
        else:
            from dsrun.config.text.yaml_parser import parse_yaml

            if len(text) > _MAX_YAML_CHARS:
                raise HostfileError(
                    f"{name} has {len(text):,} characters of YAML; expected at most {_MAX_YAML_CHARS:,}",
                    hint="name hosts by ranges, `w[0-999]: 8`, or one a line: `w0 slots=8`",
                )
            root = parse_yaml(text, name)
    except ConfigError as error:
        raise HostfileError(str(error), hint=error.hint or _SHAPE) from error
    return _Reader(text).entries(root)


class _Reader:
    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self._faults: list[Fault] = []

    def entries(self, root: Node) -> tuple[list[Entry], list[Fault]]:
        found: list[Entry | None] = []
        if isinstance(root.value, dict):
            for host, node in root.value.items():
                found.append(self._named(host, root.keys_at[host], node))
        elif isinstance(root.value, list):
            found += [self._listed(node) for node in root.value]
        else:
            self._fault(root.at, "a hostfile is a list or an object", _SHAPE)
        return [entry for entry in found if entry is not None], self._faults

    def _named(self, host: str, at: Position, node: Node) -> Entry | None:
        """Reads `"worker-0": 4` and `"worker-0": {"slots": 4}`."""
        host_at = self._place(at, host)
        if (members := node.members) is not None:
            return self._entry(host, host_at, node, members)
        if node.value is None:
            return Entry(host, host_at, _place(at), ())
        slots = self._text(node, what=f"slots of {quoted(host)}")
        if slots is None:
            return None
        return Entry(host, host_at, host_at, (Field("slots", slots, host_at, self._place(node.at, slots)),))

    def _listed(self, node: Node) -> Entry | None:
        """Reads `{"host": "worker-0", "slots": 4}`."""
        if (members := node.members) is None:
            self._fault(node.at, "an entry of the list is no object", _SHAPE)
            return None
        host = members.get("host")
        if host is None:
            self._fault(node.at, "this object names no `host`", _SHAPE)
            return None
        if not isinstance(host.value, str):
            self._fault(host.at, "`host` is no text", "put the name in quotes")
            return None
        rest = {key: member for key, member in members.items() if key != "host"}
        return self._entry(host.value, self._place(host.at, host.value), node, rest)

    def _entry(self, host: str, host_at: Place, node: Node, members: dict[str, Node]) -> Entry:
        before = len(self._faults)
        fields = self._fields(node, members)
        return Entry(host, host_at, _place(node.at), fields, broken=len(self._faults) > before)

    def _fields(self, parent: Node, members: dict[str, Node]) -> tuple[Field, ...]:
        fields: list[Field] = []
        for key, node in members.items():
            key_at = self._place(parent.keys_at[key], key)
            if key == "env":
                fields += self._variables(node)
            elif key == "gpus" and isinstance(node.value, list):
                ids = [self._text(item, what="GPU") for item in node.value]
                text = ",".join(number for number in ids if number is not None)
                if None not in ids:
                    fields.append(Field(key, text, key_at, _place(node.at)))
            else:
                text = self._text(node, what=quoted(key))
                if text is not None:
                    fields.append(Field(key, text, key_at, self._place(node.at, text)))
        return tuple(fields)

    def _variables(self, node: Node) -> list[Field]:
        if (members := node.members) is None:
            self._fault(node.at, "`env` is no object", 'write `"env": {"NCCL_DEBUG": "WARN"}`')
            return []
        fields: list[Field] = []
        for name, value in members.items():
            text = self._text(value, what=f"variable {quoted(name)}")
            if text is not None:
                at = self._place(node.keys_at[name], name)
                fields.append(Field(f"env.{name}", text, at, self._place(value.at, text)))
        return fields

    def _text(self, node: Node, *, what: str) -> str | None:
        """Returns a scalar as the user wrote it; None after noting that it has no such text.

        Numbers count only where they read as they are written: `010` or `1e3` would reach a variable as another text.
        """
        value = node.value
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            written = self._lines[node.at.line - 1][node.at.column - 1 :]
            text = str(value)
            if written.startswith(text) and not re.match(r"[\w.+-]", written[len(text) : len(text) + 1]):
                return text
        kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "no plain text"
        self._fault(node.at, f"{what} is {kind}", "put the value in quotes")
        return None

    def _place(self, at: Position, text: str) -> Place:
        """The place of a text, inside its quotes where it has some and no escapes, so that offsets in it hold."""
        line = self._lines[at.line - 1] if 0 < at.line <= len(self._lines) else ""
        start = at.column - 1
        if line[start : start + 1] in ("'", '"') and line.startswith(text, start + 1):
            return Place(at.line, at.column + 1, max(1, len(text)))
        return Place(at.line, at.column, len(text) if line.startswith(text, start) else 0)

    def _fault(self, at: Position, message: str, hint: str) -> None:
        self._faults.append(Fault(_place(at), message, hint))


def _place(at: Position) -> Place:
    return Place(max(1, at.line), max(1, at.column), 0)
