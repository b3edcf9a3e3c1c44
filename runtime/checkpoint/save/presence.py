"""Whether a rank whose word is awaited is still there, where this host can tell. Waits for nobody, decides nothing.

A save is settled over the noticeboard by threads that the interpreter waits for at its end. Without this a rank that
was killed would hold the others until the longest wait is over, or their launcher kills them as well.

[Note: which process] A process is known by its number, when it began, and the namespace that its number is of. Ranks on
other hosts, or in another namespace, cannot be seen from here, and count as present.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else torch comes with it
    from ...mesh.host_memory.noticeboard import Noticeboard

#: States of /proc/<pid>/stat in which nothing of a process runs any more.
_ENDED = frozenset("ZXx")


class Presence:
    """The processes of a save's ranks, as they said at its beginning.

    Args:
        board: the ranks' noticeboard.
        subject: prefix of the save's keys on the noticeboard, as in `conclude`.
    """

    def __init__(self, board: Noticeboard, subject: str) -> None:
        self._board = board
        self._subject = subject
        self._processes: dict[int, Mapping[str, object]] = {}

    def say(self, rank: int) -> None:
        """Says which process this rank is; before anybody waits for it."""
        self._board.post(self.key(rank), json.dumps(_process(os.getpid())).encode())

    def key(self, rank: int) -> str:
        """Returns where a rank says so."""
        return f"{self._subject}/{rank} is"

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended; False where it cannot be told."""
        if rank not in self._processes:
            text = self._board.wait(self.key(rank), until=lambda: True)
            if text is None:
                return False
            self._processes[rank] = json.loads(text)
        said = self._processes[rank]
        if said["namespace"] != _namespace():
            return False
        number = said["number"]
        assert isinstance(number, int)
        return _process(number) != said


def _process(number: int) -> dict[str, object]:
    """Returns what a process is known by; its `began` is empty where it has ended."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        stat = ""
    # What follows the name, which may hold blanks and brackets: the state first, the 20th when it began.
    fields = stat.rpartition(")")[2].split()
    began = fields[19] if fields and fields[0] not in _ENDED else ""
    return {"number": number, "began": began, "namespace": _namespace()}


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
