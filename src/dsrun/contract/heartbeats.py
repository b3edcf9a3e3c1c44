"""How far each rank of a host is: one small slot a rank in memory that ranks write and the agent reads.

A beat costs a microsecond and no system call, so the training loop may beat at every step and collective. Knows the
bytes of a slot; does not judge who hangs.

[Note: heartbeat table] The table is an anonymous file (memfd) of the agent. Ranks open it through the agent's /proc
entry, whose path is in DSRUN_HEARTBEAT, so it leaves nothing behind however the job ends. A slot is written by its
rank alone and holds two beats: the newest, where the count of beats is even or odd as its place is, and the one that is
being written. A rank that is stopped in the middle of a beat leaves the newest whole; a reader reads again only if the
rank has beaten while it read. Behind the two beats stands what each of them says of the longest wait: ranks of an older
dsrun leave it empty, and an agent of an older one does not look there. The last bytes of a slot say how far the rank's
start is, which is no beat: a rank that says nothing else is judged as one that never has beaten.

[Note: stages behind the slots] Slots are full. Behind the last one stands what each rank says of its pipeline stage
and of its coordinate among the ranks, and at the end of the table a mark that says so. An older dsrun's table ends with
a `StartState` there, which is never the mark: nothing is written behind it. An older rank leaves its place empty.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.contract.environment import HEARTBEAT_ENV
from dsrun.files.private import make_private_memory

#: Bytes of a slot; the slot of local rank r begins at r times this.
SLOT_BYTES = 512
#: Phase between calls of the engine: the script loads data, computes its loss or does what the engine does not see.
SCRIPT_PHASE = "script"
# Native, so that it is read in one piece.
_COUNT = struct.Struct("@Q")
# step, time, waited seconds, collectives entered, phase, collective.
_BEAT = struct.Struct("<qddQ48s112s")
# seconds a step of the longest wait, seconds a step, the collective that was waited in.
_LONGEST = struct.Struct("<ff48s")
# stage, stages, share of a step that ranks wait under the schedule, seconds a step waited for other stages.
_STAGE = struct.Struct("<HHff4x")
#: Bytes of a coordinate: five axes of thousands of ranks.
_COORDINATE_BYTES = 64
#: Ends a table that has places for stages and coordinates, see [Note: stages behind the slots].
_HAS_STAGES = _COUNT.pack(0x5345474154530002)
_NO_STEP = -1
#: Where in a slot its `StartState` stands.
_START_PLACE = SLOT_BYTES - _COUNT.size


class StartState(enum.IntEnum):
    """How far a rank's start is."""

    #: Its interpreter has not come to the program, or nobody tells.
    NOT_BEGUN = 0
    #: The program runs.
    RUNS = 1
    #: The program runs, and imports torch.
    IMPORTS_TORCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank said last.

    Attributes:
        beats: number of beats so far; a change of it means progress.
        step: optimizer steps it has finished, as it counts them; None where it does not say.
        time_s: time of the beat in seconds, on the host's monotonic clock.
        waited_s: seconds it has spent waiting in collectives so far, all together.
        collectives: collectives it has entered so far.
        phase: current work of the rank: `forward`, `save checkpoint`, or the script's own word.
        collective: the one it is waiting in, like `all_gather of unit 12`; empty while it is in none.
        longest_wait: the one it has waited in longest in its last steps; empty where it has in none, or does not say.
        longest_wait_s: seconds a step that it has waited there.
        step_s: seconds that such a step took, all together.
        stage: number of its pipeline stage.
        stages: number of pipeline stages; 0 where it says nothing of stages.
        schedule_wait: share of a step that the schedule has ranks wait if all chunks take the same time.
        stage_wait_s: seconds a step that it has waited for ranks of other stages in its last steps.
        coordinate: place of the rank on the axes of the job, like `data 1, tensor 0`; empty where its number says it.
    """

    beats: int
    step: int | None
    time_s: float
    waited_s: float
    collectives: int
    phase: str
    collective: str
    longest_wait: str = ""
    longest_wait_s: float = 0.0
    step_s: float = 0.0
    stage: int = 0
    stages: int = 0
    schedule_wait: float = 0.0
    stage_wait_s: float = 0.0
    coordinate: str = ""


class HeartbeatTable:
    """The agent's end: makes the table, and reads slots.

    Args:
        slots: ranks of the host.
    """

    def __init__(self, slots: int) -> None:
        self.descriptor = make_private_memory("dsrun-heartbeats")
        self._slots = max(1, slots)
        os.ftruncate(self.descriptor, _stage_place(self._slots, self._slots) + len(_HAS_STAGES))
        self._memory = mmap.mmap(self.descriptor, 0)
        self._memory[-len(_HAS_STAGES) :] = _HAS_STAGES

    @property
    def path(self) -> str:
        """Where ranks of the same user find it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def read(self, slot: int) -> Beat | None:
        """Returns what the rank said last; None if it never has."""
        memory, offset = self._memory, slot * SLOT_BYTES
        (beats,) = _COUNT.unpack_from(memory, offset)
        values, longest = self._read_beat(offset, beats)
        while (newest := _COUNT.unpack_from(memory, offset)[0]) != beats:
            beats = newest
            values, longest = self._read_beat(offset, beats)
        if beats == 0:
            return None
        step, time_s, waited_s, collectives, phase, collective = values
        longest_wait_s, step_s, longest_wait = longest
        place = _stage_place(self._slots, slot)
        stage, stages, schedule_wait, stage_wait_s = _STAGE.unpack_from(memory, place)
        coordinate = place + _STAGE.size
        return Beat(
            beats=beats,
            step=None if step == _NO_STEP else step,
            time_s=time_s,
            waited_s=waited_s,
            collectives=collectives,
            phase=_text(phase),
            collective=_text(collective),
            longest_wait=_text(longest_wait),
            longest_wait_s=longest_wait_s,
            step_s=step_s,
            stage=stage,
            stages=stages,
            schedule_wait=schedule_wait,
            stage_wait_s=stage_wait_s,
            coordinate=_text(memory[coordinate : coordinate + _COORDINATE_BYTES]),
        )

    def _read_beat(self, offset: int, beats: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (
            _BEAT.unpack_from(self._memory, offset + _place(beats)),
            _LONGEST.unpack_from(self._memory, offset + _longest_place(beats)),
        )

    def read_start(self, slot: int) -> StartState:
        """Returns how far the rank's start is."""
        (state,) = _COUNT.unpack_from(self._memory, slot * SLOT_BYTES + _START_PLACE)
        return StartState(min(state, StartState.IMPORTS_TORCH))

    def close(self) -> None:
        """Gives the memory back; ranks that still have it mapped write on unseen."""
        self._memory.close()
        os.close(self.descriptor)


class HeartbeatWriter:
    """A rank's end: one slot.

    Args:
        path: path of the heartbeat table; None to write beats nowhere, for a process that no launcher watches.
        slot: number of this rank's slot in the table.

    Raises:
        OSError: there is no such table.
        ValueError: the table has no such slot.
    """

    def __init__(self, path: str | None, slot: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SLOT_BYTES) if path is None else _map(path)
        slots, has_stages = _slots_in(self._memory)
        place = 0 if path is None else slot
        if place >= slots:
            raise ValueError(f"heartbeat table {path}: no slot {slot} in {len(self._memory)} bytes")
        self._offset = place * SLOT_BYTES
        self._stage_place = _stage_place(slots, place) if has_stages else None
        self._beats = 0
        self._step = _NO_STEP
        self._waited_s = 0.0
        self._collectives = 0
        self._phase = b""
        self._collective = b""
        self._longest = bytes(_LONGEST.size)
        self._stage = (0, 0, 0.0)
        self._followers: list[weakref.WeakMethod[Callable[[str], None]]] = []

    def follow_phases(self, enter: Callable[[str], None]) -> None:
        """Has each phase told to somebody in this process as well, as it begins.

        Args:
            enter: method that is called with the phase; its object is not kept alive.
        """
        self._followers = [each for each in self._followers if each() is not None]
        self._followers.append(weakref.WeakMethod(enter))

    def beat(self, step: int | None = None, phase: str | None = None) -> None:
        """Says that this rank goes on.

        Args:
            step: optimizer steps finished so far; None keeps what was said before.
            phase: current work of the rank, of which at most 48 bytes are kept; None keeps the last one.
        """
        if step is not None:
            self._step = step
        if phase is not None:
            self._phase = _bytes(phase, 48)
            for follower in self._followers:
                enter = follower()
                if enter is not None:
                    enter(phase)
        self._write()

    def tell_start(self, state: StartState) -> None:
        """Says how far this rank's start is; no beat."""
        place = self._offset + _START_PLACE
        self._memory[place : place + _COUNT.size] = _COUNT.pack(state)

    def enter(self, collective: str) -> None:
        """Says that this rank waits in a collective from now on; at most 112 bytes of its name are kept."""
        self._collectives += 1
        self._collective = _bytes(collective, 112)
        self._write()

    def leave(self, waited_s: float) -> None:
        """Says that the collective is over, and how long this rank waited in it, in seconds."""
        self._waited_s += waited_s
        self._collective = b""
        self._write()

    def tell_longest_wait(self, collective: str, waited_s: float, step_s: float) -> None:
        """Says in which collective this rank has waited longest of late; the next beat tells it.

        Args:
            collective: name of the collective, of which at most 48 bytes are kept; empty where it has waited in none.
            waited_s: seconds a step that it has waited there.
            step_s: seconds that a step took.
        """
        self._longest = _LONGEST.pack(waited_s, step_s, _bytes(collective, 48))

    def tell_stage(self, stage: int, stages: int, *, schedule_wait: float) -> None:
        """Says which pipeline stage this rank has; no beat.

        Args:
            stage: number of the stage.
            stages: number of stages.
            schedule_wait: share of a step that the schedule has ranks wait if all chunks take the same time.
        """
        self._stage = (stage, stages, schedule_wait)
        self.tell_stage_wait(0.0)

    def tell_stage_wait(self, waited_s: float) -> None:
        """Says how many seconds a step this rank has waited for ranks of other stages of late; no beat."""
        if self._stage_place is not None:
            said = _STAGE.pack(*self._stage, waited_s)
            self._memory[self._stage_place : self._stage_place + len(said)] = said

    def tell_coordinate(self, coordinate: str) -> None:
        """Says where this rank stands on the axes of the job; no beat.

        Args:
            coordinate: number on each axis, like `data 1, tensor 0`, of which at most 64 bytes are kept; empty where
                the rank's number says it.
        """
        if self._stage_place is not None:
            place = self._stage_place + _STAGE.size
            self._memory[place : place + _COORDINATE_BYTES] = _bytes(coordinate, _COORDINATE_BYTES).ljust(
                _COORDINATE_BYTES, b"\0"
            )

    def _write(self) -> None:
        self._beats += 1
        memory, offset = self._memory, self._offset
        beat = offset + _place(self._beats)
        memory[beat : beat + _BEAT.size] = _BEAT.pack(
            self._step, time.monotonic(), self._waited_s, self._collectives, self._phase, self._collective
        )
        longest = offset + _longest_place(self._beats)
        memory[longest : longest + _LONGEST.size] = self._longest
        # The count last, and by assignment: `pack_into` would show a reader zeros for a moment.
        memory[offset : offset + _COUNT.size] = _COUNT.pack(self._beats)


def writer_from_env(environ: Mapping[str, str] | None = None) -> HeartbeatWriter:
    """Returns the writer for this worker's slot; one that beats into nothing where no launcher watches."""
    env = os.environ if environ is None else environ
    path, slot = env.get(HEARTBEAT_ENV), env.get("LOCAL_RANK", "0")
    if not path or not slot.isdecimal():
        return HeartbeatWriter(None)
    try:
        return HeartbeatWriter(path, int(slot))
    except (OSError, ValueError):
        # Another PID namespace, or an agent that has died: training goes on unwatched, as it would without dsrun.
        return HeartbeatWriter(None)


_process_writer: tuple[int, HeartbeatWriter] | None = None


def process_writer() -> HeartbeatWriter:
    """Returns this process's one writer; a fork gets its own."""
    global _process_writer
    if _process_writer is None or _process_writer[0] != os.getpid():
        _process_writer = (os.getpid(), writer_from_env())
    return _process_writer[1]


def heartbeat(step: int | None = None, phase: str | None = None) -> None:
    """Tells dsrun that this rank goes on, so that a hang is found and blamed on the right rank.

    `Engine` does this by itself; call it in scripts that do not use the engine, once a step is enough. Costs about a
    microsecond; does nothing under other launchers. A rank that has called it once is expected to call it again within
    `--hang-timeout`.

    Args:
        step: optimizer steps finished so far; None keeps what was said before.
        phase: current work of the rank, like `evaluate`, of which at most 48 bytes are kept; None keeps the last one.
    """
    process_writer().beat(step, phase)


def _place(beats: int) -> int:
    """Returns where in its slot beat number `beats` lies, in bytes."""
    return _COUNT.size + beats % 2 * _BEAT.size


def _longest_place(beats: int) -> int:
    """Returns where in its slot the longest wait that beat number `beats` tells lies, in bytes."""
    return _COUNT.size + 2 * _BEAT.size + beats % 2 * _LONGEST.size


def _slots_in(memory: mmap.mmap | bytearray) -> tuple[int, bool]:
    """Returns the number of slots of a table, and whether it has places for stages behind them."""
    if memory[-len(_HAS_STAGES) :] != _HAS_STAGES:
        return len(memory) // SLOT_BYTES, False
    return (len(memory) - len(_HAS_STAGES)) // (SLOT_BYTES + _STAGE.size + _COORDINATE_BYTES), True


def _stage_place(slots: int, slot: int) -> int:
    """Returns where what a rank says of its stage, and then of its coordinate, lies in a table of so many slots."""
    return slots * SLOT_BYTES + slot * (_STAGE.size + _COORDINATE_BYTES)


def _map(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _bytes(text: str, limit: int) -> bytes:
    return text.encode("utf-8", "replace")[:limit]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
