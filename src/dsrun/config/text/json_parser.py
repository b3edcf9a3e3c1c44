"""JSON text to a tree with places, in one pass, with bounded depth and size.

Accepts what people have in their files, with hjson's meaning: `//`, `#` and `/* */` comments, trailing commas, none at
the end of a line, keys without quotes, single quotes, no braces around the whole, and text without quotes that has its
line to itself. Refuses what hjson would quietly turn into something else: text without quotes beside a comma, a comment
or a bracket, which it takes for part of the text; Python's `True`, which becomes a text there; keys that are there
twice. Numbers are JSON's or Python's: hjson makes texts of `NaN`, `Infinity` and `.5`, which programs write.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import NoReturn

from dsrun.config.text.tree import Budget, Node, Position, printable
from dsrun.errors import ConfigError

_BLANK = re.compile(r"(?:[ \t\r\n\ufeff\xa0]+|//[^\n]*|#[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"')
_SINGLE_QUOTED = re.compile(r"'(?:[^'\\\n]|\\[^\n])*'")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"-?[A-Za-z_$][\w$.-]*")
#: A value without quotes that nothing else can be meant by: words, paths, versions; the rest of its line is blank.
_QUOTELESS = re.compile(r"(?![^\n]*//)[A-Za-z_./~$][\w./~$@+=-]*(?:[ \t]+[\w./~$@+=-]+)*(?=[ \t\r]*(?:\n|\Z))")
_KEY_AND_COLON = re.compile(r"(?:\"(?:[^\"\\\n]|\\[^\n])*\"|'(?:[^'\\\n]|\\[^\n])*'|[A-Za-z_$][\w$.-]*)[ \t]*:")
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
#: Spellings of other languages, and JSON's.
_FOREIGN = {"True": "true", "False": "false", "None": "null", "nan": "NaN", "inf": "Infinity", "undefined": "null"}


def parse_json(text: str, source: str) -> Node:
    """Parses the whole text as one value.

    Args:
        text: the JSON text.
        source: prefix of the places in messages: a file name or `<inline>`.

    Raises:
        ConfigError: the text is malformed; the message has line, column and the line itself with a caret.
    """
    return _Parser(text, source).document()


class _Parser:
    """Recursive descent; recursion is bounded by the budget's depth."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._offset = 0
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._budget = Budget(source)

    def document(self) -> Node:
        self._skip_blank()
        if self._offset == len(self._text):
            raise ConfigError(f"{self._source}: the file is empty; expected a JSON object", hint=_SMALLEST)
        node = self._without_braces() if _KEY_AND_COLON.match(self._text, self._offset) else self._value(0)
        self._skip_blank()
        if self._offset < len(self._text):
            self._fail(f"expected the end of the file, found {self._found()}")
        return node

    def _value(self, depth: int) -> Node:
        at = self._at(self._offset)
        self._budget.spend(depth, at)
        char = self._peek()
        if char == "{":
            return self._object(depth, at)
        if char == "[":
            return self._array(depth, at)
        if self._text.startswith("'''", self._offset):
            self._fail("texts of several lines in ''' are not read here", hint="write the text in quotes, on one line")
        if char in ("'", '"'):
            return Node(self._string(), at)
        if number := _NUMBER.match(self._text, self._offset):
            self._offset = number.end()
            return Node(self._number(number[0], number.start()), at)
        word = _WORD.match(self._text, self._offset)
        is_known = word is not None and (word[0] in _WORDS or word[0] in _FOREIGN)
        if not is_known and (text := _QUOTELESS.match(self._text, self._offset)):
            self._offset = text.end()
            return Node(text[0], at)
        if word is not None:
            return Node(self._word(word[0], word.end()), at)
        self._fail(f"expected a value, found {self._found()}")

    def _without_braces(self) -> Node:
        """Takes the members of an object up to the end of the text."""
        at = self._at(self._offset)
        self._budget.spend(0, at)
        return self._members(0, at, self._offset, closing="")

    def _object(self, depth: int, at: Position) -> Node:
        opened = self._offset
        self._offset += 1
        return self._members(depth, at, opened, closing="}")

    def _members(self, depth: int, at: Position, opened: int, *, closing: str) -> Node:
        members: dict[str, Node] = {}
        keys_at: dict[str, Position] = {}
        while True:
            self._skip_blank()
            if self._peek() == closing:
                self._offset += len(closing)
                return Node(members, at, keys_at)
            key_offset = self._offset
            key = self._key(opened)
            key_at = self._at(key_offset)
            if key in members:
                first = keys_at[key]
                self._fail(
                    f"key `{printable(key, 60)}` is here twice; first on line {first.line}, column {first.column}",
                    key_offset,
                )
            self._skip_blank()
            self._expect(":", f"expected `:` after key `{printable(key, 60)}`")
            self._skip_blank()
            members[key] = self._value(depth + 1)
            keys_at[key] = key_at
            self._separator(closing, opened)

    def _array(self, depth: int, at: Position) -> Node:
        opened = self._offset
        self._offset += 1
        items: list[Node] = []
        while True:
            self._skip_blank()
            if self._peek() == "]":
                self._offset += 1
                return Node(items, at)
            if self._peek() == "":
                self._fail(f"expected a value or `]`, found {self._found()}; the list opened {self._opened(opened)}")
            items.append(self._value(depth + 1))
            self._separator("]", opened)

    def _separator(self, closing: str, opened: int) -> None:
        """Takes a comma, or leaves the closing bracket for the caller."""
        end_of_value = self._offset
        self._skip_blank()
        if self._peek() == ",":
            self._offset += 1
        elif self._peek() != closing:
            if self._peek() == "":
                kind = "object" if closing == "}" else "list"
                self._fail(
                    f"expected `,` or `{closing}`, found {self._found()}; the {kind} opened {self._opened(opened)}"
                )
            # The end of a line separates as well as a comma; what follows has to be a key or a value, which is next.
            if "\n" not in self._text[end_of_value : self._offset]:
                expected = f"`,` or `{closing}`" if closing else "`,` or a new line"
                self._fail(f"expected {expected} after this value, found {self._found()}")

    def _key(self, opened: int) -> str:
        char = self._peek()
        if char in ("'", '"'):
            return self._string()
        if word := _WORD.match(self._text, self._offset):
            self._offset = word.end()
            return word[0]
        if char == "":
            self._fail(f"expected a key or `}}`, found {self._found()}; the object opened {self._opened(opened)}")
        self._fail(f"expected a key or `}}`, found {self._found()}")

    def _string(self) -> str:
        start = self._offset
        single = self._peek() == "'"
        match = (_SINGLE_QUOTED if single else _STRING).match(self._text, start)
        if match is None:
            self._fail("this text is not closed on its line")
        self._offset = match.end()
        token = match[0]
        if single:
            inner = re.sub(r"\\'|\"", lambda found: "'" if found[0] == "\\'" else '\\"', token[1:-1])
            token = f'"{inner}"'
        try:
            text = json.loads(token, strict=False)
        except ValueError:
            self._fail("this text has an escape that JSON does not know", start)
        if _SURROGATE.search(text):
            self._fail("this text has half of a surrogate pair, which is no character", start)
        return text

    def _number(self, token: str, start: int) -> int | float:
        if len(token) > 400:
            self._fail(f"this number has {len(token)} characters; expected at most 400", start)
        return int(token) if token.lstrip("-").isdigit() else float(token)

    def _word(self, word: str, end: int) -> bool | float | None:
        if word in _WORDS:
            self._offset = end
            return _WORDS[word]
        if word in _FOREIGN:
            self._fail(f"expected a value, found `{word}`", hint=f"JSON writes `{_FOREIGN[word]}`")
        self._fail(f"expected a value, found `{word[:40]}`", hint=f'put text in quotes: "{word[:40]}"')

    def _skip_blank(self) -> None:
        blank = _BLANK.match(self._text, self._offset)
        assert blank is not None, "the pattern matches the empty text"
        self._offset = blank.end()
        if self._text.startswith("/*", self._offset):
            self._fail("this comment is not closed; expected `*/`")

    def _peek(self) -> str:
        return self._text[self._offset : self._offset + 1]

    def _expect(self, char: str, otherwise: str) -> None:
        if self._peek() != char:
            self._fail(f"{otherwise}, found {self._found()}")
        self._offset += 1

    def _found(self) -> str:
        char = self._peek()
        if char == "":
            return "the end of the file"
        return f"`{char}`" if char.isprintable() else f"character U+{ord(char):04X}"

    def _opened(self, offset: int) -> str:
        at = self._at(offset)
        return f"on line {at.line}, column {at.column}"

    def _at(self, offset: int) -> Position:
        line = bisect_right(self._line_starts, offset)
        return Position(self._source, line, offset - self._line_starts[line - 1] + 1)

    def _fail(self, message: str, offset: int | None = None, *, hint: str | None = None) -> NoReturn:
        at = self._at(self._offset if offset is None else offset)
        raise ConfigError(f"{at}: {message}\n{self._excerpt(at)}", hint=hint)

    def _excerpt(self, at: Position) -> str:
        """The offending line with a caret under the column; a long line is cut around it."""
        start = self._line_starts[at.line - 1]
        line = self._text[start : start + 100_000].split("\n", 1)[0].rstrip("\r").replace("\t", " ")
        column = min(at.column - 1, len(line))
        first = max(0, column - 60)
        shown = "".join(char if char.isprintable() else "?" for char in line[first : first + 100])
        gutter = f"  {at.line} | "
        return f"{gutter}{shown}\n{' ' * (len(gutter) - 2)}| {' ' * (column - first)}^"


_SMALLEST = 'the smallest config is {"train_micro_batch_size_per_gpu": 1}'
