"""DeepSpeed's hostfiles mean the same here, or are refused; what it drops without a word is refused with its column.

The oracle is its documented rule: a line is stripped, skipped if empty or a comment, and otherwise must match
`^(\\S+)\\s+slots=(\\d+)`, whatever follows; a host may stand there once, and at least one must.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.hostfile import parse_hostfile

_RULE = re.compile(r"^(\S+)\s+slots=(\d+)")


def deepspeed(text: str) -> dict[str, int] | None:
    """What DeepSpeed makes of a hostfile; None where it refuses it."""
    pool: dict[str, int] = {}
    for line in text.split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _RULE.search(line)
        if match is None or match[1] in pool:
            return None
        pool[match[1]] = int(match[2])
    return pool or None


def dsrun(text: str) -> dict[str, int] | None:
    try:
        return {host.name: host.slots for host in parse_hostfile(text, name="hosts")}
    except HostfileError:
        return None


@pytest.mark.parametrize(
    "text",
    [
        "worker-0 slots=4",
        "worker-0\tslots=4",
        "worker-0 \t  slots=4",
        "  worker-0 slots=4  ",
        "worker-0 slots=04",
        "worker-0 slots=4 # c",
        "worker-0 slots=4#c",
        "worker-0 slots=4 # slots=9",
        "worker-1 slots=2\nworker-0 slots=4\n",
        "worker-0 slots=4\r\nworker-1 slots=2\r\n",
        "\n    worker-1 slots=2\n    worker-2 slots=2\n\n    localhost slots=1\n    123.23.12.10 slots=2\n\n"
        "    #worker-1 slots=3\n    # this is a comment\n\n    ",
        "[fd00::4] slots=2",
        "fd00::4 slots=2",
        "w0 slots=1\nw0.dom slots=1",
    ],
)
def test_every_valid_line_means_what_it_means_to_deepspeed(text: str) -> None:
    expected = deepspeed(text)
    assert expected is not None
    assert list((dsrun(text) or {}).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("worker-0 slots=4 foo=bar", "hosts:1:18: "),
        ("worker-0 slots=4 junk", "hosts:1:18: "),
        ("worker-0 slots=4abc", "hosts:1:16: "),
        ("worker-0 slots=4 max_slots=8", "hosts:1:18: "),
        ("worker-0 slots=0", "hosts:1:16: "),
        ("worker-0 slots=4\nWORKER-0 slots=4", "hosts:2:1: "),
        ("-oProxyCommand=x slots=4", "hosts:1:1: "),
        ("a;b slots=4", "hosts:1:2: "),
    ],
)
def test_what_deepspeed_drops_or_lets_through_is_refused_at_its_place(line: str, place: str) -> None:
    assert deepspeed(line) is not None
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(line, name="hosts")
    assert caught.value.problems[0].message.startswith(place)


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("worker-[0-3] slots=4", {f"worker-{n}": 4 for n in range(4)}),  # pdsh would start four, with the ranks of one
        ("ada@worker-0 slots=4", {"worker-0": 4}),  # its filters cannot name such a host
    ],
)
def test_where_deepspeed_takes_a_pattern_for_a_name_the_hosts_are_meant(line: str, hosts: dict[str, int]) -> None:
    assert len(deepspeed(line) or {}) == 1
    assert dsrun(line) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "worker-1 slots=2\nworker-2 slots=1\nworker-1 slots=1",
        "this is bad slots=1",
        "missingslots",
        "",
        "\n\n",
        "# only a comment",
        "worker-1 slots=2\nthis is bad slots=1\nworker-2 slots=4\nmissingslots\n",
        "w slots=-1",
        "w slots = 4",
        "w SLOTS=4",
        "w slots=",
        "w max_slots=4 slots=4",
    ],
)
def test_what_deepspeed_refuses_is_refused(text: str) -> None:
    assert deepspeed(text) is None
    assert dsrun(text) is None


_names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,6}(\.[a-z][a-z0-9]{0,3})?", fullmatch=True)
_blanks = st.text(" \t", min_size=1, max_size=3)
_slots = st.integers(1, 64).map(str) | st.integers(1, 64).map("{:03}".format)
_comments = st.sampled_from(["", "# c", "#", " # slots=9 x", "\t#"])
_hosts = st.tuples(st.text(" \t", max_size=2), _names, _blanks, st.just("slots="), _slots, _comments).map("".join)
_files = st.lists(_hosts | st.sampled_from(["", "  ", "# c", "\t# c slots=1"]), max_size=6).map("\n".join)


@given(_files)
def test_any_file_of_plain_lines_means_the_same(text: str) -> None:
    assert dsrun(text) == deepspeed(text)


@given(st.text("aw0-=slot#@:;[], \t\n\"'1", max_size=60))
def test_lines_both_accept_have_the_same_slots_unless_names_are_patterns(text: str) -> None:
    theirs, ours = deepspeed(text), dsrun(text)
    if theirs is not None and ours is not None and not re.search(r"[\[@]", text):
        assert ours == theirs
