"""Ranks that gathered other units are told apart by 32 bits, and named with the first unit in which they differ."""

from __future__ import annotations

import pytest
import torch

from dsrun.errors import ModelError
from dsrun.runtime.mesh.loopback import LoopbackCollectives, LoopbackWorld
from dsrun.runtime.zero.params.gather_log import GatherLog, first_difference

NAMES = {0: "blocks.0", 1: "blocks.1", 2: "head"}


def log_of(collectives: LoopbackCollectives) -> GatherLog:
    return GatherLog(NAMES, collectives, torch.device("cpu"))


def refusals(notes: list[list[int]], *, before: int = 0) -> list[str]:
    """What each rank says that gathered these units, after `before` others alike."""

    def body(collectives: LoopbackCollectives) -> str:
        log = log_of(collectives)
        for index in [*[0] * before, *notes[collectives.rank]]:
            log.note(index)
        log.take()
        with pytest.raises(ModelError) as caught:
            log.refuse(" at step 3, micro step 1")
        return str(caught.value)

    return LoopbackWorld(len(notes)).run(body)


def test_the_first_difference_is_named_on_every_rank() -> None:
    said = refusals([[0, 1, 2], [0, 1, 2], [0, 2, 1]])
    where = "gather 2 at step 3, micro step 1 is of `blocks.1` on rank 0 and of `head` on rank 2"
    start = "model: the ranks called its blocks in different orders"
    end = "so at stage 3 they computed with different weights"
    assert said == [f"{start}: {where}; {end}"] * 3


def test_a_rank_that_gathered_less_is_named() -> None:
    assert (
        "gather 3 at step 3, micro step 1 is of `head` on rank 0 and of nothing more on rank 1;"
        in (refusals([[0, 1, 2], [0, 1]])[1])
    )


def test_notes_beyond_what_is_kept_are_counted() -> None:
    before = (1 << 14) + 5
    assert f"gather {before + 1} at" in refusals([[1], [2]], before=before)[0]
    # One rank has more of what is not kept: only that they differ is known.
    assert "different orders at step 3" in refusals([[], [1] * (1 << 14)], before=5)[0]


def test_equal_notes_give_equal_bits_and_others_do_not() -> None:
    [log] = LoopbackWorld(1).run(log_of)
    found: list[int] = []
    for notes in ([0, 1, 2], [0, 1, 2], [0, 2, 1], [0, 1], []):
        for index in notes:
            log.note(index)
        found.append(log.take())
    assert found[0] == found[1]
    assert len(set(found)) == 4
    assert found[-1] == 0
    assert all(0 <= bits < 2**32 for bits in found)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [([[1, 2], [1, 2]], None), ([[1, 2], [1, 3]], (1, 1)), ([[1], [1], [2]], (0, 2)), ([[], []], None)],
)
def test_where_notes_differ(notes: list[list[int]], expected: tuple[int, int] | None) -> None:
    assert first_difference(notes) == expected
