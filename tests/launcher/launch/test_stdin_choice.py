from __future__ import annotations

import pytest

from dsrun.errors import UsageError
from dsrun.launcher.hosts.spec import Allocation, HostSpec
from dsrun.launcher.launch.host_placement import Placement, StaticNode
from dsrun.launcher.launch.stdin_choice import StdinObstacle, StdinWish, choose_stdin_rank, why_no_stdin


def placed(here: int, there: int = 0, static: StaticNode | None = None) -> Placement:
    hosts = [HostSpec(name="here", slots=here, source="t:1")]
    hosts += [HostSpec(name="there", slots=there, source="t:2")] if there else []
    return Placement(
        allocation=Allocation(hosts=tuple(hosts)), local_hosts=frozenset({"here"}), transport="ssh", static=static
    )


NODE = StaticNode(node_rank=1, node_count=2, master_addr="a", master_port=1)


@pytest.mark.parametrize(
    ("wish", "placement", "rank"),
    [
        (None, placed(1), 0),
        (None, placed(2), None),
        (None, placed(1, 1), None),
        (None, placed(1, static=NODE), None),
        ("none", placed(1), None),
        (1, placed(2, 1), 1),
        (3, placed(2, static=NODE), 3),
    ],
)
def test_a_lone_rank_has_stdin_and_of_several_the_one_that_is_named(
    wish: StdinWish, placement: Placement, rank: int | None
) -> None:
    assert choose_stdin_rank(wish, placement, taken=None) == rank


@pytest.mark.parametrize(
    ("rank", "placement", "said"),
    [
        (2, placed(2, 1), "rank 2 runs on host there"),
        (3, placed(2, 1), "there is no such rank among 3"),
        (0, placed(2, static=NODE), "another dsrun starts that rank\nhint: this one starts ranks 2, 3"),
    ],
)
def test_a_rank_that_cannot_have_it_is_refused_by_name(rank: int, placement: Placement, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_stdin_rank(rank, placement, taken=None)
    assert said in caught.value.render()


def test_what_has_taken_it_is_named_where_a_rank_was_and_else_leaves_all_without() -> None:
    taken = StdinObstacle("`-H -` reads the hosts from it", "name a file of hosts")
    assert choose_stdin_rank(None, placed(1), taken=taken) is None
    with pytest.raises(UsageError, match="`--stdin 0`: `-H -` reads the hosts from it"):
        choose_stdin_rank(0, placed(1), taken=taken)


def test_a_rank_without_it_is_told_what_would_give_it() -> None:
    assert why_no_stdin(1, None, placed(2), taken=None) == "`--stdin 1` gives it dsrun's own"
    assert "rank 0 has dsrun's own" in why_no_stdin(1, 0, placed(2), taken=None)
    assert "only ranks of this machine" in why_no_stdin(2, None, placed(2, 1), taken=None)
    assert why_no_stdin(0, None, placed(1), taken=StdinObstacle("it is night", "wait")) == "it is night; wait"
