"""The line form, from the text to the hosts: every key, every mistake, each with its place."""

from __future__ import annotations

import pytest

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.hostfile import MAX_SLOTS, parse_hostfile
from dsrun.launcher.hosts.spec import HostSpec


def parse(text: str) -> tuple[HostSpec, ...]:
    return parse_hostfile(text, name="hosts")


def only(text: str) -> HostSpec:
    (host,) = parse(text)
    return host


def problem(text: str) -> tuple[str, str, str]:
    """The place, the message, and what the caret points at; checks that there is a way out."""
    with pytest.raises(HostfileError) as caught:
        parse(text)
    (found,) = caught.value.problems
    assert found.hint
    head, line, caret = found.message.split("\n")
    place, _, message = head.partition(": ")
    at = caret.index("^")
    return place, message, line[at : at + len(caret.strip())]


def test_a_line_may_say_everything() -> None:
    line = "worker-0 slots=2 port=2222 user=ada addr=10.0.0.5 python=/opt/py/bin/python gpus=0,3 env.A=1 env.B=x=y"
    assert only(line) == HostSpec(
        name="worker-0",
        slots=2,
        source="hosts:1",
        port=2222,
        user="ada",
        addr="10.0.0.5",
        python="/opt/py/bin/python",
        gpus=(0, 3),
        env={"A": "1", "B": "x=y"},
    )


def test_keys_come_in_any_order_and_gpus_alone_say_how_many_slots() -> None:
    host = only("w user=ada gpus=0,2-3")
    assert (host.slots, host.gpus, host.user) == (3, (0, 2, 3), "ada")


def test_the_order_of_gpus_is_kept() -> None:
    assert only("w gpus=3,0-1").gpus == (3, 0, 1)


@pytest.mark.parametrize(
    ("word", "name", "user", "slots"),
    [
        ("w:4", "w", None, 4),
        ("[::1]:4", "[::1]", None, 4),
        ("[::1] slots=4", "[::1]", None, 4),
        ("fd00::4 slots=4", "fd00::4", None, 4),
        ("ada@w:4", "w", "ada", 4),
        ("ada@[::1]:4", "[::1]", "ada", 4),
        ("ada@w slots=4", "w", "ada", 4),
        ("10.0.0.5:4", "10.0.0.5", None, 4),
    ],
)
def test_hosts_are_written_as_ssh_and_mpi_users_write_them(word: str, name: str, user: str | None, slots: int) -> None:
    host = only(word)
    assert (host.name, host.user, host.slots) == (name, user, slots)


def test_a_range_makes_hosts_that_share_what_the_line_says() -> None:
    hosts = parse("w[08-10] slots=4 user=ada env.A=1")
    assert [host.name for host in hosts] == ["w08", "w09", "w10"]
    assert {(host.slots, host.user, host.env["A"], host.source) for host in hosts} == {(4, "ada", "1", "hosts:1")}


def test_a_range_of_hosts_takes_a_range_of_addresses() -> None:
    hosts = parse("w[0-2]:8 addr=10.0.0.[11-13]")
    assert [(host.name, host.addr) for host in hosts] == [("w0", "10.0.0.11"), ("w1", "10.0.0.12"), ("w2", "10.0.0.13")]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a=b", "a=b"),
        ("a#b", "a#b"),
        ("it's", "it's"),
        ('"two words"', "two words"),
        ("'two words'", "two words"),
        ("'#no comment'", "#no comment"),
        ('"say \\"hi\\"\\n\\t\\\\"', 'say "hi"\n\t\\'),
        ("'back\\slash'", "back\\slash"),
        ('""', ""),
        ("$HOME;`id`", "$HOME;`id`"),
        ("größe", "größe"),
    ],
)
def test_values_may_be_quoted_and_are_never_expanded(value: str, meant: str) -> None:
    assert only(f"w slots=1 env.K={value} # comment").env == {"K": meant}


def test_a_python_path_may_have_blanks_and_quotes() -> None:
    assert only("""w slots=1 python="/opt/it's; here/python" """).python == "/opt/it's; here/python"


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2",
        "a slots=2\n",
        "a slots=2\r\n\r\n",
        "a slots=2\r# old Macs\r",
        "\ufeffa slots=2",
        "  a \t slots=2  ",
        "a slots=2#comment",
        "a slots=2 # trailing slots=9 junk",
        "#b slots=1\n  # c\na slots=02",
    ],
)
def test_accepts_comments_blanks_and_line_ends_of_any_editor(text: str) -> None:
    assert [(host.name, host.slots) for host in parse(text)] == [("a", 2)]


