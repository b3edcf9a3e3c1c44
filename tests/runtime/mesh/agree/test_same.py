"""Ranks that mean different things, or of which one failed, hear of it together."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.mesh.agree.same import Failure, attempt, check_agreement, largest
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from support.host_reads import HostReads, NamedReads

CPU = torch.device("cpu")


def test_ranks_that_agree_pass() -> None:
    facts = {"a": [1, None, "x"], "b": {"y": 2, "x": 1}}
    LoopbackWorld(3).run(lambda c: check_agreement(facts, c, device=CPU))


def test_every_fact_that_differs_is_named_with_its_ranks_on_all_ranks() -> None:
    def body(collectives: LoopbackCollectives) -> str:
        facts = {
            "same": 1,
            "the model": collectives.rank != 1,
            "the config": {"params": {"lr": max(collectives.rank, 1)}},
        }
        with pytest.raises(ModelError) as caught:
            check_agreement(facts, collectives, device=CPU)
        return str(caught.value)

    texts = LoopbackWorld(4).run(body)
    assert set(texts) == {
        "the ranks do not agree with rank 0: rank 1 in the model: is true on rank 0 and false there; "
        "rank 2 in the config: `params.lr` is 1 on rank 0 and 2 there; "
        "rank 3 in the config: `params.lr` is 1 on rank 0 and 3 there"
    }


def test_ranks_that_differ_alike_are_named_together_and_agreement_sends_nothing_more() -> None:
    def body(collectives: LoopbackCollectives) -> tuple[str, int]:
        text = ""
        facts = {"data": [["a", 1], ["b", 2 if collectives.rank else 3]], "same": "x" * 5000}
        try:
            check_agreement(facts, collectives, device=CPU)
        except ModelError as error:
            text = str(error)
        check_agreement({"same": "x" * 5000}, collectives, device=CPU)
        return text, collectives.traffic.bytes["all_gather"] - 3 * (2 * 32 + 1024 + 32)

    assert (
        LoopbackWorld(3).run(body)
        == [("the ranks do not agree with rank 0: rank 1, 2 in data: `b` is 3 on rank 0 and 2 there", 0)] * 3
    )


def test_a_name_that_is_missing_from_several_lists_is_told_once() -> None:
    def body(collectives: LoopbackCollectives) -> str:
        names = ["a", "b", "c"] if collectives.rank == 1 else ["a", "b"]
        group = 1 if collectives.rank == 2 else 0
        facts = {
            "the shapes": [(name, {"shape": [4]}) for name in names],
            "the homes": [(name, {"home": None}) for name in names],
            "the groups": [(name, {"group": group}) for name in names],
        }
        with pytest.raises(ModelError) as caught:
            check_agreement(facts, collectives, device=CPU)
        return str(caught.value)

    assert set(LoopbackWorld(3).run(body)) == {
        'the ranks do not agree with rank 0: rank 1 in the shapes: `[2]` is absent on rank 0 and "c" there; '
        "rank 2 in the groups: `a.group` is 0 on rank 0 and 1 there"
    }


def test_the_largest_of_each_number_is_known_on_every_rank_exactly() -> None:
    def body(collectives: LoopbackCollectives) -> list[float]:
        own = [0.1 * collectives.rank, 2.0**60 + 512 * collectives.rank, -1.0 - collectives.rank]
        return largest(own, collectives, device=CPU, label="figures")

    assert LoopbackWorld(3).run(body) == [[0.2, 2.0**60 + 1024, -1.0]] * 3


def test_a_failure_is_known_on_every_rank() -> None:
    def body(collectives: LoopbackCollectives) -> Failure | None:
        def work() -> None:
            if collectives.rank == 1:
                raise OSError("full")

        return attempt(work, collectives, device=CPU, label="save")

    found = LoopbackWorld(3).run(body)
    assert [failure is not None and failure.rank for failure in found] == [1, 1, 1]
    assert [failure is not None and str(failure.error) for failure in found] == ["None", "full", "None"]
    assert LoopbackWorld(2).run(lambda c: attempt(lambda: None, c, device=CPU, label="save")) == [None, None]


def test_every_read_of_what_other_ranks_told_says_what_it_is_of() -> None:
    def body(collectives: LoopbackCollectives) -> list[str | None]:
        named = NamedReads(collectives)
        with HostReads(named) as reads:
            largest([float(named.rank)], named, device=CPU, label="tags")
            attempt(lambda: None, named, device=CPU, label="save")
            with pytest.raises(ModelError):
                check_agreement({"the model": named.rank}, named, device=CPU)
        return reads.of

    for label in LoopbackWorld(2).run(body):
        assert label[:2] == ["tags", "save outcome"]
        assert len(label) == 6
        assert None not in label
