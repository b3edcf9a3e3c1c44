from __future__ import annotations

import os

from dsrun.launcher.agent.start.stdin_readers import ReadingPipe
from dsrun.launcher.protocol import Reading


def told(pipe: ReadingPipe, *words: bytes) -> None:
    descriptor = os.open(pipe.path, os.O_WRONLY)
    for word in words:
        os.write(descriptor, word)
        pipe.read()
    os.close(descriptor)


def test_words_of_ranks_come_in_order_wherever_the_pipe_cuts_them() -> None:
    pipe = ReadingPipe()
    told(pipe, b"1 wai", b"ts\n12 typed\n", b"nonsense\n1 sings\n")
    pipe.read()
    expected = [Reading(rank=1, state="waits"), Reading(rank=12, state="typed")]
    assert list(pipe.take(beginning=True)) == expected
    assert list(pipe.take(beginning=True)) == []


def test_ends_of_waits_do_not_overtake_a_beginning() -> None:
    pipe = ReadingPipe()
    told(pipe, b"0 typed\n0 waits\n0 goes_on\n")
    assert [each.state for each in pipe.take(beginning=False)] == ["typed"]
    assert [each.state for each in pipe.take(beginning=False)] == []
    assert [each.state for each in pipe.take(beginning=True)] == ["waits", "goes_on"]
