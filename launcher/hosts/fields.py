"""What may be said about a host, whatever form the hostfile has: words with places -> `HostSpec`s. Text only.

`KEYS` is the whole vocabulary beside the host itself; docs/guides/hostfiles.md explains each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..excerpts import Misread, Place, quoted
from .patterns import check_name, expand_names, format_ids, name_key, read_spans, split_slots
from .spec import MAX_SLOTS, HostSpec

#: Everything a line, object or mapping may say about a host. `env` carries the variable's name behind a dot.
KEYS = ("slots", "gpus", "addr", "port", "user", "python", "env")

_COUNT = re.compile(r"[0-9]{1,9}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_GPUS = "device ids read `gpus=0,2-3`"
_SLOTS = "a line reads `worker-0 slots=4`"


@dataclass(frozen=True, slots=True)
class Field:
    """One thing said about a host.

    Attributes:
        key: one of `KEYS`, or what the user wrote in place of it; `env.NAME` for a variable.
        value: value as text, with quotes and escapes undone.
        key_at: place of the key in the text.
        value_at: place of the value in the text.
    """

    key: str
    value: str
    key_at: Place
    value_at: Place


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a hostfile, or one object of it.

    Attributes:
        host: `[user@]name[:slots]`, the name perhaps with ranges.
        host_at: place of the host in the text.
        end_at: place at which a missing part of the entry would stand.
        fields: further fields of the entry, in order.
        broken: whether something was not understood already; what seems to be missing may stand there.
    """

    host: str
    host_at: Place
    end_at: Place
    fields: tuple[Field, ...]
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at one place of the hostfile."""

    at: Place
    message: str
    hint: str


def build_hosts(entry: Entry, *, source: str, slots: int | None = None) -> tuple[list[HostSpec], list[Fault]]:
    """Returns the hosts that an entry describes, none if anything is wrong with it, and what that is.

    Args:
        entry: the words and their places.
        source: file and line for `HostSpec.source`.
        slots: number of slots for a host that names none; None refuses such a host.
    """
    said = _Said()
    faults: list[Fault] = []
    names = _read_host(entry, said, faults)
    for field in entry.fields:
        if (fault := _read_field(field, said)) is not None:
            faults.append(fault)
    if not faults and not entry.broken:
        faults += _contradictions(said, names=len(names), end_at=entry.end_at, has_slots=slots is not None)
    if faults or entry.broken:
        return [], faults
    gpus = said.gpus
    return [
        HostSpec(
            name=name,
            slots=said.slots or len(gpus or ()) or slots or 0,
            source=source,
            port=said.port,
            user=said.user,
            addr=said.addrs[index] if said.addrs else None,
            python=said.python,
            gpus=gpus,
            env=dict(said.env),
        )
        for index, name in enumerate(names)
    ], []


class _Said:
    """What an entry has said so far."""

    def __init__(self) -> None:
        self.slots: int | None = None
        self.port: int | None = None
        self.user: str | None = None
        self.addrs: tuple[str, ...] | None = None
        self.python: str | None = None
        self.gpus: tuple[int, ...] | None = None
        self.env: dict[str, str] = {}
        self.places: dict[str, Place] = {}


def _read_host(entry: Entry, said: _Said, faults: list[Fault]) -> tuple[str, ...]:
    """Takes `[user@]name[:slots]` apart; returns the names, none where they are wrong."""
    user, at_sign, rest = entry.host.rpartition("@")
    offset = len(user) + len(at_sign)
    pattern, slots_at = split_slots(rest)

    def attempt(read: Callable[[], None], start: int, width: int) -> None:
        try:
            read()
        except Misread as misread:
            faults.append(_fault(misread, entry.host_at.part(start, width)))

    names: list[str] = []
    if at_sign:
        attempt(lambda: _set(said, "user", user, entry.host_at), 0, max(1, len(user)))
    attempt(lambda: names.extend(_names(pattern)), offset, max(1, len(pattern)))
    if slots_at is not None:
        count = rest[slots_at:]
        attempt(lambda: _set(said, "slots", count, entry.host_at), offset + slots_at, max(1, len(count)))
    return tuple(names)


def _names(pattern: str) -> tuple[str, ...]:
    names = expand_names(pattern)
    for name in names:
        try:
            check_name(name)
        except Misread as misread:
            if names == (pattern,):
                raise
            raise Misread(misread.message, misread.hint) from misread  # offsets in the pattern are others
    keys: set[str] = set()
    for name in names:
        if name_key(name) in keys:
            raise Misread(f"{quoted(pattern)} names {quoted(name)} twice", "name every host once")
        keys.add(name_key(name))
    return names


def _read_field(field: Field, said: _Said) -> Fault | None:
    head, _, variable = field.key.partition(".")
    if head not in KEYS or bool(variable) != (head == "env"):
        return Fault(field.key_at, *_unknown_key(field.key))
    if field.key in said.places:
        return Fault(field.key_at, f"`{field.key}` of this host is given twice", "say it once")
    if head == "env" and _VARIABLE.fullmatch(variable) is None:
        hint = "use letters, digits and `_`: `env.NAME=value`"
        return Fault(field.key_at, f"{quoted(variable)} is no name of a variable", hint)
    try:
        _set(said, field.key, field.value, field.key_at)
    except Misread as misread:
        return _fault(misread, field.value_at)
    return None


def _set(said: _Said, key: str, text: str, at: Place) -> None:
    """Reads one value and keeps it.

    Raises:
        Misread: it is not what the key takes.
    """
    match key:
        case "slots":
            said.slots = _number(text, key, low=1, high=MAX_SLOTS, hint=_slots_hint(text))
        case "port":
            said.port = _number(text, key, low=1, high=65535, hint="ssh listens on port 22 unless told otherwise")
        case "user":
            said.user = _user(text)
        case "addr":
            said.addrs = tuple(name.removeprefix("[").removesuffix("]") for name in _names(text))
        case "python":
            said.python = _python(text)
        case "gpus":
            said.gpus = _gpus(text)
        case _:
            said.env[key.removeprefix("env.")] = _env_value(text)
    said.places[key] = at


def _number(text: str, key: str, *, low: int, high: int, hint: str) -> int:
    is_count = _COUNT.fullmatch(text) is not None
    if not is_count or not low <= int(text) <= high:
        raise Misread(f"`{key}` is {text if is_count else quoted(text)}; expected {low} to {high}", hint)
    return int(text)


def _slots_hint(text: str) -> str:
    if text.strip("0") == "" and text:
        return "comment the host out to leave it out"
    return "slots are the ranks a host takes: one for each GPU"


def _user(text: str) -> str:
    if _USER.fullmatch(text) is None:
        raise Misread(f"{quoted(text)} is no user's name", "use letters, digits and `.` `-` `_`")
    return text


def _python(text: str) -> str:
    if not text or len(text) > 4096 or text[0] in "-~" or not text.isprintable():
        raise Misread(f"`python` is {quoted(text)}; expected a path", "write the interpreter's path on that host out")
    return text


def _gpus(text: str) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for span in read_spans(text, example=_GPUS):
        if span.last >= MAX_SLOTS:
            raise Misread(f"no host has a GPU {span.last}", _GPUS, start=span.start, width=span.width)
        for number in range(span.first, span.last + 1):
            if number in ids:
                raise Misread(f"GPU {number} is named twice", _GPUS, start=span.start, width=span.width)
            ids[number] = None
    return tuple(ids)


def _env_value(text: str) -> str:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise Misread("the value holds a character that no environment can", "variables hold any text but NUL")
    return text


def _unknown_key(key: str) -> tuple[str, str]:
    import difflib  # for mistakes alone

    head, _, variable = key.partition(".")
    if head == "env":
        return "`env` names no variable", "write `env.NAME=value`"
    if variable and head in KEYS:
        return f"{quoted(key)} is no key of a host: only `env` has names behind a dot", f"write `{head}=...`"
    message = f"{quoted(key)} is no key of a host"
    if key.lower() in ("max_slots", "max-slots"):
        return message, "leave it out: a host never takes more ranks than its slots"
    close = difflib.get_close_matches(head.lower(), KEYS, n=1, cutoff=0.6)
    if close:
        return message, f"did you mean `{'.'.join((close[0], variable)) if variable else close[0]}`?"
    return message, "keys are " + ", ".join(f"`{known}`" for known in KEYS[:-1]) + " and `env.NAME`"


def _contradictions(said: _Said, *, names: int, end_at: Place, has_slots: bool) -> Iterator[Fault]:
    """Finds what is right word by word and wrong together."""
    if said.slots is None and said.gpus is None and not has_slots:
        yield Fault(end_at, "the host has no `slots=N`", f"{_SLOTS}; `dsrun -n N` gives N to each host that says none")
    if said.slots is not None and said.gpus is not None and said.slots != len(said.gpus):
        yield Fault(
            said.places["slots"],
            f"`slots` is {said.slots} and `gpus` names {len(said.gpus)}: {format_ids(said.gpus)[:40]}",
            "leave `slots` out: each GPU named is a slot",
        )
    if said.addrs is not None and len(said.addrs) != names:
        message = f"`addr` gives {len(said.addrs)} addresses to {names} hosts"
        yield Fault(said.places["addr"], message, "give each host its own: `w[0-3] addr=10.0.0.[1-4]`")


def _fault(misread: Misread, at: Place) -> Fault:
    return Fault(at.part(misread.start, misread.width), misread.message, misread.hint)
