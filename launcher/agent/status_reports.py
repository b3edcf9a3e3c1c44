"""What an agent tells of its host's ranks while they run: how they fare, where they are, and their records. Decides and
stops nothing, and does not wait: whoever owns the loop calls when it is due.
"""

from __future__ import annotations

import base64
from pathlib import Path

from dsrun.contract.heartbeats import HeartbeatTable
from dsrun.contract.job_paths import TRACE_PATTERN, JobPaths, rank_of_trace
from dsrun.units import format_bytes

from ..os_errors import refusal_of
from ..protocol import Note, RankTraceBytes, Records
from .job_files import HostFolder
from .ranks import HostRanks
from .record_lines import RecordLines
from .relay import Relay
from .watch.rank_status import PULSE_S, StatusTaking
from .watch.stacks import StackTaking

#: Of all profiles of a host. The front end waits for a host's last word, and what is sent is in memory until then.
MOST_TRACE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


class StatusReports:
    """Looks at the ranks and sends what there is to tell.

    Args:
        ranks: ranks of this host.
        relay: relay that carries news to the front end.
        table: heartbeat table, in which the ranks themselves say how they fare.
        folder: folder of the ranks' files; records in a folder of the host's own are sent, as the front end cannot see
            them.
    """

    def __init__(self, ranks: HostRanks, relay: Relay, table: HeartbeatTable, folder: HostFolder) -> None:
        self._ranks = ranks
        self._relay = relay
        self._table = table
        self._run_dir = folder.path
        self._is_apart = folder.is_own
        self._records = RecordLines(JobPaths(Path(folder.path)).records) if folder.is_own else None
        self._statuses = StatusTaking(table, are_python=ranks.are_python)
        self._stacks: StackTaking | None = None
        #: When the next pulse is due, monotonic.
        self.pulse_at_s = 0.0

    @property
    def due_s(self) -> float:
        """When there may be something to tell next, monotonic."""
        return self.pulse_at_s if self._stacks is None else min(self.pulse_at_s, self._stacks.due_s)

    def take_stacks(self, now_s: float) -> None:
        """Asks all ranks where they are, to be told once they have answered; asked twice, one answer says it."""
        if self._stacks is None:
            self._stacks = StackTaking(
                self._ranks.live,
                run_dir=self._run_dir,
                table=self._table,
                recorders=self._ranks.recorders,
                now_s=now_s,
            )

    def send_due(self, now_s: float) -> None:
        """Sends what is due."""
        if now_s >= self.pulse_at_s:
            self.pulse_at_s = now_s + PULSE_S
            self._relay.send_sign_of_life(self._statuses.take(self._ranks.live, now_s, importing=self._ranks.importing))
            if not self._relay.is_full:
                self._send_records()
        if self._stacks is not None and (answer := self._stacks.look(now_s)) is not None:
            self._stacks = None
            self._relay.send(answer)

    def send_rest(self) -> None:
        """Sends the records that were not sent yet, and profiles, once no rank writes any more."""
        while self._send_records():
            pass
        if self._is_apart:
            self._send_traces()

    def _send_traces(self) -> None:
        paths, room_bytes = JobPaths(Path(self._run_dir)), MOST_TRACE_BYTES
        ranks = (rank_of_trace(path.name) for path in paths.folder.glob(TRACE_PATTERN))
        for rank in sorted(rank for rank in ranks if rank is not None):
            try:
                data = paths.trace(rank).read_bytes() if paths.trace(rank).stat().st_size <= room_bytes else None
            except OSError as error:
                self._relay.send(Note(text=f"the profile of rank {rank} is not sent: {refusal_of(error)}"))
                continue
            if data is None:
                most = format_bytes(MOST_TRACE_BYTES)
                text = f"the profile of rank {rank} is not sent: a host sends {most} at most; profile fewer steps"
                self._relay.send(Note(text=text))
                continue
            room_bytes -= len(data)
            for start in range(0, len(data), _PIECE_BYTES):
                piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode("ascii")
                is_last = start + _PIECE_BYTES >= len(data)
                self._relay.send(RankTraceBytes(rank=rank, offset=start, data=piece, is_last=is_last))

    def _send_records(self) -> bool:
        """Sends some records, if there are new ones; returns whether there were."""
        if self._records is None:
            return False
        try:
            text = self._records.read()
        except OSError as error:
            self._records = None
            self._relay.send(Note(text=f"records are incomplete from here on: {refusal_of(error)}"))
            return False
        if text:
            self._relay.send(Records(text=text))
        return bool(text)
