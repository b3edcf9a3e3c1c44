"""How a save ends: every rank says what became of its part, the first one publishes, and every rank hears of it.

It goes over the noticeboard and enters no collective: training goes on meanwhile, and each rank comes to its end at its
own time.

[Note: parts that others may name] A rank removes its file only when it knows that no index names it: when its own part
failed, or when the first rank says that nothing was published. In doubt it stays; the next save of the tag removes it.

[Note: who has ended] Nobody waits on for a rank whose process has ended, for the interpreter waits for who waits here.
What it said before still counts: a checkpoint whose parts are all there is published.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from dsrun.checkpoint_files.index.value import StoredFile

from ...mesh.host_memory.noticeboard import Noticeboard
from .presence import Presence

#: How long rank 0 waits for the others to hear the verdict, and how long where its own script has ended.
_HEARD_S = 60.0
_HEARD_AT_THE_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Part:
    """What became of one rank's part.

    Attributes:
        file: its file; None where it had nothing to write, or could not.
        values: the rank's own values for the index.
        error: reason the rank's part could not be written; None where it was written.
        frozen: its file of frozen parameters; None where it has none of its own.
    """

    file: StoredFile | None
    values: dict[str, Any]
    error: str | None = None
    frozen: StoredFile | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a save, the same on every rank that hears of it.

    Attributes:
        error: None where it is published and durable.
        published: whether an index names its files, also where that is doubtful.
        nbytes: bytes of the checkpoint; 0 where the save failed.
    """

    error: str | None
    published: bool
    nbytes: int = 0


def conclude(
    part: Part,
    *,
    rank: int,
    size: int,
    board: Noticeboard,
    subject: str,
    timeout_s: float,
    waiting: Callable[[], None],
    publish: Callable[[Sequence[Part]], Verdict],
) -> Verdict:
    """Says what became of this rank's part, waits for the verdict, and returns it; every rank must call.

    It waits for no rank that has ended, where that rank has said by `Presence.say` which process it is.

    Args:
        part: outcome of this rank's part of the save.
        rank: number of this rank.
        size: number of ranks.
        board: the ranks' noticeboard.
        subject: begins the keys; no other save has the same.
        timeout_s: seconds to wait for the other ranks; a rank that gets no answer in time reports that, and keeps its
            file.
        waiting: callback that is called again and again during the wait; the wait has a deadline, so it is no hang.
        publish: publishes parts that were all written; called on rank 0 alone.
    """
    deadline = time.monotonic() + timeout_s
    presence = Presence(board, subject)

    def hear(key: str, peer: int) -> bytes | None:
        def is_in_vain() -> bool:
            waiting()
            return time.monotonic() >= deadline or presence.has_ended(peer)

        text = board.wait(f"{subject}/{key}", until=is_in_vain)
        # It may have said so between the look for its word and the look for its process.
        return board.wait(f"{subject}/{key}", until=lambda: True) if text is None else text

    def missing(peer: int) -> str:
        return f"rank {peer} has {'ended' if presence.has_ended(peer) else f'not come within {timeout_s:.0f} s'}"

    if rank != 0:
        board.post(f"{subject}/{rank}", json.dumps(asdict(part)).encode())
        text = hear("verdict", 0)
        if text is None:
            return Verdict(f"{missing(0)}, and has not said whether it was published", published=True)
        board.post(f"{subject}/{rank} has heard", b"yes")
        return Verdict(**json.loads(text))
    parts = [part]
    tell = partial(_announce, size=size, board=board, subject=subject, presence=presence)
    try:
        verdict = _verdict(parts, size=size, hear=hear, missing=missing, publish=publish)
    except BaseException as error:
        tell(Verdict(repr(error), published=True), came=len(parts))
        raise
    tell(verdict, came=len(parts))
    return verdict


def _announce(verdict: Verdict, *, came: int, size: int, board: Noticeboard, subject: str, presence: Presence) -> None:
    """Tells all ranks, and leaves nothing on the noticeboard once all of them have heard.

    Rank 0 may hold the store itself, and must not end before those have heard whose parts have come.
    """
    if size == 1:
        return
    board.post(f"{subject}/verdict", json.dumps(asdict(verdict)).encode())
    began = time.monotonic()

    def is_long(rank: int) -> bool:
        allowed_s = _HEARD_S if threading.main_thread().is_alive() else _HEARD_AT_THE_END_S
        return time.monotonic() >= began + allowed_s or presence.has_ended(rank)

    for rank in range(1, came):
        board.wait(f"{subject}/{rank} has heard", until=partial(is_long, rank))
    for rank in range(1, size):
        if board.wait(f"{subject}/{rank} has heard", until=lambda: True) is None:
            return  # it is gone, or so late that it may still read
    for key in ("verdict", *(f"{rank}{what}" for rank in range(1, size) for what in ("", " has heard"))):
        board.take_down(f"{subject}/{key}")
    for rank in range(size):
        board.take_down(presence.key(rank))


def _verdict(
    parts: list[Part],
    *,
    size: int,
    hear: Callable[[str, int], bytes | None],
    missing: Callable[[int], str],
    publish: Callable[[Sequence[Part]], Verdict],
) -> Verdict:
    """Adds the others' parts to `parts` as they come, and publishes them."""
    for rank in range(1, size):
        text = hear(str(rank), rank)
        if text is None:
            return Verdict(f"{missing(rank)}, and has not written its part", published=False)
        parts.append(_part(json.loads(text)))
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(parts) if one.error is not None]
    return Verdict("; ".join(errors), published=False) if errors else publish(parts)


def _part(members: dict[str, Any]) -> Part:
    return Part(_file(members["file"]), members["values"], members["error"], _file(members.get("frozen")))


def _file(members: dict[str, Any] | None) -> StoredFile | None:
    return None if members is None else StoredFile(members["nbytes"], tuple(members["sums"]))
