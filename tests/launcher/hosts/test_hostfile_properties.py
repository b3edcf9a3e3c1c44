"""Whatever the text: hosts or one HostfileError. What can be said in lines is read back as it was said."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.hostfile import parse_hostfile
from dsrun.launcher.hosts.spec import HostSpec

_WORDS = [
    "w0",
    "w[0-2]",
    "[::1]",
    "u@h",
    "h:4",
    "slots=2",
    "slots=",
    "gpus=0,2-3",
    "env.A=",
    "addr=",
    "port=22",
    "user=x",
]
_PIECES = [
    *_WORDS,
    " ",
    "\t",
    "\n",
    "\r\n",
    "#",
    '"',
    "'",
    "\\",
    "=",
    "{",
    "}",
    ":",
    ": ",
    ",",
    "- ",
    "host",
    "*a",
    "&a ",
]

_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,8}(\.[a-z]{1,3}){0,2}", fullmatch=True)
_addresses = st.ip_addresses().map(str)
_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_hosts = st.builds(
    HostSpec,
    name=_names | st.ip_addresses(v=6).map("[{}]".format) | st.ip_addresses(v=4).map(str),
    slots=st.integers(1, 4096),
    source=st.just(""),
    port=st.none() | st.integers(1, 65535),
    user=st.none() | st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,10}", fullmatch=True),
    addr=st.none() | _names | _addresses,
    python=st.none() | st.from_regex(r"/[ -~é]{1,20}", fullmatch=True),
    gpus=st.just(None),
    env=st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), _values, max_size=3),
) | st.builds(
    lambda name, gpus: HostSpec(name=name, slots=len(gpus), source="", gpus=tuple(gpus)),
    _names,
    st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True),
)
_files = st.lists(_hosts, min_size=1, max_size=4, unique_by=lambda host: host.name.lower())


def parse(text: str) -> list[dict[str, Any]]:
    """The hosts without the place they were written at."""
    return [fields(host) for host in parse_hostfile(text, name="hosts")]


def fields(host: HostSpec) -> dict[str, Any]:
    names = ("name", "slots", "port", "user", "addr", "python", "gpus", "env")
    return {name: getattr(host, name) for name in names}


def words(host: HostSpec) -> list[tuple[str, str]]:
    """What a line would say about a host."""
    gpus = None if host.gpus is None else ",".join(map(str, host.gpus))
    pairs = [("slots", host.slots), ("port", host.port), ("user", host.user), ("addr", host.addr)]
    pairs += [("python", host.python), ("gpus", gpus), *((f"env.{key}", value) for key, value in host.env.items())]
    return [(key, str(value)) for key, value in pairs if value is not None]


def quote(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'


@given(_files)
def test_what_is_written_in_lines_is_read_back(hosts: list[HostSpec]) -> None:
    # Other control characters than these three have no way into a line; JSON has one.
    hosts = [
        host for host in hosts if all(char.isprintable() or char in "\n\r\t" for v in host.env.values() for char in v)
    ]
    text = "\n".join(" ".join([h.name, *(f"{key}={quote(value)}" for key, value in words(h))]) for h in hosts)
    if hosts:
        assert parse(text) == [fields(host) for host in hosts]


@given(_files)
def test_what_is_written_in_json_is_read_back(hosts: list[HostSpec]) -> None:
    entries: list[dict[str, Any]] = []
    for host in hosts:
        said = {key: value for key, value in fields(host).items() if value is not None}
        entries.append({"host": said.pop("name"), **said})
    assert parse(json.dumps(entries)) == [fields(host) for host in hosts]


def accept(text: str, name: str) -> None:
    try:
        hosts = parse_hostfile(text, name=name)
    except HostfileError as error:
        check_error(error)
        return
    assert hosts
    assert len({host.name.lower() for host in hosts}) == len(hosts)
    assert all(host.slots == len(host.slot_ids) >= 1 for host in hosts)


def check_error(error: HostfileError) -> None:
    """Every problem has a way out, and nothing of the file moves a cursor."""
    assert all(problem.hint for problem in error.problems)
    assert all(char.isprintable() or char == "\n" for char in error.render())


@given(st.text(max_size=200), st.sampled_from(["h", "h.json", "h.yaml"]))
@example("\ud800", "h")
@example("a slots=" + "9" * 10_000, "h")
@example("a: " + "9" * 10_000, "h")
@example('{"a": ' + "9" * 10_000 + "}", "h")
@example("? [a]\n: 3", "h.yaml")
@example("a: *b", "h.yaml")
@example("&a a: {b: *a}", "h.yaml")
@example("%YAML 9.9\n---\na: 1", "h")
def test_any_text_gives_hosts_or_one_error(text: str, name: str) -> None:
    accept(text, name)


@given(st.lists(st.sampled_from(_PIECES), max_size=30).map("".join), st.sampled_from(["h", "h.json", "h.yaml"]))
def test_any_mixture_of_what_hostfiles_are_made_of_gives_hosts_or_one_error(text: str, name: str) -> None:
    accept(text, name)
