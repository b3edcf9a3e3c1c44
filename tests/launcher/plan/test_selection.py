from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsrun.errors import HostfileError
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.plan.selection import is_local, select, select_local

NAMES = frozenset({"box", "box.lab"})


def host(name: str, slots: int = 2, line: int = 1) -> HostSpec:
    return HostSpec(name=name, slots=slots, source=f"hosts:{line}")


ONE = [host("worker-0", 4)]
TWO = [host("worker-0", 4, 1), host("worker-1", 4, 2)]


def slots(allocation: Allocation) -> dict[str, list[int]]:
    """The shape DeepSpeed thinks in: host -> slot ids, in rank order."""
    assert all(taken.slots == len(taken.slot_ids) for taken in allocation.hosts)
    return {taken.name: list(taken.slot_ids) for taken in allocation.hosts}


def messages(error: HostfileError) -> list[str]:
    assert all(problem.hint for problem in error.problems)
    return [problem.message.split("\n")[0] for problem in error.problems]


@pytest.mark.parametrize("hosts", [ONE, TWO])
def test_without_a_filter_everything_is_taken_as_it_is(hosts: list[HostSpec]) -> None:
    assert select(hosts).hosts == tuple(hosts)


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("worker-0:1", [1]),
        ("worker-0:1,1", [1]),
        ("worker-0:1@worker-0:0,1", [0, 1]),
        ("worker-0:3,0", [0, 3]),
        ("worker-0", [0, 1, 2, 3]),
        ("worker-0@worker-0:1", [0, 1, 2, 3]),
    ],
)
def test_include_takes_slots_of_one_host(include: str, expected: list[int]) -> None:
    assert slots(select(ONE, include=include)) == {"worker-0": expected}


@pytest.mark.parametrize(("exclude", "expected"), [("worker-0:1", [0, 2, 3]), ("worker-0:1,2", [0, 3])])
def test_exclude_leaves_slots_of_one_host(exclude: str, expected: list[int]) -> None:
    assert slots(select(ONE, exclude=exclude)) == {"worker-0": expected}


@pytest.mark.parametrize("exclude", ["worker-0", "worker-0:0,1,2,3", "worker-0:0-3", "*", "worker-0@worker-0:1"])
def test_nothing_left_is_an_error(exclude: str) -> None:
    with pytest.raises(HostfileError) as caught:
        select(ONE, exclude=exclude)
    assert messages(caught.value) == [f"`--exclude {exclude}` leaves no slot"]


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("worker-1:0,3", {"worker-1": [0, 3]}),
        ("worker-0@worker-1:0,2", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}),
        ("worker-1:2@worker-0:1", {"worker-0": [1], "worker-1": [2]}),
        ("worker-*:0-1", {"worker-0": [0, 1], "worker-1": [0, 1]}),
    ],
)
def test_include_takes_parts_of_several_hosts_in_the_order_of_the_hostfile(
    include: str, expected: dict[str, list[int]]
) -> None:
    found = slots(select(TWO, include=include))
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("worker-1", {"worker-0": [0, 1, 2, 3]}),
        ("worker-0:0,1@worker-1:3", {"worker-0": [2, 3], "worker-1": [0, 1, 2]}),
        ("worker-1:0@worker-1", {"worker-0": [0, 1, 2, 3]}),
        ("worker-1:0-3", {"worker-0": [0, 1, 2, 3]}),
    ],
)
def test_exclude_leaves_the_rest_of_several_hosts(exclude: str, expected: dict[str, list[int]]) -> None:
    assert slots(select(TWO, exclude=exclude)) == expected


def test_chosen_slots_are_the_ids_of_gpus() -> None:
    hosts = [HostSpec(name="w", slots=4, source="hosts:1", gpus=(6, 7, 0, 2), env={"A": "1"})]
    (taken,) = select(hosts, include="w:0,6-7").hosts
    assert (taken.gpus, taken.slots, taken.env) == ((6, 7, 0), 3, {"A": "1"})
    assert select(hosts, ranks_per_host=2).hosts[0].gpus == (6, 7)


def test_a_filter_says_which_gpus_and_no_filter_leaves_them_open() -> None:
    assert select(ONE, include="worker-0").hosts[0].gpus == (0, 1, 2, 3)
    assert select(TWO, exclude="worker-1").hosts[0].gpus == (0, 1, 2, 3)
    assert select(ONE).hosts[0].gpus is None
    assert select(ONE, ranks_per_host=2).hosts[0].gpus is None


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        (1, None, {"worker-0": [0, 1, 2, 3]}),
        (2, None, {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}),
        (None, 2, {"worker-0": [0, 1], "worker-1": [0, 1]}),
        (1, 3, {"worker-0": [0, 1, 2]}),
    ],
)
def test_counts_take_the_first_hosts_and_slots(
    nodes: int | None, ranks: int | None, expected: dict[str, list[int]]
) -> None:
    assert slots(select(TWO, nodes=nodes, ranks_per_host=ranks)) == expected


def test_more_hosts_and_slots_than_there_are_is_refused_all_at_once() -> None:
    with pytest.raises(HostfileError) as caught:
        select([host("a", 2, 1), host("b", 8, 2), host("c", 4, 3)], nodes=4, ranks_per_host=5)
    assert messages(caught.value) == [
        "`--nodes 4`: 3 hosts are there",
        "hosts:1: 5 ranks are asked for, host `a` has 2 slots",
        "hosts:3: 5 ranks are asked for, host `c` has 4 slots",
    ]


