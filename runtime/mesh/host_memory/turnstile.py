"""Where the ranks of one host meet: semaphores in memory that all of them see, and a word of each on what it does.

Moves no data. Knows what its peers are about: when one does something else, has ended, or does not come, the error
names it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.errors import DsrunError

from ..step_position import at_step
from .semaphores import (
    SEMAPHORE_BYTES,
    looks_before_sleep,
    make_semaphore,
    raise_semaphore,
    try_semaphore,
    wait_for_semaphore,
)

#: A notice: kind, step, bytes, place, offset, micro step, length of the text, text.
_NOTICE = struct.Struct("=QQQqqQH")
_TEXT_BYTES = 192
_NOTICE_BYTES = 256
#: Where, behind the notice, a rank says that it will not come again; the notice stays, for whoever has yet to read it.
_LEFT_AT = _NOTICE_BYTES - 1
#: Between two looks at whether a peer that keeps us waiting still lives.
_NAP_S = 0.25


@dataclass(frozen=True, slots=True)
class Notice:
    """What a rank says of the collective it is in.

    Attributes:
        kind: number that tells collectives apart; ranks in the same collective have the same one.
        step: optimizer step that the rank is in; 0 before the first one.
        nbytes: size of the buffer in bytes.
        place: number of the shared segment where its data lies; -1 if it lies elsewhere.
        offset: byte offset of the data in the shared segment `place`.
        micro_step: micro step that the rank is in, within the step.
        text: the collective in words, for errors; on a second line, what is odd about the rank, see `Where`.
    """

    kind: int
    step: int
    nbytes: int
    place: int
    offset: int
    micro_step: int
    text: str

    def __str__(self) -> str:
        if not self.text:
            return "none"
        name, _, oddity = self.text.partition("\n")
        told = f"{name} ({self.nbytes} bytes){at_step(self.step, self.micro_step)}"
        return f"{told} ({oddity})" if oddity else told


def turnstile_bytes(size: int) -> int:
    """Returns the memory that each rank shares for a turnstile of `size` ranks."""
    return _NOTICE_BYTES + size * SEMAPHORE_BYTES


class Turnstile:
    """The meeting place of one axis, as one rank sees it.

    Args:
        segments: memory of all ranks in rank order, `turnstile_bytes` each, zeroed.
        rank: number of this rank among those of the turnstile.
        processes: ids of all ranks' processes.
        names: ranks of the job, for errors.
        timeout_s: longest wait for the others.

    Attributes:
        waited_s: seconds that this rank has waited for the others so far, without what it did in between.
    """

    def __init__(
        self,
        segments: Sequence[mmap.mmap],
        *,
        rank: int,
        processes: Sequence[int],
        names: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._names = list(names)
        self._others = [other for other in range(len(segments)) if other != rank]
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        self._notices = [memoryview(segment)[:_NOTICE_BYTES] for segment in segments]
        # Kept, because semaphores are used by address.
        self._anchors = [ctypes.c_char.from_buffer(segment) for segment in segments]
        bases = [ctypes.addressof(anchor) + _NOTICE_BYTES for anchor in self._anchors]
        self._arrive = [ctypes.c_void_p(bases[other] + rank * SEMAPHORE_BYTES) for other in self._others]
        self._await = [ctypes.c_void_p(bases[rank] + other * SEMAPHORE_BYTES) for other in self._others]
        self._looks = looks_before_sleep(len(segments))
        #: How many of the others have come to the present meeting.
        self._came = len(self._await)
        for semaphore in self._await:
            make_semaphore(semaphore)
        self._alive = [os.pidfd_open(processes[other]) for other in self._others]

    def say(
        self, kind: int, nbytes: int, *, place: int, offset: int, step: int = 0, micro_step: int = 0, text: str = ""
    ) -> None:
        """Leaves this rank's notice, which the others may read once they have met it."""
        data = text.encode()[:_TEXT_BYTES]
        start = _NOTICE.size
        memory = self._notices[self._rank]
        _NOTICE.pack_into(memory, 0, kind, step, nbytes, place, offset, micro_step, len(data))
        memory[start : start + len(data)] = data

    def heard(self, rank: int) -> tuple[int, int, int, int, int]:
        """Returns kind, step, bytes, place and offset of a rank's notice."""
        return _NOTICE.unpack_from(self._notices[rank])[:5]

    def notice(self, rank: int) -> Notice:
        """Returns a rank's whole notice."""
        kind, step, nbytes, place, offset, micro_step, length = _NOTICE.unpack_from(self._notices[rank])
        text = bytes(self._notices[rank][_NOTICE.size : _NOTICE.size + length]).decode("utf-8", "replace")
        return Notice(kind, step, nbytes, place, offset, micro_step, text)

    def meet(self) -> None:
        """Returns once every rank has come; what each wrote before is then seen by all.

        Raises:
            DsrunError: see `wait_for_all`.
        """
        self.arrive()
        self.wait_for_all()

    def arrive(self) -> None:
        """Comes to a meeting, the one before it being over. `wait_for_all` ends it."""
        assert self._came == len(self._await), "the meeting before is not over"
        self._came = 0
        for semaphore in self._arrive:
            raise_semaphore(semaphore)

    def have_come(self) -> bool:
        """Whether every rank has come to the meeting; returns at once."""
        while self._came < len(self._await):
            if not try_semaphore(self._await[self._came]):
                return False
            self._came += 1
        return True

    def wait_for_all(self) -> None:
        """Returns once every rank has come to the meeting.

        Raises:
            DsrunError: a rank has ended or left, or not come in time.
        """
        if self.have_come():
            return
        began_s = time.perf_counter()
        for _ in range(self._looks):
            if self.have_come():
                break
        while not self.have_come():
            self._sleep_for(self._came)
            self._came += 1
        self.waited_s += time.perf_counter() - began_s

    def close(self) -> None:
        """Says that this rank will not come again, and lets go of the memory and of the peers' processes."""
        if self._notices:
            self._notices[self._rank][_LEFT_AT] = 1
        for fd in self._alive:
            os.close(fd)
        self._alive = []
        self._notices = []
        self._anchors = []

    def _sleep_for(self, index: int) -> None:
        """Waits for one peer, asleep."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            if wait_for_semaphore(self._await[index], nap_s=_NAP_S):
                return
            # Whoever has gone may have come here before.
            gone = self._gone(index)
            if gone and not try_semaphore(self._await[index]):
                raise self._missing(index, gone)
            if gone:
                return
            if time.monotonic() > deadline_s:
                raise self._missing(index, "")

    def _gone(self, index: int) -> str:
        """Returns how a peer has gone; nothing if it is there."""
        if self._notices[self._others[index]][_LEFT_AT]:
            return "left the job"
        return "ended" if select.select([self._alive[index]], [], [], 0)[0] else ""

    def _missing(self, index: int, gone: str) -> DsrunError:
        """Returns the error of a wait for a peer that is gone, or has not come in time."""
        other = self._others[index]
        me, they, mine = self._names[self._rank], self._names[other], self.notice(self._rank)
        last = f"its last collective was {self.notice(other)}"
        if gone:
            return DsrunError(
                f"rank {they} of this host has {gone} while rank {me} waited for it in {mine}; {last}",
                hint=f"if the log of rank {they} shows no error, it made fewer calls: give all ranks as many batches, "
                "and save, export and gather on all of them, not on rank 0 alone",
            )
        return DsrunError(
            f"rank {me} waited {self._timeout_s:g} s for rank {they} of this host in {mine}; {last}",
            hint="every rank must make the same calls in the same order, and get equally many batches; "
            "a rank may also be stuck elsewhere",
        )
