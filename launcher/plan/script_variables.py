"""Which variables the text of a script sets before it imports torch. Reads the text, runs nothing.

Finds names that are written out: `os.environ["A"] = ...`, `del`, `setdefault`, `update`, `pop`, `|=` and `os.putenv`.
What it cannot see (names that are computed, modules that the script imports) is seen in the rank, by `first_import`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

_MENTION = re.compile(rb"\b(environ|putenv|unsetenv)\b")


@dataclass(frozen=True, slots=True)
class VariableAssignment:
    """One place where a script sets a variable.

    Attributes:
        name: the variable.
        line: line number in the script, from 1.
        value: value that the variable is set to; None where the script does not write it out or deletes the variable.
    """

    name: str
    line: int
    value: str | None


def settings_before_torch(text: bytes) -> list[VariableAssignment]:
    """Returns what a script sets above the line that imports torch; all that it sets where no such line is certain.

    Args:
        text: the script; one that does not parse sets nothing.
    """
    # Most scripts set nothing, and parsing takes as long as the rest of the start.
    if _MENTION.search(text) is None:
        return []
    import ast

    with warnings.catch_warnings():
        # Python says what it thinks of the script's literals where it runs it.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
    torch_line = next(_lines_of_torch(tree.body), None)
    found = (setting for node in ast.walk(tree) for setting in _settings(node))
    return sorted(
        (setting for setting in found if torch_line is None or setting.line < torch_line),
        key=lambda setting: setting.line,
    )


def _lines_of_torch(body: list[ast.stmt]) -> Iterator[int]:
    """Yields the lines that import torch whenever the script runs: of no function, and under no condition."""
    import ast

    for statement in body:
        match statement:
            case ast.Import(names=names) if any(name.name.partition(".")[0] == "torch" for name in names):
                yield statement.lineno
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == "torch":
                yield statement.lineno
            case ast.Try() | ast.With():
                yield from _lines_of_torch(statement.body)
            case _:
                pass


def _settings(node: ast.AST) -> Iterator[VariableAssignment]:
    import ast

    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _subscript(target, value)
        case ast.AnnAssign(target=target, value=value):
            yield from _subscript(target, value)
        case ast.AugAssign(target=target, value=value):
            yield from _subscript(target, None)
            if _is_environ(target):
                yield from _mapping(value)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _subscript(target, None)
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault" | "pop"), args=[key, *rest]) if _is_environ(
            owner
        ):
            yield from _setting(key, rest[0] if rest else None)
        case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args, keywords=words) if _is_environ(owner):
            for argument in args:
                yield from _mapping(argument)
            for word in words:
                if word.arg is not None:
                    yield VariableAssignment(word.arg, word.lineno, _text(word.value))
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv"), args=[key, *rest]):
            yield from _setting(key, rest[0] if rest else None)
        case _:
            pass


def _is_environ(node: ast.AST) -> bool:
    import ast

    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
        case _:
            return False


def _subscript(target: ast.AST, value: ast.AST | None) -> Iterator[VariableAssignment]:
    import ast

    match target:
        case ast.Subscript(value=owner, slice=key) if _is_environ(owner):
            yield from _setting(key, value)
        case _:
            pass


def _mapping(node: ast.AST) -> Iterator[VariableAssignment]:
    import ast

    match node:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if key is not None:
                    yield from _setting(key, value)
        case ast.Call(func=ast.Name(id="dict"), keywords=words):
            for word in words:
                if word.arg is not None:
                    yield VariableAssignment(word.arg, word.lineno, _text(word.value))
        case _:
            pass


def _setting(key: ast.expr, value: ast.AST | None) -> Iterator[VariableAssignment]:
    name = _text(key)
    if name is not None:
        yield VariableAssignment(name, key.lineno, _text(value))


def _text(node: ast.AST | None) -> str | None:
    import ast

    match node:
        case ast.Constant(value=str(text)):
            return text
        case _:
            return None
