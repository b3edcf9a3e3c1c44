"""A hostfile -> `HostSpec`s: reads it, finds its form, and puts the hosts together. Says nothing about which are used.

Every line that DeepSpeed reads without dropping a part of it means the same here; docs/guides/hostfiles.md has the
grammar. Everything wrong is reported at once, as file:line:column with the line and a caret under it.

[Note: a line a slot] The node files of PBS, OAR and `mpirun -machinefile` name a host on a line of its own for each of
its slots, and say nothing else. So where all lines are names alone and one stands there twice, lines are counted. Where
each stands there once, it may as well be a hostfile without its slots: `-n N` has to say.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from dsrun.errors import HostfileError, Problem

from ..excerpts import Place, listed, point_at
from .fields import Entry, Fault, Field, build_hosts
from .json_yaml_forms import find_form, read_tree
from .line_form import read_line
from .patterns import MAX_HOSTS, name_key, split_slots
from .spec import MAX_SLOTS as MAX_SLOTS
from .spec import HostSpec

_MAX_BYTES = 4 << 20
#: After so many problems a file is no hostfile, and nobody reads on.
_MOST_PROBLEMS = 200

_STDIN = "-"
_LINE_END = re.compile(r"\r\n?")
# Unprintable, or taken for a line end by some readers and not by others.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
#: `w0:2,w1:2`, which mpirun's `-H` takes.
_MPI_HOSTS = re.compile(r"[\w.-]+:[0-9]+|[\w.-]+(?::[0-9]+)?(?:,[\w.-]+(?::[0-9]+)?)+")
_EXAMPLE = "a line reads `worker-0 slots=4`"


def read_hostfile(path: Path, *, slots: int | None = None, stdin: BinaryIO | None = None) -> tuple[HostSpec, ...]:
    """Reads and parses a hostfile.

    Args:
        path: the file as the user named it; messages name it the same way. `-` is the standard input.
        slots: number of slots for hosts that name none; None refuses such hosts.
        stdin: stream to read for `-`; None means this process's own stdin.

    Returns:
        the hosts in the order of the file; never empty.

    Raises:
        HostfileError: the file cannot be read, or lines are wrong. A missing file never means "run here".
    """
    is_stdin = str(path) == _STDIN
    name = "<stdin>" if is_stdin else str(path)
    try:
        data = _read_stdin(stdin) if is_stdin else _read_file(path)
    except HostfileError:
        raise
    except (OSError, ValueError) as error:  # ValueError: closed, or a path with NUL
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise HostfileError(f"{name}: the hostfile cannot be read: {reason.lower()}", hint=_way_out(name)) from error
    if len(data) > _MAX_BYTES:
        raise HostfileError(
            f"{name} has more than {_MAX_BYTES >> 20} MiB; no hostfile does", hint="is it another file?"
        )
    return parse_hostfile(_decode(data, name), name=name, slots=slots)


def _way_out(name: str) -> str:
    """Returns what to do about a hostfile that is not there: its name may be what mpirun takes for hosts."""
    if _MPI_HOSTS.fullmatch(name) is not None:
        return f"`-H` takes a file, a host on each line: `-H <(echo {name} | tr , '\\n')`"
    return "leave `--hostfile` out to run on this machine alone"


def _read_file(path: Path) -> bytes:
    if path.is_fifo() and not str(path).startswith(("/dev/", "/proc/")):
        # Opening one waits until somebody writes, which may be never; the pipes of a shell have a writer.
        raise HostfileError(
            f"{path} is a named pipe; expected a hostfile", hint="`/dev/stdin`, `-` and `<(command)` work"
        )
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)


def _read_stdin(stdin: BinaryIO | None) -> bytes:
    # A process may be started without one; Python then has None.
    stream = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise HostfileError("<stdin>: there is no standard input to read the hostfile from", hint="name a file")
    return stream.read(_MAX_BYTES + 1)


def _decode(data: bytes, name: str) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise HostfileError(f"{name} is UTF-16 text; expected UTF-8", hint="save the file as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise HostfileError(
            f"{name}:{line}:{column}: byte 0x{data[error.start]:02x} is no UTF-8", hint="save the file as UTF-8"
        ) from error


def parse_hostfile(text: str, *, name: str, slots: int | None = None) -> tuple[HostSpec, ...]:
    """Parses the text of a hostfile.

    Args:
        text: the whole file; lines may end in LF, CRLF or CR.
        name: name of the file in messages. `.json`, `.yaml` and `.yml` decide its form; for other names the text does.
        slots: number of slots for hosts that name none; None refuses such hosts.

    Returns:
        the hosts in the order of the file; never empty.

    Raises:
        HostfileError: carries one problem for each thing that is wrong.
    """
    text = _LINE_END.sub("\n", text.removeprefix("\ufeff"))
    lines = text.split("\n")
    form = find_form(text, name=name)
    if form == "lines":
        entries, faults = _read_lines(lines)
        entries = _with_counted_slots(entries)
    elif faults := _forbidden(lines):
        entries = []
    elif text.strip():
        entries, faults = read_tree(text, name=name, form=form)
    else:
        entries = []
    hosts = _gather(entries, faults, name, slots=slots)
    if not hosts and not faults:
        raise HostfileError(f"{name}: the hostfile names no host", hint=_EXAMPLE)
    if faults:
        faults.sort(key=lambda fault: (fault.at.line, fault.at.column))
        problems = [_problem(fault, name, lines) for fault in faults[:_MOST_PROBLEMS]]
        if len(faults) >= _MOST_PROBLEMS:
            problems.append(Problem(f"{name}: these are the first {_MOST_PROBLEMS} problems", "is it another file?"))
        raise HostfileError.of(problems)
    return hosts


def _read_lines(lines: list[str]) -> tuple[list[Entry], list[Fault]]:
    entries: list[Entry] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        if found := _forbidden([line], number):
            faults += found
            continue
        entry, unclear = read_line(line, number=number)
        faults += unclear
        if entry is not None:
            entries.append(entry)
        if len(faults) >= _MOST_PROBLEMS:
            break
    return entries, faults


def _forbidden(lines: list[str], first: int = 1) -> list[Fault]:
    """Finds the first control character of each line."""
    found: list[Fault] = []
    for number, line in enumerate(lines, start=first):
        if (match := _FORBIDDEN.search(line)) is not None and len(found) < _MOST_PROBLEMS:
            message = f"character U+{ord(match[0]):04X} has no business in a hostfile"
            found.append(Fault(Place(number, match.start() + 1), message, "delete it; is it another file?"))
    return found


def _with_counted_slots(entries: list[Entry]) -> list[Entry]:
    """Makes one entry of all lines of a host, where lines are slots; see [Note: a line a slot]."""
    if any(entry.fields or entry.broken or split_slots(entry.host)[1] is not None for entry in entries):
        return entries
    counts = Counter(name_key(entry.host) for entry in entries)
    if len(counts) == len(entries):
        return entries
    first = {name_key(entry.host): entry for entry in reversed(entries)}
    return [
        replace(entry, fields=(Field("slots", str(counts[key]), entry.host_at, entry.host_at),))
        for entry in entries
        if first[key := name_key(entry.host)] is entry
    ]


def _gather(entries: list[Entry], faults: list[Fault], name: str, *, slots: int | None) -> tuple[HostSpec, ...]:
    """Builds the hosts of all entries in order; adds to `faults` what is wrong."""
    hosts: list[HostSpec] = []
    lines: dict[str, int] = {}
    for entry in entries:
        if len(faults) >= _MOST_PROBLEMS:
            break
        built, wrong = build_hosts(entry, source=f"{name}:{entry.host_at.line}", slots=slots)
        faults += wrong
        keys = [name_key(host.name) for host in built]
        again = [(host.name, lines[key]) for host, key in zip(built, keys, strict=True) if key in lines]
        if again:
            names = [host for host, _ in again]
            verb = "host {} stands" if len(names) == 1 else "hosts {} stand"
            message = f"{verb.format(listed(names))} on line {again[0][1]} already"
            faults.append(Fault(entry.host_at, message, "name each host once and add up its slots"))
        lines |= {key: entry.host_at.line for key in keys if key not in lines}
        hosts += built
        if len(hosts) > MAX_HOSTS:
            faults.append(Fault(entry.host_at, f"the file names more than {MAX_HOSTS} hosts", "is a range too long?"))
            break
    return tuple(hosts)


def _problem(fault: Fault, name: str, lines: list[str]) -> Problem:
    at = fault.at
    return point_at(
        f"{name}:{at.line}:{at.column}",
        lines[at.line - 1],
        column=at.column,
        width=at.width,
        message=fault.message,
        hint=fault.hint,
    )
