"""Hostfile text -> `HostSpec`s. Reads DeepSpeed's `host slots=N` lines; says nothing about which hosts are used.

    file := { line "\\n" }        line := [HOST blank+ "slots=" DIGITS] [blank* "#" any]

Stricter than DeepSpeed where DeepSpeed guesses: a tail after the slots, a host without slots, a second line for the
same host and `slots=0` are errors. Every bad line is reported at once, as file:line:column with a caret under it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import HostfileError, Problem

from .hosts import HostSpec

#: More ranks than this on one host are a typing error, not a machine.
MAX_SLOTS = 4096
_MAX_BYTES = 4 << 20

# Names reach ssh and log tags: nothing that reads as an option, a shell word or a path may pass.
_HOST = re.compile(r"(?![-.])[A-Za-z0-9._\[\]:-]+")
_WORD = re.compile(r"[^ \t]+")
_SLOTS = re.compile(r"slots=([0-9]{1,9})")
_EXAMPLE = "a line reads `worker-0 slots=4`"


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    column: int


def read_hostfile(path: Path) -> tuple[HostSpec, ...]:
    """Reads and parses a hostfile.

    Args:
        path: the file as the user named it; messages name it the same way.

    Returns:
        the hosts in the order of the file; never empty.

    Raises:
        HostfileError: the file cannot be read, or lines are wrong. A missing file never means "run here".
    """
    try:
        if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):
            # Opening one waits until somebody writes, which may be never; the pipes of a shell have a writer.
            raise HostfileError(f"{path} is a named pipe; expected a hostfile")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise HostfileError(
            f"{path}: the hostfile cannot be read: {(error.strerror or str(error)).lower()}",
            hint="leave `--hostfile` out to run on this machine alone",
        ) from error
    if len(data) > _MAX_BYTES:
        raise HostfileError(f"{path} has more than {_MAX_BYTES >> 20} MiB; no hostfile does")
    return parse_hostfile(data.decode("utf-8-sig", errors="replace"), name=str(path))


def parse_hostfile(text: str, *, name: str) -> tuple[HostSpec, ...]:
    """Parses the text of a hostfile.

    Args:
        text: the whole file; line ends may be LF or CRLF.
        name: what messages call the file.

    Returns:
        the hosts in the order of the file; never empty.

    Raises:
        HostfileError: carries one problem for each bad line.
    """
    hosts: dict[str, HostSpec] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = raw.removesuffix("\r")
        words = [_Word(match.group(), match.start() + 1) for match in _WORD.finditer(line.partition("#")[0])]
        if not words:
            continue
        parsed = _parse_line(words, end_column=words[-1].column + len(words[-1].text))
        if isinstance(parsed, _Fault):
            problems.append(parsed.at(name, number, line))
            continue
        host, slots = parsed
        if host in hosts:
            fault = _Fault(words[0], f"host `{host}` stands on line {lines[host]} already", "give each host one line")
            problems.append(fault.at(name, number, line))
            continue
        hosts[host] = HostSpec(name=host, slots=slots, source=f"{name}:{number}")
        lines[host] = number
    if not hosts and not problems:
        problems.append(Problem(f"{name}: the hostfile names no host", _EXAMPLE))
    if problems:
        raise HostfileError.of(problems)
    return tuple(hosts.values())


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with one word of a line."""

    word: _Word
    message: str
    hint: str

    def at(self, name: str, number: int, line: str) -> Problem:
        """Returns the problem with its place and the line itself, a caret under the word."""
        shown = "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in line)
        caret = " " * (self.word.column - 1) + "^" + "~" * (len(self.word.text) - 1)
        return Problem(f"{name}:{number}:{self.word.column}: {self.message}\n  {shown}\n  {caret}", self.hint)


def _parse_line(words: list[_Word], *, end_column: int) -> tuple[str, int] | _Fault:
    host = words[0]
    if _HOST.fullmatch(host.text) is None:
        return _Fault(host, f"`{_shown(host.text)}` is no host name", "use letters, digits and . - _ : [ ]")
    if len(words) == 1:
        return _Fault(_Word(" ", end_column), f"host `{host.text}` has no `slots=N`", _EXAMPLE)
    slots = words[1]
    match = _SLOTS.fullmatch(slots.text)
    if match is None:
        return _Fault(slots, f"`{_shown(slots.text)}` is not understood; expected `slots=N`", _EXAMPLE)
    count = int(match.group(1))
    if not 1 <= count <= MAX_SLOTS:
        way_out = "comment the line out to leave the host out" if count == 0 else "slots are the ranks a host takes"
        return _Fault(slots, f"`slots` is {count}; expected 1 to {MAX_SLOTS}", way_out)
    if len(words) > 2:
        return _Fault(words[2], f"`{_shown(words[2].text)}` after the slots is not understood", _EXAMPLE)
    return host.text, count


def _shown(text: str) -> str:
    """Keeps control characters of a broken file off the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