@pytest.mark.parametrize(
    ("line", "column", "message", "pointed"),
    [
        ("-oProxyCommand=x slots=1", 1, "is no host name: it begins like an option", "-"),
        ("a;b slots=1", 2, "is no host name: it has `;`", ";"),
        ("$(id) slots=1", 1, "is no host name: it has `$`", "$"),
        ("`id` slots=1", 1, "is no host name: it has U+0060", "`"),
        ("ada@w;x slots=1", 6, "is no host name: it has `;`", ";"),
        ("-l@w slots=1", 1, "`-l` is no user's name", "-l"),
        ("@w slots=1", 1, "`` is no user's name", "@"),
        ("ada@ slots=1", 5, "a host has no name", " "),
        ("w:x", 3, "`slots` is `x`; expected 1 to 4096", "x"),
        ("w[0-3 slots=1", 2, "the bracket in `w[0-3` is not closed", "["),
        ("w[0-1];x slots=1", 1, "`w0;x` is no host name: it has `;`", "w[0-1];x"),
        ("w[1,1] slots=1", 1, "`w[1,1]` names `w1` twice", "w[1,1]"),
        ("a slots=-1", 9, "`slots` is `-1`; expected 1 to 4096", "-1"),
        ("a slots=0", 9, "`slots` is 0; expected 1 to 4096", "0"),
        ("a slots=1e9", 9, "`slots` is `1e9`; expected 1 to 4096", "1e9"),
        ("a slots=4abc", 9, "`slots` is `4abc`; expected 1 to 4096", "4abc"),
        ("a slots=4.0", 9, "`slots` is `4.0`; expected 1 to 4096", "4.0"),
        ("a slots=", 9, "`slots` is ``; expected 1 to 4096", ""),
        ("a slots=٣", 9, "`slots` is `٣`; expected 1 to 4096", "٣"),
        (f"a slots={MAX_SLOTS + 1}", 9, "`slots` is 4097; expected 1 to 4096", "4097"),
        ("a slots = 4", 3, "`slots` is not understood", "slots"),
        ("a 4", 3, "`4` is not understood", "4"),
        ("a SLOTS=4", 3, "`SLOTS` is no key of a host", "SLOTS"),
        ("a max_slots=8 slots=4", 3, "`max_slots` is no key of a host", "max_slots"),
        ("a slots=4 foo=bar", 11, "`foo` is no key of a host", "foo"),
        ("a slots=4 junk", 11, "`junk` is not understood", "junk"),
        ("a slots=4 slots=4", 11, "`slots` of this host is given twice", "slots"),
        ("a:4 slots=4", 5, "`slots` of this host is given twice", "slots"),
        ("ada@a slots=4 user=ada", 15, "`user` of this host is given twice", "user"),
        ("a slots=1 env.A=1 env.A=2", 19, "`env.A` of this host is given twice", "env.A"),
        ("worker-0 # later", 9, "the host has no `slots=N`", " "),
        ("a port=22", 10, "the host has no `slots=N`", ""),
        ("a slots=1 port=0", 16, "`port` is 0; expected 1 to 65535", "0"),
        ("a slots=1 port=65536", 16, "`port` is 65536; expected 1 to 65535", "65536"),
        ("a slots=1 port=22#x", 16, "`port` is `22#x`; expected 1 to 65535", "22#x"),
        ("a slots=1 user=x;y", 16, "`x;y` is no user's name", "x;y"),
        ("a slots=1 addr=x;y", 17, "`x;y` is no host name: it has `;`", ";"),
        ('a slots=1 addr="x y"', 18, "`x y` is no host name: it has U+0020", " "),
        ("a slots=1 addr=-x", 16, "`-x` is no host name: it begins like an option", "-"),
        ("a slots=1 python=-c", 18, "`python` is `-c`; expected a path", "-c"),
        ("a slots=1 python=~/py", 18, "`python` is `~/py`; expected a path", "~/py"),
        ("a slots=1 python=", 18, "`python` is ``; expected a path", ""),
        ("a gpus=0,x,2", 10, "`x` is no number and no range", "x"),
        ("a gpus=3-1", 8, "`3-1` runs backwards", "3-1"),
        ("a gpus=0,2,1-2", 12, "GPU 2 is named twice", "1-2"),
        ("a gpus=0-999999999", 8, "no host has a GPU 999999999", "0-999999999"),
        ("a slots=3 gpus=0,1", 3, "`slots` is 3 and `gpus` names 2: 0-1", "slots"),
        ("w[0-1] slots=1 addr=h", 16, "`addr` gives 1 addresses to 2 hosts", "addr"),
        ("a slots=1 env=x", 11, "`env` names no variable", "env"),
        ("a slots=1 env.1=x", 11, "`1` is no name of a variable", "env.1"),
        ("a slots=1 port.x=1", 11, "`port.x` is no key of a host: only `env` has names behind a dot", "port.x"),
        ('a slots=1 env.A="x', 17, "this quote is not closed on its line", '"'),
        ("a slots=1 env.A='x'y", 20, "there is more behind the closing quote", "y"),
        ('a slots=1 env.A="\\q"', 18, "`\\q` is no escape", "\\q"),
        ("a slots=1 \x1b[31m", 11, "character U+001B has no business in a hostfile", "?"),
        ("a slots=1\x00", 10, "character U+0000 has no business in a hostfile", "?"),
        ("a slots=1 # \x9b", 13, "character U+009B has no business in a hostfile", "?"),
        ("a\u2028 slots=1", 2, "character U+2028 has no business in a hostfile", "?"),
    ],
)
def test_each_mistake_is_named_and_pointed_at(line: str, column: int, message: str, pointed: str) -> None:
    place, found, at = problem(line)
    assert place == f"hosts:1:{column}"
    assert found.endswith(message)
    assert at == pointed


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("a prot=22 slots=1", "did you mean `port`?"),
        ("a slot=1", "did you mean `slots`?"),
        ("a slots=1 usr=x", "did you mean `user`?"),
        ("a slots=1 evn.A=x", "did you mean `env.A`?"),
        ("a slots = 4", "write `slots=4`, without blanks around `=`"),
        ("a max_slots=2 slots=2", "leave it out: a host never takes more ranks than its slots"),
        ("a slots=1 colour=x", "keys are `slots`, `gpus`, `addr`, `port`, `user`, `python` and `env.NAME`"),
    ],
)
def test_the_way_out_names_the_key_that_was_meant(line: str, hint: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse(line)
    assert [found.hint for found in caught.value.problems] == [hint]


def test_everything_wrong_with_a_line_is_said_at_once_in_reading_order() -> None:
    with pytest.raises(HostfileError) as caught:
        parse('a;b slots = 4 port=0 junk env.A="x"y gpus=z')
    places = [found.message.partition(": ")[0] for found in caught.value.problems]
    assert places == [f"hosts:1:{column}" for column in (2, 5, 20, 22, 36, 43)]
