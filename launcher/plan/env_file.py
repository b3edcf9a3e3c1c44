"""Files of variables, for `--env-file`: who may have written one, its text -> names and values. Expands nothing.

    file  := { line "\\n" }     line := [ ["export" blank+] NAME "=" VALUE ] [ blank* comment ]     comment := "#" any
    VALUE := "'" any but ' "'" | '"' any, with \\\\ \\" \\$ \\` \\n \\r \\t '"'
           | text that begins with no quote, to the end of the line or to a blank before "#"

Values in quotes may span lines. No shell reads them, so what a shell would expand is refused where it is not quoted
singly: a file that was written for one must not mean something else here. DeepSpeed's `.deepspeed_env` is such a file.

[Note: hidden values] What a file holds may be secret, so messages show a line with its values hidden, and of a value
no more than the one or two characters that are wrong.
"""

from __future__ import annotations

import os
import pwd
import re
import stat

from dsrun.errors import Problem, UsageError

from ..excerpts import Misread, point_at, quoted
from .environment import instead_of

#: DeepSpeed's file of variables for the ranks of all hosts, by the name that its clients import.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_MAX_BYTES = 1 << 20
_MOST_PROBLEMS = 20
_WRITABLE_BY_OTHERS = 0o022

_BLANKS = re.compile(r"[ \t]*")
_EXPORT = re.compile(r"export[ \t]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"[^\n]*")
_COMMENT = re.compile(r"(?<=[ \t])#")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"\\": "\\", '"': '"', "$": "$", "`": "`", "n": "\n", "r": "\r", "t": "\t"}
#: What a shell would put something else for.
_EXPANSION = re.compile(r"`|\$[A-Za-z0-9_({$@*#?!-]")
_EXAMPLE = "a line reads `NAME=value` or `export NAME='value'`"
_QUOTE_IT = "nothing is expanded here; put the value in single quotes if it is meant as it stands"


