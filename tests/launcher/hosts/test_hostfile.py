"""Reading a hostfile: the file itself, and what is wrong over several lines. Lines have tests of their own."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.hostfile import parse_hostfile, read_hostfile
from dsrun.launcher.hosts.patterns import MAX_HOSTS
from dsrun.launcher.hosts.spec import HostSpec


def problems(text: str) -> list[str]:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, name="hosts")
    assert all(problem.hint for problem in caught.value.problems)
    return [problem.message.split("\n")[0] for problem in caught.value.problems]


def test_lines_keep_their_order_and_know_where_they_stood() -> None:
    hosts = parse_hostfile("# two hosts\n\nworker-1 slots=4\nworker-0\tslots=02 # the old one\n", name="hosts")
    assert hosts == (
        HostSpec(name="worker-1", slots=4, source="hosts:3"),
        HostSpec(name="worker-0", slots=2, source="hosts:4"),
    )


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("n1\nn1\nn2\nn2\n", {"n1": 2, "n2": 2}),
        # In any order, with hosts that have one slot, and as other spellings of one name.
        ("n1.lab\nn2.lab\nN1.lab\nn3.lab\n", {"n1.lab": 2, "n2.lab": 1, "n3.lab": 1}),
        ("# PBS\n\n10.0.0.1\n10.0.0.1 # the same\n", {"10.0.0.1": 2}),
        ("[fd00::4]\n[fd00::4]\n", {"[fd00::4]": 2}),
    ],
)
def test_where_all_lines_are_names_alone_a_host_has_a_slot_for_each_of_its_lines(
    text: str, slots: dict[str, int]
) -> None:
    hosts = parse_hostfile(text, name="hosts")
    assert {host.name: host.slots for host in hosts} == slots
    # What was counted is there: `-n` may not ask for more.
    assert parse_hostfile(text, name="hosts", slots=9) == hosts


def test_hosts_without_slots_have_those_that_the_user_names() -> None:
    hosts = parse_hostfile("n1\nn2 port=2222\nn3 slots=2\nn4 gpus=0,2\n", name="hosts", slots=8)
    assert [host.slots for host in hosts] == [8, 8, 2, 2]
    assert [host.slots for host in parse_hostfile('{"n1": null}', name="hosts", slots=4)] == [4]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("n1\nn2\n", ["hosts:1:3: the host has no `slots=N`", "hosts:2:3: the host has no `slots=N`"]),
        # Lines that say more are not counted: which of them is meant?
        ("n1\nn1 port=22\n", ["hosts:1:3: the host has no `slots=N`", "hosts:2:11: the host has no `slots=N`"]),
        ("n1:2\nn1\n", ["hosts:2:3: the host has no `slots=N`"]),
        ("ada@n1\nn1\nn1\n", ["hosts:2:1: host `n1` stands on line 1 already"]),
        ("n1\n" * 4097, ["hosts:1:1: `slots` is 4097; expected 1 to 4096"]),
    ],
)
def test_lines_are_counted_only_where_they_can_mean_nothing_else(text: str, messages: list[str]) -> None:
    assert problems(text) == messages


def test_a_problem_shows_the_line_and_the_way_out() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("a slots=4\nb slots=4 prot=2222\n", name="hosts")
    assert caught.value.render() == (
        "error: hosts:2:11: `prot` is no key of a host\n"
        "  b slots=4 prot=2222\n"
        "            ^~~~\n"
        "hint: did you mean `port`?"
    )


def test_reports_every_bad_line_at_once() -> None:
    found = problems("a slots=0\nb slots=2\nc\nb slots=2\n\x00\n")
    assert [message.split(" ")[0] for message in found] == [
        "hosts:1:9:",
        "hosts:3:2:",
        "hosts:4:1:",
        "hosts:5:1:",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=1\nb slots=1\na slots=2", "hosts:3:1: host `a` stands on line 1 already"),
        ("w0 slots=1\nW0 slots=1", "hosts:2:1: host `W0` stands on line 1 already"),
        ("w0 slots=1\nw0. slots=1", "hosts:2:1: host `w0.` stands on line 1 already"),
        ("[::1] slots=1\n0:0:0:0:0:0:0:1 slots=1", "hosts:2:1: host `0:0:0:0:0:0:0:1` stands on line 1 already"),
        ("w[0-9] slots=1\nw3 slots=1", "hosts:2:1: host `w3` stands on line 1 already"),
        (
            "w[0-3] slots=1\n# c\nw[2-9] slots=1",
            "hosts:3:1: hosts `w2`, `w3` stand on line 1 already",
        ),
        ("ada@w slots=1\nbob@w slots=1", "hosts:2:1: host `w` stands on line 1 already"),
    ],
)
def test_a_host_has_one_line_however_it_is_spelled(text: str, message: str) -> None:
    assert problems(text) == [message]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "\ufeff", "\r\n"])
def test_refuses_a_file_without_hosts(text: str) -> None:
    assert problems(text) == ["hosts: the hostfile names no host"]


def test_refuses_more_hosts_than_any_cluster_has() -> None:
    (message,) = problems(f"a[0-{MAX_HOSTS - 1}] slots=1\nb slots=1\n")
    assert message == f"hosts:2:1: the file names more than {MAX_HOSTS} hosts"


def test_a_file_that_is_no_hostfile_does_not_scroll_for_ever() -> None:
    found = problems("import torch\n" * 50_000)
    assert len(found) == 201
    assert found[-1] == "hosts: these are the first 200 problems"


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"hosts\.txt: the hostfile cannot be read: no such file or directory"):
        read_hostfile(tmp_path / "hosts.txt")


@pytest.mark.parametrize("typed", ["w0:2", "w0,w1", "w0:2,w1.lab:2"])
def test_hosts_in_the_place_of_a_file_of_hosts_are_shown_the_way_to_one(typed: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read_hostfile(Path(typed))
    assert caught.value.hint == f"`-H` takes a file, a host on each line: `-H <(echo {typed} | tr , '\\n')`"


def test_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match="is a directory"):
        read_hostfile(tmp_path)


def test_a_path_with_nul_is_an_error() -> None:
    with pytest.raises(HostfileError, match="cannot be read"):
        read_hostfile(Path("a\0b"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a slots=1\n# caf\xe9\n", r"hosts:2:6: byte 0xe9 is no UTF-8"),
        ("a slots=1\n".encode("utf-16"), r"hosts is UTF-16 text; expected UTF-8"),
    ],
)
def test_other_encodings_are_one_clear_error(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "hosts").write_bytes(data)
    with pytest.raises(HostfileError, match=message) as caught:
        read_hostfile(tmp_path / "hosts")
    assert caught.value.hint == "save the file as UTF-8"


def test_a_byte_order_mark_of_utf_8_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("a slots=1\n".encode("utf-8-sig"))
    assert [host.name for host in read_hostfile(tmp_path / "hosts")] == ["a"]


def test_a_named_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    os.mkfifo(path)
    with pytest.raises(HostfileError, match=r"^[^:]*hosts is a named pipe; expected a hostfile"):
        read_hostfile(path)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(HostfileError, match="/dev/zero has more than 4 MiB"):
        read_hostfile(Path("/dev/zero"))


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(HostfileError, match="has more than 4 MiB"):
        read_hostfile(path)


def test_a_dash_is_the_standard_input() -> None:
    hosts = read_hostfile(Path("-"), stdin=io.BytesIO(b"a slots=2\r\n"))
    assert hosts == (HostSpec(name="a", slots=2, source="<stdin>:1"),)


def test_a_dash_without_hosts_names_the_standard_input() -> None:
    with pytest.raises(HostfileError, match="<stdin>: the hostfile names no host"):
        read_hostfile(Path("-"), stdin=io.BytesIO(b""))


def test_a_dash_with_a_closed_standard_input_is_an_error() -> None:
    closed = io.BytesIO()
    closed.close()
    with pytest.raises(HostfileError, match="<stdin>: the hostfile cannot be read"):
        read_hostfile(Path("-"), stdin=closed)
