"""Descriptions of arguments and attributes: each is a noun phrase that stands alone, for a reader may see it alone."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("launcher", "runtime", "src/dsrun", "scripts", "tests/support")
SOURCES = sorted(
    path for top in TOPS for path in (ROOT / top).rglob("*.py") if not path.is_relative_to(ROOT / "src/dsrun/launcher")
)
#: Words that no noun phrase begins with.
BEGINNINGS = re.compile(
    r"(of|what|where|how|as|which|whose|why|whom?|when|it|they|likewise|see|told|asked|called|gets|makes|returns|says"
    r"|has|keeps|gives|tells|takes|hears)\b",
    re.IGNORECASE,
)
ENTRY = re.compile(r"    \*{0,2}(\w+)(?: \([^)]*\))?: +(.*)")


def documented(source: str) -> Iterator[str]:
    """Docstrings of the classes and functions of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield inspect.cleandoc(text)


def descriptions(docstring: str) -> Iterator[tuple[str, str]]:
    """(line, beginning of the description) of each entry of Args and Attributes; (line, "") for one without a name."""
    inside = False
    for line in docstring.splitlines():
        if line in ("Args:", "Attributes:"):
            inside = True
        elif not line.startswith("    "):
            inside = False
        elif inside and not line.startswith("     "):
            found = ENTRY.fullmatch(line)
            yield line.strip(), found.group(2) if found is not None else ""


def faults_of(source: str) -> list[str]:
    """Descriptions that do not stand alone, and lines of a section that describe nothing."""
    faults: list[str] = []
    for docstring in documented(source):
        for line, text in descriptions(docstring):
            if not text or BEGINNINGS.match(text):
                faults.append(line)
    return faults


def test_a_fragment_and_a_line_without_a_name_are_found() -> None:
    source = '''
def f(host, rank, size):
    """Does it.

    Args:
        host: of the rank.
        rank: number of the rank
            of which this is a second line.
        size: likewise.
    that ran in here
        and here.
    """
'''
    assert faults_of(source) == ["host: of the rank.", "size: likewise."]
    assert faults_of('def f(a):\n    """Does it.\n\n    Args:\n        a: size.\n        and more.\n    """') == [
        "and more."
    ]


@pytest.mark.parametrize("top", TOPS)
def test_descriptions_stand_alone(top: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in SOURCES
        if path.is_relative_to(ROOT / top)
        for fault in faults_of(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "begin with a noun: what is it?"
