"""When an engine copies its state to memory, and when it goes on from such a copy. How: `memory_copy/copies.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun.checkpoint_files.folder.listing import step_of
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.places import Place
from dsrun.contract.environment import MEMORY_COPY_EVENT, was_started_again
from dsrun.contract.heartbeats import SCRIPT_PHASE, HeartbeatWriter
from dsrun.errors import CheckpointError
from dsrun.units import format_bytes

from ...checkpoint.memory_copy.copies import MemoryCopies
from ...checkpoint.memory_copy.restore import RestoredCopy
from ...observe.records import RecordWriter
from .persist import state_for_memory
from .resume_state import LastMoment
from .run_state import ClientState, RunState


class CopiesInMemory:
    """Copies the state to memory every few steps; every rank must call each method.

    Args:
        run: State that is copied.
        copies: Maker of copies; None where none are wanted, or of use.
        moment: Random numbers and position in the data.
        heartbeat: Writer of what this rank does, for the launcher that watches it.
        records: Writer of records, for the first copy.

    Attributes:
        client_state: plain values, arrays and tensors that a load from a copy returns, or a function that returns them.
    """

    def __init__(
        self,
        run: RunState,
        copies: MemoryCopies | None,
        moment: LastMoment,
        *,
        heartbeat: HeartbeatWriter,
        records: RecordWriter,
    ) -> None:
        self._run = run
        self._copies = copies
        self._moment = moment
        self._heartbeat = heartbeat
        self._records = records
        self._is_told = self._is_recorded = False
        self.client_state: ClientState | None = None

    @property
    def are_made(self) -> bool:
        """Whether there are copies."""
        return self._copies is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that copies take on this rank."""
        return 0 if self._copies is None else self._copies.held_bytes

    def copy_if_due(self) -> None:
        """Copies the state if it is time, after an update.

        Raises:
            CheckpointError: on every rank, where there is no memory for it.
        """
        run, copies, step = self._run, self._copies, self._run.progress.counters.global_steps
        if copies is None or step % copies.every:
            return
        self._heartbeat.beat(phase="copy to memory")
        run.settle()
        state = self.client_state
        here: Mapping[str, Any] = (state() if callable(state) else state) or {}
        took = copies.take(step, lambda: state_for_memory(run, self._moment.to_save(), here))
        if took and not self._is_recorded:
            # The launcher removes what is left of copies where it finds this record: it comes until there is room.
            self._is_recorded = self._records.write(MEMORY_COPY_EVENT, {"step": step, "bytes": copies.held_bytes})
        if took and not self._is_told:
            self._is_told = True
            if run.mesh.info.rank == 0:
                print(
                    f"dsrun: a copy of the state in memory every {copies.every} steps, of "
                    f"{format_bytes(copies.state_bytes)} on rank 0, twice"
                    + (", and again on the next host" if copies.has_neighbours else ""),
                    flush=True,
                )
        self._heartbeat.beat(phase=SCRIPT_PHASE)

    def find(self, disk: Place | None) -> RestoredCopy | None:
        """Returns the copy in memory to go on from: of a job that was started again, before its first step.

        Args:
            disk: the checkpoint that would be loaded; None where there is none.
        """
        copies, is_first = self._copies, self._run.mesh.info.rank == 0
        if copies is None or not was_started_again() or self._run.progress.last is not None:
            return None
        self._heartbeat.beat(phase="load checkpoint")
        found = copies.restore(newer_than=_step_on(disk) if is_first else -1)
        if found is not None and is_first:
            ranks = ", ".join(map(str, found.fetched))
            lost = f"; rank {ranks} from the neighbour's memory" if found.fetched else ""
            print(f"dsrun: going on from the copy in memory of step {found.step}{lost}", flush=True)
        return found

    def wait(self) -> None:
        """Returns when no copy is being made."""
        if self._copies is not None:
            self._copies.wait()

    def forget(self) -> None:
        """Forgets copies of steps that a load has gone back behind."""
        if self._copies is not None:
            self._copies.forget()

    def close(self) -> None:
        """Gives the memory of the copies back."""
        if self._copies is not None:
            self._copies.close()


def _step_on(disk: Place | None) -> int:
    """Returns the step of a checkpoint; -1 where there is none that can be read, which who loads it says."""
    if disk is None:
        return -1
    try:
        step = step_of(read_index(disk))
    except CheckpointError:
        return -1
    return -1 if step is None else step