def read_env_file(path: str) -> dict[str, str]:
    """Reads a file of variables that the user named.

    Args:
        path: a file, a link to one, or a pipe such as the shell's `<(...)`.

    Returns:
        values by name; bytes that are no UTF-8 as surrogate escapes.

    Raises:
        UsageError: it is missing or not to be trusted, or carries all that is wrong in it.
    """
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode) and not path.startswith(("/dev/", "/proc/")):
            # Opening one waits until somebody writes, which may be never; the pipes of a shell have a writer.
            raise UsageError(f"{path} is a named pipe; expected a file of variables", hint="`<(command)` works")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            # Of the file that is read, not of the name, which may have come to mean another.
            _require_trusted(path, os.fstat(descriptor))
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        hint = "`--env-file` wants the path of a file of `NAME=value` lines"
        raise UsageError(f"{path}: cannot read this file of variables: {error.strerror}", hint=hint) from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path}: a file of variables is smaller than 1 MiB", hint="is it another file?")
    return parse_env_file(data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape"), name=path)


def _require_trusted(path: str, status: os.stat_result) -> None:
    """Whoever can write the file can run code as this user, by way of LD_PRELOAD or PYTHONPATH."""
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{path}: belongs to {_user(status.st_uid)}, who could set any variable of your ranks",
            hint="copy it to a file of your own",
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(
            f"{path}: other users can write this file (mode {mode:04o}), and so set any variable of your ranks",
            hint=f"chmod go-w {path}",
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def parse_env_file(text: str, *, name: str) -> dict[str, str]:
    """Parses the text of a file of variables.

    Args:
        text: the whole file; lines end in LF or CRLF.
        name: name of the file in messages.

    Raises:
        UsageError: carries a problem for each thing that is wrong, with line and column.
    """
    reader = _Reader(text, name)
    reader.read()
    if reader.problems:
        raise UsageError.of(reader.problems)
    return reader.values


class _Reader:
    """Goes through a text once."""

    def __init__(self, text: str, name: str) -> None:
        self.values: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._text = text
        self._name = name
        self._lines: dict[str, int] = {}
        #: By the start of a line: where its value begins.
        self._shown_to: dict[int, int] = {}

    def read(self) -> None:
        """Fills `values` and `problems`."""
        end = 0
        while end < len(self._text) and len(self.problems) < _MOST_PROBLEMS:
            start = end
            try:
                end = self._read_line(start)
            except Misread as misread:
                self._report(misread)
                # Where a value was not understood, the next line is the next thing that may be.
                end = _end(_LINE, self._text, misread.start)
            end += 1

    def _read_line(self, start: int) -> int:
        """Reads from the start of a line to its end, or to that of the value which begins on it; returns where that is.

        Raises:
            Misread: its offset counts from the start of the text.
        """
        text = self._text
        begin = _end(_BLANKS, text, start)
        if text[begin : begin + 1] in ("", "\n", "\r", "#"):
            return _end(_LINE, text, begin)
        begin = _end(_EXPORT, text, begin)
        named = _NAME.match(text, begin)
        after = begin if named is None else named.end()
        if named is None or text[after : after + 1] != "=":
            raise self._no_assignment(start, begin, after)
        self._shown_to[start] = after + 1
        value, end = self._read_value(after + 1)
        if (instead := instead_of(named[0])) is not None:
            message = f"`{named[0]}` is dsrun's to set"
            self._report(Misread(message, instead, start=begin, width=len(named[0])))
        elif (line := self._lines.get(named[0])) is not None:
            message = f"`{named[0]}` has a value on line {line} already"
            self._report(Misread(message, "give each variable one value", start=begin, width=len(named[0])))
        self._lines.setdefault(named[0], self._place(begin)[0])
        self.values[named[0]] = value
        return end

    def _no_assignment(self, start: int, begin: int, after: int) -> Misread:
        """Says what is wrong with a line that does not begin with `NAME=`."""
        rest = self._text[after : _end(_LINE, self._text, after)].rstrip("\r")
        if after > begin and (blanks := re.match(r"[ \t]+=", rest)) is not None:
            self._shown_to[start] = after + blanks.end()
            return Misread("no blanks are allowed around `=`", _EXAMPLE, start=after, width=1)
        if after > begin and not rest.strip(" \t"):
            hint = "write `NAME=value`, or leave it to `--env NAME`, which copies the value from here"
            return Misread("there is no `=`, and so no value", hint, start=after, width=1)
        if "=" in rest:
            hint = "names are made of letters, digits and `_`, and do not begin with a digit"
            return Misread("this is no name of a variable", hint, start=begin, width=after - begin + rest.index("="))
        hint = f"{_EXAMPLE}; a value that spans lines stands in quotes"
        return Misread("this line is not understood", hint, start=begin, width=1)

    def _read_value(self, start: int) -> tuple[str, int]:
        """Reads a value; returns it and where its last line ends."""
        text = self._text
        quote = text[start : start + 1]
        if quote not in ("'", '"'):
            end = _end(_LINE, text, start)
            comment = _COMMENT.search(text, start, end)
            value = text[start : end if comment is None else comment.start()].rstrip("\r").rstrip(" \t")
            self._refuse(_EXPANSION, value, start)
            self._refuse_nul(value, start)
            return value, end
        match = (_SINGLE if quote == "'" else _DOUBLE).match(text, start)
        if match is None:
            self._report(Misread(f"the quote {quote} has no end", "close it", start=start, width=1))
            # What follows may be part of the value, and would be misread for lines.
            return "", len(text)
        self._refuse_nul(match[1], start + 1)
        value = match[1] if quote == "'" else self._unescaped(match[1], start + 1)
        end = _end(_BLANKS, text, match.end())
        if text[end : end + 1] not in ("", "\n", "\r", "#"):
            hint = "quote all of a value, or nothing of it"
            raise Misread("a value ends with its quote", hint, start=match.end(), width=1)
        return value, _end(_LINE, text, end)

    def _unescaped(self, body: str, start: int) -> str:
        for match in _ESCAPE.finditer(body):
            if match[1] not in _ESCAPES:
                hint = 'in double quotes there are \\\\ \\" \\$ \\` \\n \\r \\t; single quotes keep all as it is'
                shown = quoted(match[0]) if match[1].isprintable() else "a backslash at the end of a line"
                self._report(Misread(f"{shown} stands for nothing", hint, start=start + match.start(), width=2))
        # Of the same length, so that places stay what they are.
        self._refuse(_EXPANSION, _ESCAPE.sub("\\\\_", body), start)
        return _ESCAPE.sub(lambda match: _ESCAPES.get(match[1], ""), body)

    def _refuse(self, pattern: re.Pattern[str], value: str, start: int) -> None:
        if (match := pattern.search(value)) is not None:
            shown = "a back-tick" if match[0] == "`" else quoted(match[0][:2])
            at = start + match.start()
            self._report(Misread(f"{shown} is what a shell would expand", _QUOTE_IT, start=at, width=len(match[0])))

    def _refuse_nul(self, value: str, start: int) -> None:
        if (at := value.find("\0")) >= 0:
            hint = "delete it; is the file UTF-16 text? Save it as UTF-8"
            self._report(Misread("no variable can hold a NUL byte", hint, start=start + at, width=1))

    def _report(self, misread: Misread) -> None:
        line, column = self._place(misread.start)
        width = misread.width or 1
        first = misread.start - column + 1
        written = self._text[first : _end(_LINE, self._text, first)].rstrip("\r")
        # See [Note: hidden values].
        known = self._shown_to.get(first, first) - first
        shown = "".join(
            char if index < known or char in " \t" or column - 1 <= index < column - 1 + min(width, 2) else "*"
            for index, char in enumerate(written)
        )
        self.problems.append(
            point_at(
                f"{self._name}:{line}:{column}",
                shown,
                column=column,
                width=width,
                message=misread.message,
                hint=misread.hint,
            )
        )

    def _place(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, from 1."""
        before = self._text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    return start if match is None else match.end()
