from __future__ import annotations

import pytest

from dsrun.launcher.excerpts import Misread
from dsrun.launcher.hosts.patterns import (
    MAX_HOSTS,
    check_name,
    expand_names,
    format_ids,
    name_key,
    read_spans,
    split_slots,
)


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "w",
        "0",
        "worker-0.lab_2",
        "10.0.0.5",
        "[::1]",
        "::1",
        "fd00::4",
        "[fe80::1%eth0]",
        "w0.",
        "n" * 253,
    ],
)
def test_names_and_addresses_pass_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "start", "reason"),
    [
        ("-oProxyCommand=x", 0, "it begins like an option"),
        ("--help", 0, "it begins like an option"),
        (".ssh", 0, "it begins like a path"),
        ("a;b", 1, "it has `;`"),
        ("$(id)", 0, "it has `$`"),
        ("`id`", 0, "it has U+0060"),
        ("a/b", 1, "it has `/`"),
        ("a b", 1, "it has U+0020"),
        ("a\nb", 1, "it has U+000A"),
        ("a\0b", 1, "it has U+0000"),
        ("a'b", 1, "it has `'`"),
        ("a|b", 1, "it has `|`"),
        ("a=b", 1, "it has `=`"),
        ("wörker", 1, "it has `ö`"),
        ("w\u00a00", 1, "it has U+00A0"),
        ("a@b", 1, "it has `@`"),
        ("%h", 0, "it has `%`"),
        ("a..b", 0, ""),
        ("n" * 254, 0, ""),
    ],
)
def test_what_reads_as_an_option_shell_text_or_a_path_is_no_name(name: str, start: int, reason: str) -> None:
    with pytest.raises(Misread) as caught:
        check_name(name)
    assert caught.value.start == start
    assert "is no host name" in caught.value.message
    assert caught.value.message.endswith(reason)


@pytest.mark.parametrize(
    "name", ["10.0.0.300", "010.0.0.1", "10.0.1", "1.", "[::1", "[]", "[x]", "a:b:c", "::1;x", ":::"]
)
def test_what_looks_like_an_address_must_be_one(name: str) -> None:
    with pytest.raises(Misread, match=r"is no IPv[46] address"):
        check_name(name)


def test_a_missing_name_is_said() -> None:
    with pytest.raises(Misread, match="has no name"):
        check_name("")


@pytest.mark.parametrize(
    "spellings", [("w0", "W0", "w0."), ("::1", "[::1]", "[0:0:0:0:0:0:0:1]"), ("[FD00::4]", "fd00:0::4"), ("10.0.0.1",)]
)
def test_spellings_of_one_host_have_one_key(spellings: tuple[str, ...]) -> None:
    assert len({name_key(name) for name in spellings}) == 1


def test_different_hosts_have_different_keys() -> None:
    assert len({name_key(name) for name in ("w0", "w1", "w0.lab", "::1", "::2", "10.0.0.1")}) == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w", ("w", None)),
        ("w:4", ("w", 2)),
        ("w:", ("w", 2)),
        ("[::1]", ("[::1]", None)),
        ("[::1]:4", ("[::1]", 6)),
        ("fd00::4", ("fd00::4", None)),
        ("w[0-3]:4", ("w[0-3]", 7)),
    ],
)
def test_slots_stand_behind_the_only_colon_outside_brackets(text: str, expected: tuple[str, int | None]) -> None:
    assert split_slots(text) == expected


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("w0", ["w0"]),
        ("[::1]", ["[::1]"]),
        ("w[0-2]", ["w0", "w1", "w2"]),
        ("w[08-10]", ["w08", "w09", "w10"]),
        ("w[8-10]", ["w8", "w9", "w10"]),
        ("w[1,3,7-9].lab", ["w1.lab", "w3.lab", "w7.lab", "w8.lab", "w9.lab"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("w[3]", ["w3"]),
        ("10.0.0.[4-5]", ["10.0.0.4", "10.0.0.5"]),
    ],
)
def test_ranges_and_lists_expand_in_order(pattern: str, names: list[str]) -> None:
    assert list(expand_names(pattern)) == names


@pytest.mark.parametrize(
    ("pattern", "start", "width", "reason"),
    [
        ("w[0-3", 1, 1, "is not closed"),
        ("w0-3]", 4, 1, "was not opened"),
        ("w[0-3]x[", 7, 1, "is not closed"),
        ("w[]", 2, 1, "a number is missing"),
        ("w[1,]", 4, 1, "a number is missing"),
        ("w[a-b]", 2, 3, "`a-b` is no number and no range"),
        ("w[1,5-3]", 4, 3, "`5-3` runs backwards"),
        ("w[0-999999999]", 2, None, f"more than {MAX_HOSTS} hosts"),
        ("w[0-999][0-999]", 0, None, f"more than {MAX_HOSTS} hosts"),
        ("w[" + ",".join(["0-9999"] * 9) + "]", 2, None, f"more than {MAX_HOSTS} hosts"),
    ],
)
def test_broken_and_endless_ranges_are_refused(pattern: str, start: int, width: int | None, reason: str) -> None:
    with pytest.raises(Misread) as caught:
        expand_names(pattern)
    assert (caught.value.start, caught.value.width) == (start, width)
    assert reason in caught.value.message


def test_blanks_around_numbers_do_not_count_and_places_do() -> None:
    spans = list(read_spans("0, 2 ,4-6", start=10, example="0,2-3"))
    assert [(span.first, span.last, span.start, span.width) for span in spans] == [
        (0, 0, 10, 1),
        (2, 2, 13, 1),
        (4, 6, 16, 3),
    ]


@pytest.mark.parametrize(
    ("ids", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 3, 6), "0-3,6"), ((3, 1, 2), "3,1-2"), ((0, 2), "0,2")]
)
def test_ids_are_shown_as_ranges(ids: tuple[int, ...], text: str) -> None:
    assert format_ids(ids) == text
