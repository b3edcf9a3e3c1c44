"""Where every rank of a host is, right now: state in the kernel, Python's stacks as faulthandler writes them, and how
far its process groups are, as torch's flight recorder says.

The agent's side; the rank's is in `start.stack_answers` and in torch. Does not wait: whoever owns the loop looks again.
Does not read stacks, which is for whoever says what hangs.

[Note: who can answer] A rank is asked through its FIFO, and by the signal where it does not answer: so one that holds
the GIL for ever answers too. See [Note: two ways to ask]. A rank that is stopped cannot, and one that is no Python, or
not yet, has no handler and would die of the signal: it is not sent. The flight recorder answers from a thread of
NCCL's, within about three seconds, of which one is that thread's pause; for the stacks in its dump it needs the GIL, so
a rank that holds it for ever gives none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from dsrun.contract.environment import STACKS_SIGNAL
from dsrun.contract.heartbeats import HeartbeatTable
from dsrun.contract.job_paths import JobPaths, stacks_pipe

from ... import processes
from ...os_errors import refusal_of
from ...protocol import RankStack, Stacks
from ..fifo_requests import request
from ..start.flight_recorder import RecorderFiles
from ..start.worker import RankProcess
from .nccl_dumps import MOST_BYTES, DumpError, read_dump
from .rank_status import idle_s

#: Between two looks at files that grow; also how long one must stand still to be taken for complete.
_LOOK_S = 0.1
_PATIENCE_S = 3.0
#: After it a rank that has not answered holds the GIL; on a busy machine it may have had no turn yet.
_SIGNAL_AFTER_S = 1.5
#: For the dumps that torch writes when it is asked: the first one takes it a second or two of a free core, for the
#: symbols of its libraries, and all ranks of the host write theirs at once, on cores that may have other work.
_DUMP_PATIENCE_S = 40.0
#: Of a pickle and of JSON: a dump that ends with something else is still being written.
_DUMP_ENDS = (b".", b"}")
#: Of a rank's text, half from its beginning and half from its end, where faulthandler puts the main thread.
_MOST_BYTES = 64 << 10
_STOPPED = frozenset("TtZX")
#: torch's name for the thread that watches the process's NCCL groups, as long as the kernel keeps names.
_WATCHDOG_THREAD = "pt_nccl_watchdg"


@dataclass(slots=True)
class _Asked:
    """A rank that writes, once it has been asked through its FIFO (`signal_at_s` is set) or by the signal."""

    process: psutil.Process
    path: Path
    begin: int
    size: int
    signal_at_s: float | None


@dataclass(slots=True)
class _AskedDump:
    """A rank that writes its flight recorder's dump."""

    process: psutil.Process
    files: RecorderFiles
    before: tuple[int, int]
    stamp: tuple[int, int]


