"""What `--include` and `--exclude` name: text -> hosts and their slots. Does not know which of the two it reads.

    filter := node { "@" node }     node := NAME [ ":" ids ]     ids := id { "," id }     id := N | N "-" M

NAME is a host, a glob (`w-*`, `w-?`), a range (`w[0-3]`), or an address; IPv6 stands in brackets where slots follow.
Blanks around a name or a number do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dsrun.errors import HostfileError, Problem

from ..excerpts import Misread, listed, point_at, quoted
from .patterns import Span, expand_names, format_ids, name_key, read_spans, split_slots
from .spec import HostSpec

_EXAMPLE = "a filter reads `worker-0@worker-1:0,2-3`"


@dataclass(frozen=True, slots=True)
class NamedSlots:
    """What a filter says about one host.

    Attributes:
        whole: its bare name stands there: all slots, whatever else is said.
        slots: ids of the slots it names.
    """

    whole: bool
    slots: frozenset[int]


def read_filter(text: str, hosts: Sequence[HostSpec], *, option: str) -> dict[int, NamedSlots]:
    """Returns what a filter says about each host it names, by the host's index; nodes that repeat are merged.

    Args:
        text: the filter.
        hosts: the hosts there are.
        option: `--include` or `--exclude`, for messages.

    Raises:
        HostfileError: carries a problem for each node that is not understood, and each host and slot there is not.
    """
    found: dict[int, NamedSlots] = {}
    problems: list[Problem] = []
    known = {name_key(host.name): index for index, host in enumerate(hosts)}
    start = 0
    for node in text.split("@"):
        word = node.strip(" \t")
        offset = start + len(node) - len(node.lstrip(" \t")) if word else start
        start += len(node) + 1
        wrong: list[Misread] = []
        for index, named in _read_node(word, hosts, known, wrong):
            before = found.get(index, NamedSlots(whole=False, slots=frozenset()))
            found[index] = NamedSlots(whole=before.whole or named.whole, slots=before.slots | named.slots)
        for misread in wrong:
            column = offset + misread.start + 1
            width = max(1, len(word) - misread.start if misread.width is None else misread.width)
            problems.append(
                point_at(
                    f"{option}:{column}",
                    text,
                    column=column,
                    width=width,
                    message=misread.message,
                    hint=misread.hint,
                )
            )
    if problems:
        raise HostfileError.of(problems)
    return found


def _read_node(
    word: str, hosts: Sequence[HostSpec], known: dict[str, int], wrong: list[Misread]
) -> Iterator[tuple[int, NamedSlots]]:
    if not word:
        wrong.append(Misread("a host's name is missing", _EXAMPLE, width=1))
        return
    if (index := known.get(name_key(word))) is not None:  # a bare IPv6 address too, whose colons begin no slots
        yield index, NamedSlots(whole=True, slots=frozenset())
        return
    name, slots_at = split_slots(word)
    if slots_at is None and ":" in re.sub(r"\[[^\]]*\]", "", word):
        second = word.index(":", word.index(":") + 1)
        hint = "nodes are divided by `@`; IPv6 addresses stand in brackets: `[::1]:0`"
        wrong.append(Misread(f"{quoted(word)} has more than one `:`", hint, start=second, width=1))
        return
    try:
        spans = [] if slots_at is None else list(read_spans(word[slots_at:], start=slots_at, example=_EXAMPLE))
        indices = _find_hosts(name.strip(" \t"), hosts, known)
    except Misread as misread:
        wrong.append(misread)
        return
    for span in spans:
        lacking = [hosts[index] for index in indices if not _has(hosts[index], span)]
        if lacking:
            wrong.append(_no_slot(lacking, span))
    for index in indices:
        slots = {slot for slot in hosts[index].slot_ids if any(span.first <= slot <= span.last for span in spans)}
        yield index, NamedSlots(whole=slots_at is None, slots=frozenset(slots))


def _has(host: HostSpec, span: Span) -> bool:
    return sum(span.first <= slot <= span.last for slot in host.slot_ids) == span.last - span.first + 1


def _no_slot(lacking: Sequence[HostSpec], span: Span) -> Misread:
    first = lacking[0]
    missing = next(number for number in range(span.first, span.last + 1) if number not in first.slot_ids)
    verb = "host {} has" if len(lacking) == 1 else "hosts {} have"
    has = f"slot {first.slot_ids[0]} only" if first.slots == 1 else f"slots {format_ids(first.slot_ids)[:60]}"
    return Misread(
        f"{verb.format(listed([host.name for host in lacking]))} no slot {missing}",
        f"{quoted(first.name)} has {has} ({first.source})",
        start=span.start,
        width=span.width,
    )


def _find_hosts(pattern: str, hosts: Sequence[HostSpec], known: dict[str, int]) -> list[int]:
    """Returns the indices of the hosts that a name, a range or a glob stands for.

    Raises:
        Misread: one of the names is no host, or a glob matches none.
    """
    found: list[int] = []
    missing: list[str] = []
    for name in expand_names(pattern):
        if "*" in name or "?" in name:
            glob = name.lower().replace("[", "[[]")  # brackets are ranges or addresses here, never sets of characters
            matches = [index for index, host in enumerate(hosts) if fnmatchcase(host.name.lower(), glob)]
        else:
            index = known.get(name_key(name))
            matches = [] if index is None else [index]
        found += matches
        if not matches:
            missing.append(name)
    if missing:
        verb = "no host is called" if len(missing) == 1 else "no hosts are called"
        raise Misread(f"{verb} {listed(missing)}", _close_names(missing[0], hosts), width=max(1, len(pattern)))
    return found


def _close_names(name: str, hosts: Sequence[HostSpec]) -> str:
    import difflib  # for mistakes alone

    if re.search(r"[,;\s]", name):
        return "nodes are divided by `@`: `worker-0@worker-1:0,2`"
    names = [host.name for host in hosts]
    spelled = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), spelled, n=2, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(quoted(spelled[other]) for other in close)}?"
    return f"there {'is' if len(names) == 1 else 'are'} {listed(names, most=6)}"
