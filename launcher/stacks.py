"""Where every rank of a host is, right now: state in the kernel, and Python's stacks as faulthandler writes them.

The agent's side; the rank's is in `bootstrap`, which registers faulthandler. Does not wait: whoever owns the loop looks
again. Does not read stacks, which is for whoever says what hangs.

[Note: who can answer] faulthandler answers from within the signal handler, so a rank that holds the GIL for ever
answers too. A rank that is stopped cannot, and one that is no Python, or not yet, has no handler and would die of the
signal: it is not sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.contract import STACKS_SIGNAL
from dsrun.heartbeats import HeartbeatTable

from . import processes
from .protocol import RankStack, Stacks
from .pulses import idle_s
from .worker import LiveRank, stacks_file

#: Between two looks at files that grow; also how long one must stand still to be taken for complete.
_LOOK_S = 0.1
_PATIENCE_S = 2.0
#: Of a rank's text, half from its beginning and half from its end, where faulthandler puts the main thread.
_MOST_BYTES = 64 << 10
_STOPPED = frozenset("TtZX")


@dataclass(slots=True)
class _Asked:
    """A rank that writes."""

    path: Path
    begin: int
    size: int


class StackTaking:
    """One question to all ranks, from the signal to the answer. See [Note: who can answer].

    Args:
        ranks: those that have not ended.
        run_dir: folder of their files.
        table: what they say themselves.
        now_s: monotonic seconds.
    """

    def __init__(self, ranks: Sequence[LiveRank], *, run_dir: str, table: HeartbeatTable, now_s: float) -> None:
        #: When to look next.
        self.due_s = now_s + _LOOK_S
        self._deadline_s = now_s + _PATIENCE_S
        self._answers: dict[int, RankStack] = {}
        self._asked: dict[int, _Asked] = {}
        for rank in ranks:
            answer = _look_at(rank, table, now_s)
            self._answers[rank.rank] = answer
            if answer.state and answer.state not in _STOPPED and processes.catches(rank.process, STACKS_SIGNAL):
                path = stacks_file(run_dir, rank.rank)
                size = _size(path)
                self._asked[rank.rank] = _Asked(path, size, size)
                processes.send(rank.process, STACKS_SIGNAL)

    def look(self, now_s: float) -> Stacks | None:
        """Returns the answer once all texts are complete, or time is up; None before."""
        if now_s < self.due_s:
            return None
        self.due_s = now_s + _LOOK_S
        complete = True
        for asked in self._asked.values():
            size = _size(asked.path)
            complete &= size > asked.begin and size == asked.size
            asked.size = size
        if not complete and now_s < self._deadline_s:
            return None
        texts = {rank: _read(asked.path, asked.begin) for rank, asked in self._asked.items()}
        return Stacks(ranks=[replace(answer, text=texts.get(rank, "")) for rank, answer in self._answers.items()])


def _look_at(rank: LiveRank, table: HeartbeatTable, now_s: float) -> RankStack:
    """What can be said without asking; looked at first, for the question itself wakes the rank."""
    beat = table.read(rank.local_rank)
    folder = Path(f"/proc/{rank.process.pid}")
    return RankStack(
        rank=rank.rank,
        state=_state(folder),
        kernel=_sleeps_in(folder),
        text="",
        phase="" if beat is None else beat.phase,
        collective="" if beat is None else beat.collective,
        step=None if beat is None else beat.step,
        idle_s=idle_s(beat, now_s),
    )


def _state(folder: Path) -> str:
    try:
        # After the name, which is in brackets and may hold anything.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _sleeps_in(folder: Path) -> str:
    try:
        name = (folder / "wchan").read_text()
    except OSError:
        return ""
    # 0: it runs, or the kernel does not tell this user.
    return "" if name == "0" else name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, begin: int) -> str:
    """Returns what was written from `begin` on; of a long text its two ends."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(begin)
            if end - begin <= _MOST_BYTES:
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
            head = file.read(_MOST_BYTES // 2)
            file.seek(end - _MOST_BYTES // 2)
            tail = file.read(_MOST_BYTES // 2)
    except OSError:
        return ""
    return b"\n...\n".join((head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :])).decode("utf-8", "replace")