class StackTaking:
    """One question to all ranks, from the signal to the answer. See [Note: who can answer].

    Args:
        ranks: those that have not ended.
        run_dir: folder of their files.
        table: heartbeat table, in which the ranks themselves say how they fare.
        recorders: files and pipe of each rank's flight recorder, by rank.
        now_s: monotonic seconds.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        *,
        run_dir: str,
        table: HeartbeatTable,
        recorders: Mapping[int, RecorderFiles],
        now_s: float,
    ) -> None:
        #: When to look next.
        self.due_s = now_s + _LOOK_S
        self._deadline_s = now_s + _PATIENCE_S
        self._dump_deadline_s = now_s + _DUMP_PATIENCE_S
        self._answers: dict[int, RankStack] = {}
        self._asked: dict[int, _Asked] = {}
        self._asked_dumps: dict[int, _AskedDump] = {}
        paths = JobPaths(Path(run_dir))
        for rank in ranks:
            files = recorders.get(rank.rank)
            answer = replace(_look_at(rank, table, now_s), dump="" if files is None else str(files.dump))
            self._answers[rank.rank] = answer
            # Also one that is no Python, or holds its signals back: the recorder listens on a thread of its own.
            before = (0, 0) if files is None else files.stamp()
            if files is not None and answer.state and answer.state not in _STOPPED and files.ask():
                self._asked_dumps[rank.rank] = _AskedDump(rank.process, files, before, before)
            if answer.state and answer.state not in _STOPPED and processes.catches(rank.process, STACKS_SIGNAL):
                path = paths.stacks(rank.rank)
                size = _size(path)
                signal_at_s = now_s + _SIGNAL_AFTER_S if request(stacks_pipe(path)) else None
                self._asked[rank.rank] = _Asked(rank.process, path, size, size, signal_at_s)
                if signal_at_s is None:
                    processes.send(rank.process, STACKS_SIGNAL)

    def look(self, now_s: float) -> Stacks | None:
        """Returns the answer once all texts are complete, or time is up; None before."""
        if now_s < self.due_s:
            return None
        self.due_s = now_s + _LOOK_S
        complete = True
        for asked in self._asked.values():
            size = _size(asked.path)
            complete &= (size > asked.begin and size == asked.size) or not processes.lives(asked.process)
            asked.size = size
            if size == asked.begin and asked.signal_at_s is not None and now_s >= asked.signal_at_s:
                asked.signal_at_s = None
                processes.send(asked.process, STACKS_SIGNAL)
        if not complete and now_s < self._deadline_s:
            return None
        if not self._read_dumps(now_s):
            return None
        for rank, asked in self._asked.items():
            text = _read(asked.path, asked.begin)
            # One that has ended without an answer is nowhere any more.
            state = "" if not text and not processes.lives(asked.process) else self._answers[rank].state
            self._answers[rank] = replace(self._answers[rank], text=text, state=state)
        return Stacks(ranks=list(self._answers.values()))

    def _read_dumps(self, now_s: float) -> bool:
        """Reads one dump that is there; returns whether all are, or time is up."""
        for rank, asked in self._asked_dumps.items():
            before, asked.stamp = asked.stamp, asked.files.stamp()
            has_ended = not processes.lives(asked.process)
            is_new = asked.stamp != asked.before
            if not has_ended and (not is_new or asked.stamp != before):
                continue
            if not is_new:
                # It ended before it had written anything, which is no fault of its recorder.
                del self._asked_dumps[rank]
                break
            try:
                data = asked.files.read(most_bytes=MOST_BYTES)
                if not data.endswith(_DUMP_ENDS) and not has_ended and now_s < self._dump_deadline_s:
                    asked.before = asked.stamp
                    continue
                groups = read_dump(data)
                self._answers[rank] = replace(self._answers[rank], groups=groups)
            except OSError as error:
                self._note_dump_error(rank, f"cannot be read: {refusal_of(error)}")
            except DumpError as error:
                self._note_dump_error(rank, str(error))
            del self._asked_dumps[rank]
            # One a look: whoever owns the loop has signs of life to send meanwhile.
            break
        if self._asked_dumps and now_s < self._dump_deadline_s:
            return False
        for rank in self._asked_dumps:
            self._note_dump_error(rank, "was not written in time")
        return True

    def _note_dump_error(self, rank: int, error: str) -> None:
        self._answers[rank] = replace(self._answers[rank], dump_error=error)


def _look_at(rank: RankProcess, table: HeartbeatTable, now_s: float) -> RankStack:
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
        uses_gpu=_has_gpu_open(folder),
        uses_nccl=_has_watchdog(folder),
    )


def _state(folder: Path) -> str:
    try:
        # After the name, which is in brackets and may hold anything.
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _has_gpu_open(folder: Path) -> bool:
    try:
        return any(os.readlink(entry).startswith("/dev/nvidia") for entry in (folder / "fd").iterdir())
    except OSError:
        # It has ended, or one of its files was closed meanwhile.
        return False


def _has_watchdog(folder: Path) -> bool:
    try:
        return any(_name_of_thread(task) == _WATCHDOG_THREAD for task in (folder / "task").iterdir())
    except OSError:
        return False


def _name_of_thread(task: Path) -> str:
    try:
        return (task / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        # It ended since its folder was listed.
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
