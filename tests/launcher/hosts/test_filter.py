from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.filter import NamedSlots, read_filter
from dsrun.launcher.hosts.hostfile import parse_hostfile

HOSTS = parse_hostfile(
    "worker-0 slots=4\nworker-1 slots=4\nW-big gpus=2,5-7\n[fd00::4] slots=2\n10.0.0.5 slots=1\n", name="hosts"
)


def read(text: str) -> dict[str, set[int] | str]:
    """What a filter names, by host."""
    found = read_filter(text, HOSTS, option="--include")
    return {HOSTS[index].name: "all" if said.whole else set(said.slots) for index, said in found.items()}


def problems(text: str) -> list[str]:
    with pytest.raises(HostfileError) as caught:
        read_filter(text, HOSTS, option="--include")
    assert all(problem.hint for problem in caught.value.problems)
    return [problem.message.split("\n")[0].removeprefix("--include:") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker-0", {"worker-0": "all"}),
        ("worker-0@worker-1:0,2", {"worker-0": "all", "worker-1": {0, 2}}),
        ("worker-1:0-2", {"worker-1": {0, 1, 2}}),
        ("worker-1:0,2-3", {"worker-1": {0, 2, 3}}),
        ("worker-1: 0, 2 ", {"worker-1": {0, 2}}),
        (" worker-0 @ worker-1 ", {"worker-0": "all", "worker-1": "all"}),
        ("worker-1:1,1", {"worker-1": {1}}),
        ("worker-1:01", {"worker-1": {1}}),
        ("WORKER-0", {"worker-0": "all"}),
        ("worker-0.", {"worker-0": "all"}),
        ("w-big:5", {"W-big": {5}}),
        ("W-big:2,5-7", {"W-big": {2, 5, 6, 7}}),
        ("[fd00::4]", {"[fd00::4]": "all"}),
        ("fd00::4", {"[fd00::4]": "all"}),
        ("[FD00:0::4]:1", {"[fd00::4]": {1}}),
        ("10.0.0.5:0", {"10.0.0.5": {0}}),
        ("worker-*", {"worker-0": "all", "worker-1": "all"}),
        ("w*:2", {"worker-0": {2}, "worker-1": {2}, "W-big": {2}}),
        ("worker-?:0-1", {"worker-0": {0, 1}, "worker-1": {0, 1}}),
        ("*", {host.name: "all" for host in HOSTS}),
        ("worker-[0-1]", {"worker-0": "all", "worker-1": "all"}),
        ("worker-[1,0]:3", {"worker-0": {3}, "worker-1": {3}}),
        ("w[o]*", None),
        ("[0-1]", None),
    ],
)
def test_nodes_are_hosts_globs_ranges_and_addresses(text: str, named: dict[str, set[int] | str] | None) -> None:
    if named is None:
        assert problems(text)
    else:
        assert read(text) == named


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("worker-0:1@worker-0:0,1", {"worker-0": {0, 1}}),
        ("worker-0@worker-0:1", {"worker-0": "all"}),
        ("worker-0:1@worker-0", {"worker-0": "all"}),
        ("worker-*:0@worker-1:3", {"worker-0": {0}, "worker-1": {0, 3}}),
    ],
)
def test_nodes_that_repeat_are_merged_and_a_bare_host_is_all_of_it(text: str, named: dict[str, set[int] | str]) -> None:
    assert read(text) == named


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("jeff", ["1: no host is called `jeff`"]),
        ("worker-0@jeff:1", ["10: no host is called `jeff`"]),
        ("worker-1@worker-0:1@5", ["21: no host is called `5`"]),
        ("worker-1:4", ["10: host `worker-1` has no slot 4"]),
        ("worker-1:0,9,2", ["12: host `worker-1` has no slot 9"]),
        ("worker-1:2-9", ["10: host `worker-1` has no slot 4"]),
        ("worker-1:0-999999999", ["10: host `worker-1` has no slot 4"]),
        ("W-big:0", ["7: host `W-big` has no slot 0"]),
        ("W-big:5-8", ["7: host `W-big` has no slot 8"]),
        ("worker-*:4", ["10: hosts `worker-0`, `worker-1` have no slot 4"]),
        ("worker-1:-1", ["10: `-1` is no number and no range"]),
        ("worker-1:x", ["10: `x` is no number and no range"]),
        ("worker-1:", ["10: a number is missing"]),
        ("worker-1:1,,2", ["12: a number is missing"]),
        ("worker-1:1:2", ["11: `worker-1:1:2` has more than one `:`"]),
        ("worker-1:3-1", ["10: `3-1` runs backwards"]),
        ("worker-1:٣", ["10: `٣` is no number and no range"]),
        ("", ["1: a host's name is missing"]),
        ("@worker-0", ["1: a host's name is missing"]),
        ("worker-0@", ["10: a host's name is missing"]),
        ("worker-0@@worker-1", ["10: a host's name is missing"]),
        (":1", ["1: no host is called ``"]),
        ("worker-[0-3]", ["1: no hosts are called `worker-2`, `worker-3`"]),
        ("worker-[0-1", ["8: the bracket in `worker-[0-1` is not closed"]),
        ("node-*", ["1: no host is called `node-*`"]),
        ("a;b", ["1: no host is called `a;b`"]),
        ("a\nb", ["1: no host is called `a?b`"]),
        ("worker-0,worker-1", ["1: no host is called `worker-0,worker-1`"]),
    ],
)
def test_each_mistake_has_its_place_in_the_option(text: str, messages: list[str]) -> None:
    assert problems(text) == messages


