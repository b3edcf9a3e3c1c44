from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hostfile import MAX_SLOTS, parse_hostfile, read_hostfile
from dsrun.launcher.hosts import HostSpec

EXAMPLES = Path(__file__).parents[2] / "hostfiles"


def parse(text: str) -> list[tuple[str, int]]:
    return [(host.name, host.slots) for host in parse_hostfile(text, name="hosts")]


def problems(text: str) -> list[str]:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, name="hosts")
    assert all(problem.hint for problem in caught.value.problems)
    return [problem.message for problem in caught.value.problems]


def test_lines_keep_their_order_and_know_where_they_stood() -> None:
    hosts = parse_hostfile("# two hosts\n\nworker-1 slots=4\nworker-0\tslots=02 # the old one\n", name="hosts")
    assert hosts == (
        HostSpec(name="worker-1", slots=4, source="hosts:3"),
        HostSpec(name="worker-0", slots=2, source="hosts:4"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2",
        "a slots=2\n",
        "a slots=2\r\n\r\n",
        "\ufeffa slots=2",
        "  a \t slots=2  ",
        "a slots=2#comment",
        "a slots=2 # trailing slots=9 junk",
        "#b slots=1\n  # c\na slots=2",
    ],
)
def test_accepts_comments_blanks_and_line_ends_of_any_editor(text: str) -> None:
    assert parse(text) == [("a", 2)]


@pytest.mark.parametrize("name", ["localhost", "10.0.0.5", "worker-0.lab_2", "[::1]", "fd00::4", "W", "0"])
def test_accepts_names_and_addresses(name: str) -> None:
    assert parse(f"{name} slots=1") == [(name, 1)]


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a;b", "$(id)", "`id`", "a/b", "user@host", "..", ".x", "ä", "a'"]
)
def test_refuses_names_that_read_as_options_shell_text_or_paths(name: str) -> None:
    assert problems(f"{name} slots=1") == [
        f"hosts:1:1: `{name}` is no host name\n  {name} slots=1\n  {'^' + '~' * (len(name) - 1)}"
    ]


@pytest.mark.parametrize(
    "tail",
    ["slots=-1", "slots = 4", "SLOTS=4", "slots=", "slots=4abc", "slots=4.0", "slots=٣", "max_slots=4 slots=4", "4"],
)
def test_refuses_what_is_not_a_count_of_slots(tail: str) -> None:
    (message,) = problems(f"a {tail}")
    assert message.startswith(f"hosts:1:3: `{tail.split()[0]}` is not understood; expected `slots=N`\n")


def test_refuses_a_host_without_slots_and_points_behind_it() -> None:
    assert problems("worker-0 # later") == [
        "hosts:1:9: host `worker-0` has no `slots=N`\n  worker-0 # later\n          ^"
    ]


def test_refuses_junk_after_the_slots_which_deepspeed_drops() -> None:
    assert problems("a slots=4 foo=bar") == [
        "hosts:1:11: `foo=bar` after the slots is not understood\n  a slots=4 foo=bar\n            ^~~~~~~"
    ]


@pytest.mark.parametrize("count", [0, MAX_SLOTS + 1, 10**8])
def test_refuses_counts_no_host_has(count: int) -> None:
    (message,) = problems(f"a slots={count}")
    assert message.startswith(f"hosts:1:3: `slots` is {count}; expected 1 to {MAX_SLOTS}\n")


def test_survives_a_count_too_long_to_be_a_number() -> None:
    (message,) = problems("a slots=" + "9" * 10_000)
    assert message.startswith("hosts:1:3: ")


def test_says_where_a_host_stood_first() -> None:
    assert problems("a slots=1\nb slots=1\na slots=2\n")[0].startswith("hosts:3:1: host `a` stands on line 1 already\n")


def test_reports_every_bad_line_at_once() -> None:
    found = problems("a slots=0\nb slots=2\nc\nb slots=2\n")
    assert [message.split(" ")[0] for message in found] == ["hosts:1:3:", "hosts:3:2:", "hosts:4:1:"]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_refuses_a_file_without_hosts(text: str) -> None:
    assert problems(text) == ["hosts: the hostfile names no host"]


def test_keeps_control_characters_of_a_broken_file_off_the_terminal() -> None:
    (message,) = problems("a\x1b[31m slots=1")
    assert "\x1b" not in message


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"hosts\.txt: the hostfile cannot be read: no such file or directory"):
        read_hostfile(tmp_path / "hosts.txt")


def test_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match="is a directory"):
        read_hostfile(tmp_path)


def test_reads_a_file_that_is_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"# caf\xe9\na slots=1\n")
    assert [host.name for host in read_hostfile(path)] == ["a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", [("localhost", 2)]),
        ("workstation", [("localhost", 4)]),
        ("four-hosts", [("worker-0", 4), ("worker-1", 4), ("worker-2.lab", 2), ("[fd00::4]", 4)]),
    ],
)
def test_example_parses(name: str, expected: list[tuple[str, int]]) -> None:
    assert [(host.name, host.slots) for host in read_hostfile(EXAMPLES / name)] == expected


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == ["four-hosts", "localhost", "workstation"]


def test_a_named_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    os.mkfifo(path)
    with pytest.raises(HostfileError, match="is a named pipe"):
        read_hostfile(path)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(HostfileError, match="/dev/zero has more than 4 MiB"):
        read_hostfile(Path("/dev/zero"))
