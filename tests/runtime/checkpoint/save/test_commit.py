"""A save whose ranks end meanwhile: nobody waits for the dead, and what they said before still counts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest

from dsrun.runtime.checkpoint.save.commit import Part, Verdict, conclude
from dsrun.runtime.checkpoint.save.presence import Presence
from dsrun.runtime.mesh.host_memory.noticeboard import LocalNoticeboard, Noticeboard

#: Longer than any test may take: who waits for it has not noticed.
NEVER_S = 3600.0
PART = Part(None, {})
#: A rank that says who it is over its output, and lives until its input ends.
RANK = """
import sys
from dsrun.runtime.checkpoint.save.presence import Presence
class Board:
    def post(self, key, text): print(text.decode(), flush=True)
Presence(Board(), "s").say(0)
sys.stdin.read()
"""


class Rank:
    """Another process that takes part in the save `s`."""

    def __init__(self, board: Noticeboard, rank: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        board.post(Presence(board, "s").key(rank), self.process.stdout.readline().encode())

    def kill(self) -> None:
        """Ends it, and leaves it as its parent may: not waited for."""
        self.process.kill()


def ends(board: Noticeboard, *, rank: int, size: int, waiting: Callable[[], None]) -> Verdict:
    """Concludes as one rank; a verdict that takes too long is none."""
    verdicts: list[Verdict] = []

    def publish(parts: Sequence[Part]) -> Verdict:
        return Verdict(None, published=True, nbytes=len(parts))

    def run() -> None:
        verdicts.append(
            conclude(
                PART,
                rank=rank,
                size=size,
                board=board,
                subject="s",
                timeout_s=NEVER_S,
                waiting=waiting,
                publish=publish,
            )
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(50)  # less than rank 0 waits for those that it does not know
    assert verdicts, "it still waits"
    return verdicts[0]


@pytest.fixture
def board() -> LocalNoticeboard:
    return LocalNoticeboard()


def test_a_rank_that_ended_without_its_part_is_not_waited_for(board: LocalNoticeboard) -> None:
    other = Rank(board, 1)
    verdict = ends(board, rank=0, size=3, waiting=other.kill)
    assert verdict == Verdict("rank 1 has ended, and has not written its part", published=False)
    other.process.communicate()
    assert ends(board, rank=2, size=3, waiting=lambda: None) == verdict, "the one behind it hears of it as well"


def test_a_part_of_a_rank_that_ended_counts_and_its_ear_is_not_waited_for(board: LocalNoticeboard) -> None:
    other = Rank(board, 1)
    other.kill()
    other.process.communicate()
    board.post("s/1", b'{"file": null, "values": {}, "error": null}')
    assert ends(board, rank=0, size=2, waiting=lambda: None) == Verdict(None, published=True, nbytes=2)


def test_a_first_rank_that_ended_leaves_the_others_in_doubt(board: LocalNoticeboard) -> None:
    first = Rank(board, 0)
    verdict = ends(board, rank=1, size=2, waiting=first.kill)
    assert verdict == Verdict("rank 0 has ended, and has not said whether it was published", published=True)
    first.process.communicate()


def test_ranks_that_are_there_are_waited_for_and_nothing_of_them_stays(board: LocalNoticeboard) -> None:
    verdicts: list[Verdict] = []

    def take_part(rank: int) -> None:
        verdicts.append(ends(board, rank=rank, size=3, waiting=lambda: None))

    for rank in range(3):
        Presence(board, "s").say(rank)
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [Verdict(None, published=True, nbytes=3)] * 3
    keys = ["s/verdict", *(f"s/{rank}{what}" for rank in range(3) for what in ("", " is", " has heard"))]
    assert [key for key in keys if board.wait(key, until=lambda: True) is not None] == []


def test_a_number_that_another_process_has_by_now_is_not_the_rank(board: LocalNoticeboard) -> None:
    Presence(board, "s").say(0)
    assert not Presence(board, "s").has_ended(0)
    text = board.wait("s/0 is", until=lambda: True)
    assert text is not None
    began = text.split(b'"began": "')[1].split(b'"')[0]
    board.post("s/1 is", text.replace(began, b"1"))
    assert Presence(board, "s").has_ended(1)
    board.post("s/2 is", text.replace(b'"namespace": "', b'"namespace": "elsewhere '))
    assert not Presence(board, "s").has_ended(2), "another host's processes cannot be seen"
    assert not Presence(board, "s").has_ended(3), "nor one that has not said who it is"