def test_brackets_of_an_address_are_no_set_of_characters_in_a_glob() -> None:
    assert read("[fd00::*]") == {"[fd00::4]": "all"}


def test_a_glob_of_many_stars_does_not_take_for_ever() -> None:
    hosts = parse_hostfile("a" * 250 + " slots=1", name="hosts")
    with pytest.raises(HostfileError, match="no host is called"):
        read_filter("*a" * 60 + "b", hosts, option="--include")


def test_everything_wrong_is_said_at_once() -> None:
    assert [message.partition(":")[0] for message in problems("jeff@worker-1:9,0,8@@worker-0:x")] == [
        "1",
        "15",
        "19",
        "21",
        "31",
    ]


def test_a_problem_shows_the_option_and_the_host_that_was_meant() -> None:
    with pytest.raises(HostfileError) as caught:
        read_filter("worker-0@wroker-1:0", HOSTS, option="--exclude")
    assert caught.value.render() == (
        "error: --exclude:10: no host is called `wroker-1`\n"
        "  worker-0@wroker-1:0\n"
        "           ^~~~~~~~\n"
        "hint: did you mean `worker-1` or `worker-0`?"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("jeff", "there are `worker-0`, `worker-1`, `W-big`, `[fd00::4]`, `10.0.0.5`"),
        ("w-bigg", "did you mean `W-big`?"),
        ("worker-0,worker-1", "nodes are divided by `@`: `worker-0@worker-1:0,2`"),
        ("worker-1:9", "`worker-1` has slots 0-3 (hosts:2)"),
        ("W-big:0", "`W-big` has slots 2,5-7 (hosts:3)"),
        ("10.0.0.5:1", "`10.0.0.5` has slot 0 only (hosts:5)"),
        ("::1:0:x", "nodes are divided by `@`; IPv6 addresses stand in brackets: `[::1]:0`"),
    ],
)
def test_the_way_out_says_what_there_is(text: str, hint: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read_filter(text, HOSTS, option="--include")
    assert [problem.hint for problem in caught.value.problems] == [hint]


@given(st.lists(st.sampled_from(["worker-0", "w", "[fd00::4]", "*", "?", "@", ":", ",", "-", "0", "9", "[", "]", " "])))
def test_any_text_names_hosts_that_are_there_or_is_one_error(pieces: list[str]) -> None:
    try:
        found = read_filter("".join(pieces), HOSTS, option="--include")
    except HostfileError:
        return
    assert found
    assert all(said.whole or said.slots <= set(HOSTS[index].slot_ids) for index, said in found.items())


@given(st.sets(st.sampled_from(range(4)), min_size=1), st.sets(st.sampled_from(range(4)), min_size=1))
def test_order_and_repetition_of_nodes_do_not_matter(first: set[int], second: set[int]) -> None:
    one, two = (f"worker-0:{','.join(map(str, slots))}" for slots in (first, second))
    merged = {0: NamedSlots(whole=False, slots=frozenset(first | second))}
    assert (
        read_filter(f"{one}@{two}", HOSTS, option="-i")
        == read_filter(f"{two}@{one}@{one}", HOSTS, option="-i")
        == merged
    )
