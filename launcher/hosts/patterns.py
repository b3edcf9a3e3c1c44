"""How hosts and slots are written, in hostfiles and filters alike: names, addresses, `w[00-15]`, `0,2-3`. Text only.

Names reach ssh, logs and file names. What passes here is made of an allow-list of characters, so that nothing which
reads as an option, a shell word or a path gets further. See `check_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..excerpts import Misread, quoted

#: Most hosts that one file or pattern may name.
MAX_HOSTS = 16384

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})")
_BAD_CHAR = re.compile(r"[^A-Za-z0-9._-]")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?")
_DIGITS_AND_DOTS = re.compile(r"[0-9]+(?:\.[0-9]*)+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_CHARACTERS = "names are made of letters, digits and `.` `-` `_`; IPv6 addresses stand in brackets"
_RANGES = "ranges read `w[0-3]` or `w[1,3,7-9]`"


def check_name(text: str) -> str:
    """Returns the host name or address as it is.

    Raises:
        Misread: it has a character that no host name has, or reads as an option or a path.
    """
    if ":" in text or text.startswith("["):
        _check_ipv6(text)
        return text
    if not text:
        raise Misread("a host has no name", _CHARACTERS)
    if text[0] in "-.":
        reads = "an option" if text[0] == "-" else "a path"
        raise Misread(f"{quoted(text)} is no host name: it begins like {reads}", _CHARACTERS, width=1)
    if (bad := _BAD_CHAR.search(text)) is not None:
        shown = f"`{bad[0]}`" if bad[0].isprintable() and bad[0] not in " `" else f"U+{ord(bad[0]):04X}"
        raise Misread(f"{quoted(text)} is no host name: it has {shown}", _CHARACTERS, start=bad.start(), width=1)
    if _NAME.fullmatch(text) is None or ".." in text:
        raise Misread(f"{quoted(text)} is no host name", "a name has 1 to 253 characters and no empty part")
    if _DIGITS_AND_DOTS.fullmatch(text) and _ip(text) is None:
        raise Misread(f"{quoted(text)} is no IPv4 address", "four numbers from 0 to 255, without leading zeros")
    return text


def _check_ipv6(text: str) -> None:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _IPV6.fullmatch(bare) is None or ":" not in bare or _ip(bare) is None:
        raise Misread(f"{quoted(text)} is no IPv6 address", "write `[::1]`, and with slots `[::1]:4`")


def _ip(text: str) -> str | None:
    """Returns the address in its one spelling."""
    import ipaddress  # used for addresses alone: names need not wait for it

    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def name_key(name: str) -> str:
    """Returns what two spellings of one host have in common: neither case, brackets nor a last dot count."""
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if ":" in bare:
        return _ip(bare) or bare.lower()
    return bare.lower().removesuffix(".") or bare


def split_slots(text: str) -> tuple[str, int | None]:
    """Divides `NAME[:SLOTS]`.

    Returns:
        the name, and the offset at which the slots begin, behind the colon; None where there are none. Text with
        several colons outside brackets is a name: a bare IPv6 address.
    """
    outside = _BRACKETS.sub(lambda found: "." * len(found[0]), text)
    colon = outside.find(":")
    if colon < 0 or outside.count(":") > 1:
        return text, None
    return text[:colon], colon + 1


def expand_names(pattern: str) -> tuple[str, ...]:
    """Returns the names that a pattern with `[00-15]` or `[1,3,7-9]` stands for, unchecked; others name themselves.

    Several brackets multiply, the last one running fastest. Numbers keep the width that the first one is written with.

    Raises:
        Misread: a bracket is not closed or not understood, or there are more than `MAX_HOSTS` names.
    """
    pieces: list[Sequence[str]] = []
    count, end = 1, 0
    for match in _BRACKETS.finditer(pattern):
        if ":" in match[1]:  # an IPv6 address
            continue
        pieces += [[pattern[end : match.start()]], _numbers(match[1], start=match.start() + 1)]
        count *= len(pieces[-1])
        if count > MAX_HOSTS:
            raise Misread(f"{quoted(pattern)} stands for more than {MAX_HOSTS} hosts", _RANGES)
        end = match.end()
    rest = pattern[end:]
    loose = re.search(r"[\[\]]", _BRACKETS.sub(lambda found: "." * len(found[0]), rest))
    if loose is not None:
        partner = "is not closed" if loose[0] == "[" else "was not opened"
        raise Misread(f"the bracket in {quoted(pattern)} {partner}", _RANGES, start=end + loose.start(), width=1)
    if not pieces:
        return (pattern,)
    return tuple("".join(parts) for parts in product(*pieces, [rest]))


def _numbers(text: str, *, start: int) -> list[str]:
    numbers: list[str] = []
    for span in read_spans(text, start=start, example=_RANGES):
        if len(numbers) + span.last - span.first >= MAX_HOSTS:
            raise Misread(f"`[{text[:40]}]` stands for more than {MAX_HOSTS} hosts", _RANGES, start=start)
        numbers += [str(number).zfill(span.digits) for number in range(span.first, span.last + 1)]
    return numbers


@dataclass(frozen=True, slots=True)
class Span:
    """`7-9`, or `7` with both ends equal.

    Attributes:
        first: the lower number.
        last: the upper number, included.
        digits: number of digits with which the first number is written.
        start: offset in the text.
        width: characters.
    """

    first: int
    last: int
    digits: int
    start: int
    width: int


def read_spans(text: str, *, start: int = 0, example: str) -> Iterator[Span]:
    """Reads `0,2-3`; blanks around a number do not count.

    Args:
        text: the list.
        start: offset of the list in the whole text, which is added to the offsets of the spans.
        example: shown as the way out.

    Yields:
        spans in the order they are written, which may overlap.

    Raises:
        Misread: a number is missing, no number or too long, or a range runs backwards.
    """
    for item in text.split(","):
        word = item.strip(" ")
        at = start + len(item) - len(item.lstrip(" "))
        match = _SPAN.fullmatch(word)
        if match is None:
            message = f"{quoted(word)} is no number and no range" if word else "a number is missing"
            raise Misread(message, example, start=at if word else start, width=max(1, len(word)))
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise Misread(f"{quoted(word)} runs backwards", f"write `{match[2]}-{match[1]}`", start=at, width=len(word))
        yield Span(first, last, len(match[1]), at, len(word))
        start += len(item) + 1


def format_ids(ids: Sequence[int]) -> str:
    """Returns `0-3,6`; ids in any order, in the order given."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
