"""What every rank's flight recorder says becomes one line a group: who waits, and for whom."""

from __future__ import annotations

from collections.abc import Mapping

from dsrun.launcher.failures.nccl_report import findings, lines_of, name_of_wait
from dsrun.launcher.protocol import Collective, GroupProgress


def call(number: int, name: str = "all_reduce", *, data: str = "[8] Float", line: str = "") -> Collective:
    return Collective(number=number, name=name, data=data, state="scheduled", line=line)


def at(
    waits: Collective | None = None,
    *,
    done: Collective | None = None,
    queued: Collective | None = None,
    transfer: Collective | None = None,
    label: str = "default_pg",
    members: str = "0-3",
) -> GroupProgress:
    """How far a rank is in a group; what it waits in is what it called last, unless said."""
    last = queued or waits or done
    return GroupProgress(
        name="0", label=label, members=members, queued=last, completed=done, waits=waits, transfer=transfer
    )


def told(ranks: Mapping[int, GroupProgress]) -> list[str]:
    return lines_of(findings({rank: [progress] for rank, progress in ranks.items()}))


def test_the_rank_that_has_not_called_what_the_others_wait_in_is_named_with_its_last() -> None:
    waits = at(call(57, line="train.py:30"), done=call(56))
    ranks = {0: waits, 1: waits, 2: waits, 3: at(done=call(56, "all_gather"))}
    assert told(ranks) == [
        "default_pg: ranks 0, 1, 2 wait in all_reduce 57 (train.py:30), rank 3 has not called it (last all_gather 56)"
    ]


def test_a_rank_that_runs_ahead_waits_in_the_first_that_is_not_done() -> None:
    ahead = at(call(57), done=call(56), queued=call(80))
    assert told({0: ahead, 1: at(done=call(56)), 2: ahead, 3: ahead}) == [
        "default_pg: ranks 0, 2, 3 wait in all_reduce 57, rank 1 has not called it (last all_reduce 56)"
    ]


def test_ranks_that_call_different_collectives_under_one_number_are_a_mismatch() -> None:
    waits = at(call(57), done=call(56))
    (finding,) = findings({0: [waits], 1: [waits], 2: [waits], 3: [at(call(57, "broadcast", line="eval.py:9"))]})
    assert finding.is_mismatch
    assert finding.text == ("default_pg: ranks 0, 1, 2 wait in all_reduce 57, rank 3 is in broadcast 57 (eval.py:9)")


def test_one_that_is_through_with_another_collective_than_the_others_wait_in_is_a_mismatch_too() -> None:
    waits = at(call(57), members="0-1")
    (finding,) = findings({0: [waits], 1: [at(done=call(57, "broadcast"), members="0-1")]})
    assert (finding.is_mismatch, finding.text) == (
        True,
        "default_pg: rank 0 waits in all_reduce 57, rank 1 is in broadcast 57",
    )


def test_the_same_collective_of_different_sizes_is_a_mismatch() -> None:
    waits = at(call(57), members="0-2")
    assert told({0: waits, 1: waits, 2: at(call(57, data="[7] Float"), members="0-2")}) == [
        "default_pg: ranks 0, 1 wait in all_reduce 57, rank 2 is in all_reduce 57 of [7] Float, not of [8] Float"
    ]


def test_a_sender_that_is_through_is_past_it() -> None:
    receiver = at(call(5, "broadcast"), members="0-2")
    assert told({0: at(done=call(5, "broadcast"), members="0-2"), 1: receiver, 2: receiver}) == [
        "default_pg: ranks 1, 2 wait in broadcast 5, rank 0 is past it"
    ]


def test_where_all_have_called_it_no_rank_is_to_blame() -> None:
    waits = at(call(3), members="0-7")
    assert told(dict.fromkeys(range(8), waits)) == [
        "default_pg: ranks 0-7 wait in all_reduce 3, and all its ranks have called it: "
        "a GPU or the network between them is stuck"
    ]


def test_a_rank_without_a_dump_is_not_blamed_and_one_that_never_used_the_group_is() -> None:
    waits = at(call(1))
    other = GroupProgress(name="9", label="other", members="2", queued=call(4), completed=call(4))
    assert lines_of(findings({0: [waits], 1: [waits], 2: [other]})) == [
        "default_pg: ranks 0, 1 wait in all_reduce 1, rank 2 has not called it, rank 3 left no dump"
    ]


def test_groups_of_one_name_and_other_members_are_told_apart() -> None:
    left, right = at(call(2), label="", members="0-1"), at(done=call(9), label="", members="2-3")
    assert told({0: left, 1: at(done=call(1), label="", members="0-1"), 2: right, 3: right}) == [
        "group 0: rank 0 waits in all_reduce 2, rank 1 has not called it (last all_reduce 1)"
    ]


def test_who_is_behind_because_it_waits_elsewhere_itself_comes_after_who_waits_in_nothing() -> None:
    data = at(call(5), members="0-1", label="data")
    tensor = at(call(7), members="1-2", label="tensor")
    # 2 does nothing; 1 waits for it in `tensor`, and so 0 for 1 in `data`.
    ranks = {
        0: [data],
        1: [tensor, at(done=call(4), members="0-1", label="data")],
        2: [at(done=call(6), members="1-2", label="tensor")],
    }
    assert [line.partition(":")[0] for line in lines_of(findings(ranks))] == ["tensor", "data"]


def test_sends_and_receives_name_their_ranks_and_lines() -> None:
    transfer = call(12, "recv 0<-1", data="", line="pipe.py:8")
    assert told({0: at(transfer=transfer), 1: at(done=call(3))}) == [
        "default_pg: rank 0 waits in recv 0<-1 (pipe.py:8)"
    ]
    assert name_of_wait([at(transfer=transfer)]) == "recv 0<-1 12 of default_pg"


def test_nothing_is_said_where_nobody_waits_and_many_groups_are_counted() -> None:
    assert told({0: at(done=call(3)), 1: at(done=call(3))}) == []
    waits = [
        GroupProgress(name=str(number), label="", members="0-1", queued=call(1), waits=call(1)) for number in range(6)
    ]
    assert lines_of(findings({0: waits, 1: []}))[-1] == "ranks wait in 2 more groups"