def test_slots_of_hosts_that_are_not_taken_do_not_matter() -> None:
    assert slots(select([host("a", 2), host("b", 1)], nodes=1, ranks_per_host=2)) == {"a": [0, 1]}


@pytest.mark.parametrize(("include", "exclude"), [("worker-0", None), (None, "worker-0")])
@pytest.mark.parametrize(
    ("nodes", "ranks", "counts"), [(1, None, ["--nodes 1"]), (1, 1, ["--nodes 1", "-n 1"]), (None, 1, ["-n 1"])]
)
def test_counts_and_filters_exclude_one_another(
    include: str | None, exclude: str | None, nodes: int | None, ranks: int | None, counts: list[str]
) -> None:
    flag = "--include" if include else "--exclude"
    with pytest.raises(HostfileError) as caught:
        select(TWO, include=include, exclude=exclude, nodes=nodes, ranks_per_host=ranks)
    assert messages(caught.value) == [f"`{count}` and `{flag}` cannot be used together" for count in counts]


def test_both_filters_at_once_are_refused_with_everything_else_that_is_wrong() -> None:
    with pytest.raises(HostfileError) as caught:
        select(TWO, include="jeff@worker-1:9", exclude="worker-0:x", nodes=0)
    assert messages(caught.value) == [
        "`--include` and `--exclude` cannot be used together",
        "`--nodes 0` and `--include` cannot be used together",
        "`--nodes 0`: expected 1 or more",
        "--include:1: no host is called `jeff`",
        "--include:15: host `worker-1` has no slot 9",
        "--exclude:10: `x` is no number and no range",
    ]


@pytest.mark.parametrize("text", ["jeff", "worker-1:4", "worker-1@worker-0:1@5", ""])
def test_unknown_hosts_and_slots_are_refused_by_both_filters(text: str) -> None:
    with pytest.raises(HostfileError, match="--include:"):
        select(TWO, include=text)
    with pytest.raises(HostfileError, match="--exclude:"):
        select(TWO, exclude=text)


def test_variables_that_say_who_a_worker_is_are_refused_once_a_line() -> None:
    hosts = [HostSpec(name=name, slots=1, source="hosts:1", env={"RANK": "0", "A": "1"}) for name in ("a", "b")]
    with pytest.raises(HostfileError) as caught:
        select(hosts)
    assert messages(caught.value) == ["hosts:1: `env.RANK` is dsrun's to set"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 3)), min_size=1, max_size=6))
def test_include_and_exclude_of_one_filter_divide_the_slots(nodes: list[tuple[str, int | None]]) -> None:
    hosts = [host("a", 4), host("b", 4)]
    text = "@".join(name if slot is None else f"{name}:{slot}" for name, slot in nodes)
    taken = {(name, slot) for name, ids in slots(select(hosts, include=text)).items() for slot in ids}
    try:
        left = {(name, slot) for name, ids in slots(select(hosts, exclude=text)).items() for slot in ids}
    except HostfileError:
        left = set[tuple[str, int]]()
    assert taken == {(name, slot) for name, only in nodes for slot in (range(4) if only is None else [only])}
    assert taken | left == {(name, slot) for name in "ab" for slot in range(4)}
    assert not taken & left


@pytest.mark.parametrize(("asked", "gpus", "count"), [(None, 0, 1), (None, 4, 4), (2, 4, 2), (3, 0, 3)])
def test_this_machine_takes_a_rank_for_each_gpu_unless_asked_otherwise(
    asked: int | None, gpus: int, count: int
) -> None:
    allocation = select_local(ranks_per_host=asked, device_count=gpus)
    assert allocation.hosts == (HostSpec(name="localhost", slots=count, source="this machine"),)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [("localhost:0,2", None, (0, 2)), ("localhost", None, (0, 1, 2, 3)), (None, "localhost:0", (1, 2, 3))],
)
def test_slots_of_this_machine_are_chosen_without_a_hostfile(
    include: str | None, exclude: str | None, expected: tuple[int, ...]
) -> None:
    (here,) = select_local(ranks_per_host=None, device_count=4, include=include, exclude=exclude).hosts
    assert (here.gpus, here.slots) == (expected, len(expected))


def test_slots_this_machine_does_not_have_are_refused() -> None:
    with pytest.raises(HostfileError) as caught:
        select_local(ranks_per_host=None, device_count=0, include="localhost:2@box")
    assert [problem.hint for problem in caught.value.problems] == [
        "`localhost` has slot 0 only (this machine)",
        "there is `localhost`",
    ]


def test_more_than_one_node_needs_a_hostfile() -> None:
    assert select_local(ranks_per_host=2, device_count=0, nodes=1).world_size == 2
    with pytest.raises(HostfileError, match="`--nodes 2`: without a hostfile there is this machine alone"):
        select_local(ranks_per_host=2, device_count=0, nodes=2)


def test_a_count_beside_a_filter_is_refused_on_this_machine_too() -> None:
    with pytest.raises(HostfileError, match="`-n 9` and `--include` cannot be used together"):
        select_local(ranks_per_host=9, device_count=4, include="localhost:0")


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "::1", "[::1]", "box", "Box.Lab"])
def test_this_machine_goes_by_many_names(name: str) -> None:
    assert is_local(name, local_names=NAMES)
