"""How a save ends: every rank says what became of its part, the first one publishes, and every rank hears of it.

It goes over the noticeboard and enters no collective: training goes on meanwhile, and each rank comes to its end at its
own time.

[Note: parts that others may name] A rank removes its file only when it knows that no index names it: when its own part
failed, or when the first rank says that nothing was published. In doubt it stays; the next save of the tag removes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsrun.checkpoint_files.index import StoredFile

from ..mesh.noticeboard import Noticeboard

#: How long rank 0 waits for the others to hear the verdict.
_HEARD_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """What became of one rank's part.

    Attributes:
        file: its file; None where it had nothing to write, or could not.
        values: the rank's own values for the index.
        error: why it could not be written; None where it was.
    """

    file: StoredFile | None
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a save, the same on every rank that hears of it.

    Attributes:
        error: None where it is published and durable.
        published: whether an index names its files, also where that is doubtful.
        nbytes: of the checkpoint.
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

    Args:
        part: this rank's.
        rank: which rank.
        size: how many there are.
        board: the ranks' noticeboard.
        subject: begins the keys; no other save has the same.
        timeout_s: how long to wait for the others; a rank that waited in vain says so, and keeps its file.
        waiting: called again and again while it waits: as there is a deadline, that is no hang.
        publish: publishes parts that were all written; called on rank 0 alone.
    """
    deadline = time.monotonic() + timeout_s

    def is_late() -> bool:
        waiting()
        return time.monotonic() >= deadline

    if rank != 0:
        board.post(f"{subject}/{rank}", json.dumps(asdict(part)).encode())
        text = board.wait(f"{subject}/verdict", until=is_late)
        if text is None:
            return Verdict(f"rank 0 has not said within {timeout_s:.0f} s whether it was published", published=True)
        board.post(f"{subject}/{rank} has heard", b"yes")
        return Verdict(**json.loads(text))
    parts = [part]
    try:
        verdict = _verdict(
            parts, size=size, board=board, subject=subject, timeout_s=timeout_s, late=is_late, publish=publish
        )
    except BaseException as error:
        _announce(Verdict(repr(error), published=True), size=len(parts), board=board, subject=subject)
        raise
    _announce(verdict, size=len(parts), board=board, subject=subject)
    return verdict


def _announce(verdict: Verdict, *, size: int, board: Noticeboard, subject: str) -> None:
    """Tells the first `size` ranks, whose parts have come, and leaves nothing of theirs on the noticeboard.

    Rank 0 may hold the store itself, and must not end before they have heard.
    """
    if size == 1:
        return
    board.post(f"{subject}/verdict", json.dumps(asdict(verdict)).encode())
    deadline = time.monotonic() + _HEARD_S
    for rank in range(1, size):
        if board.wait(f"{subject}/{rank} has heard", until=lambda: time.monotonic() >= deadline) is None:
            return  # it is gone, or so late that it may still read
    for key in ("verdict", *(f"{rank}{what}" for rank in range(1, size) for what in ("", " has heard"))):
        board.take_down(f"{subject}/{key}")


def _verdict(
    parts: list[Part],
    *,
    size: int,
    board: Noticeboard,
    subject: str,
    timeout_s: float,
    late: Callable[[], bool],
    publish: Callable[[Sequence[Part]], Verdict],
) -> Verdict:
    """Adds the others' parts to `parts` as they come, and publishes them."""
    for rank in range(1, size):
        text = board.wait(f"{subject}/{rank}", until=late)
        if text is None:
            return Verdict(f"rank {rank} has not written its part within {timeout_s:.0f} s", published=False)
        parts.append(_part(json.loads(text)))
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(parts) if one.error is not None]
    return Verdict("; ".join(errors), published=False) if errors else publish(parts)


def _part(members: dict[str, Any]) -> Part:
    file = members["file"]
    stored = None if file is None else StoredFile(file["nbytes"], tuple(file["sums"]))
    return Part(stored, members["values"], members["error"])
