"""When an engine copies its state to memory, and when it goes on from such a copy. How: `memory_copy/copies.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from dsrun.checkpoint_files.folder.listing import step_of
from dsrun.checkpoint_files.parse import read_index
from dsrun.checkpoint_files.storage.places import Place
from dsrun.contract.environment import MEMORY_COPY_EVENT, memory_copy_folder, was_started_again
from dsrun.errors import CheckpointError
from dsrun.units import format_bytes

from ...checkpoint.memory_copy.copies import MemoryCopies
from ...checkpoint.memory_copy.files import CopyFiles
from ...checkpoint.memory_copy.restore import Restored
from ...mesh.collectives import Collectives
from ...mesh.join.groups import ProcessGroupMesh
from ...mesh.join.mail import GlooMail
from ..parts import SCRIPT_PHASE, EngineParts
from ..state import Counters
from ..step import StepResult
from .persist import state_for_memory
from .resume_state import Moment
from .stopping import ClientState

#: How long a copy on its way waits for another rank: less than training itself does.
_MAIL_TIMEOUT_S = 600.0
#: Of the engines of this process that are not over yet. Each has a folder of its own, or one would go on from another's
#: state; a script that is started again makes them in the same order.
_PRESENT: WeakValueDictionary[int, MemoryCopies] = WeakValueDictionary()


def memory_copies_of(every: int | None, mesh: ProcessGroupMesh, collectives: Collectives) -> MemoryCopies | None:
    """Returns what makes copies in memory, where they are wanted and of use; every rank must call.

    Enters an all-reduce of two numbers a rank; on several hosts, makes a group of all ranks.

    Args:
        every: optimizer steps between two copies; None for no copies.
        mesh: ranks and device.
        collectives: all ranks.

    Raises:
        CheckpointError: the folder for copies is another user's.
    """
    if every is None:
        return None
    folder = memory_copy_folder()
    if folder is None:
        if mesh.info.rank == 0:
            print(
                "dsrun: no copies in memory are made: nobody starts this job again (`dsrun --max-restarts N` does)",
                flush=True,
            )
        return None
    taken = [number for number, one in _PRESENT.items() if not one.is_closed]
    told = torch.zeros((2, collectives.size), dtype=torch.int64, device=mesh.device)
    told[0, collectives.rank], told[1, collectives.rank] = mesh.info.node_rank, max(taken, default=-1) + 1
    collectives.all_reduce(told.view(-1), of="hosts of the ranks").wait()
    with collectives.reading("hosts of the ranks"):
        node_of, free = told.tolist()
    number = max(free)
    mail = GlooMail(timeout_s=_MAIL_TIMEOUT_S) if len(set(node_of)) > 1 else None
    files = CopyFiles(Path(folder))
    if number:
        files = CopyFiles(files.folder / f"engine-{number}")
    copies = MemoryCopies(files, collectives, mail, node_of=node_of, device=mesh.device, every=every)
    _PRESENT[number] = copies
    return copies


class CopiesInMemory:
    """Copies the state to memory every few steps; every rank must call each method."""

    _parts: EngineParts
    _counters: Counters
    _last: StepResult | None
    _copies_told: bool
    _copy_client_state: ClientState | None
    _moment_to_save: Callable[[], Moment]

    def set_memory_copy_client_state(self, client_state: ClientState | None) -> None:
        """Says what `load_checkpoint` returns as client state where a run goes on from a copy in memory.

        Args:
            client_state: JSON values and tensors; or a function that returns them when a copy is made. None: nothing.
        """
        self._copy_client_state = client_state

    def _copy_to_memory(self) -> None:
        """Copies the state if it is time, after an update.

        Raises:
            CheckpointError: on every rank, where there is no memory for it.
        """
        copies, step = self._parts.copies, self._counters.global_steps
        if copies is None or step % copies.every:
            return
        self._parts.heartbeat.beat(phase="copy to memory")
        if self._parts.step.away is not None:
            self._parts.step.away.settle()
        state = self._copy_client_state
        here: Mapping[str, Any] = (state() if callable(state) else state) or {}
        took = copies.take(step, lambda: state_for_memory(self._parts, self._counters, self._moment_to_save(), here))
        if took and not self._copies_told:
            self._copies_told = True
            self._parts.records.write(MEMORY_COPY_EVENT, {"step": step, "bytes": copies.held_bytes})
            if self._parts.mesh.info.rank == 0:
                print(
                    f"dsrun: a copy of the state in memory every {copies.every} steps, of "
                    f"{format_bytes(copies.state_bytes)} on rank 0, twice"
                    + (", and again on the next host" if copies.has_neighbours else ""),
                    flush=True,
                )
        self._parts.heartbeat.beat(phase=SCRIPT_PHASE)

    def _find_copy(self, disk: Place | None) -> Restored | None:
        """Returns the copy in memory to go on from: of a job that was started again, before its first step.

        Args:
            disk: the checkpoint that would be loaded; None where there is none.
        """
        copies = self._parts.copies
        if copies is None or not was_started_again() or self._last is not None:
            return None
        self._parts.heartbeat.beat(phase="load checkpoint")
        found = copies.restore(newer_than=_step_on(disk) if self._parts.mesh.info.rank == 0 else -1)
        if found is not None and self._parts.mesh.info.rank == 0:
            ranks = ", ".join(map(str, found.fetched))
            lost = f"; rank {ranks} from the neighbour's memory" if found.fetched else ""
            print(f"dsrun: going on from the copy in memory of step {found.step}{lost}", flush=True)
        return found


def _step_on(disk: Place | None) -> int:
    """Returns the step of a checkpoint; -1 where there is none that can be read, which who loads it says."""
    if disk is None:
        return -1
    try:
        step = step_of(read_index(disk))
    except CheckpointError:
        return -1
    return -1 if step is None else step
