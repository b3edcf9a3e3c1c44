"""Copies of the training state in memory, for a job that is started again on the same hosts without reading a disk.

Every rank copies its state into its host's shared memory, and a thread brings a second copy to a rank of the next host,
beside training. What several ranks hold is shared out among those of a host, so each host has what its ranks need.

[Note: two generations] The copy that is being made is written over the one before the last whole one. The copy of a
moment is whole where every rank's is there, once or twice, and each of them is labelled by itself when it is. So ranks
agree before they begin the next one that nobody is still at work, and after a restart on the newest moment of which all
have a copy. Copies of different moments are never mixed: each moment has an identity of its own.

The order of things stands here: what lies in a host's memory is `files.py`'s business, how ranks agree on a
moment `moments.py`'s, how a copy comes to another host `exchange.py`'s, and how one is gone
back to `restore.py`'s.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

import torch
from torch import Tensor

from dsrun.checkpoint_files.reference import summed
from dsrun.errors import CheckpointError
from dsrun.mesh_spec import MeshSpec
from dsrun.units import format_bytes

from ...mesh.agree.all_or_none import tell_error
from ...mesh.agree.same import attempt
from ...mesh.collectives import Collectives
from ...mesh.join.mail import Mail
from ...protocols import StateEntry
from ..format.plan import FilePlan, Planner, coalesce
from ..save.request import SaveRequest
from ..staging.buffer import copy_into
from .exchange import CopyExchange
from .files import GENERATIONS, CopyFiles, Label
from .moments import agree_on_next
from .neighbours import holders_on_host, neighbours_of
from .restore import CopySearch, RestoredCopy

_log = logging.getLogger(__name__)


class _Last(IntEnum):
    """What became of a rank's last copy; the largest of all ranks decides."""

    HERE = 0
    LOST = 1
    ON_ITS_WAY = 2  # comes first: whoever still sends must not be overtaken, whatever others have lost


class MemoryCopies:
    """Makes and finds them; every rank must call each method.

    Args:
        files: files that hold the copies in this host's memory.
        collectives: all ranks.
        mail: brings second copies to neighbours; None where there is one host.
        spec: the grid of all ranks, whose axes the holders of entries name.
        node_of: number of the host of each rank.
        device: device of the tensors that the collectives use.
        every: optimizer steps between two copies.
    """

    def __init__(
        self,
        files: CopyFiles,
        collectives: Collectives,
        mail: Mail | None,
        *,
        spec: MeshSpec,
        node_of: Sequence[int],
        device: torch.device,
        every: int,
    ) -> None:
        self.every = every
        self._spec = spec
        self._files = files
        self._collectives = collectives
        self._node_of = list(node_of)
        self._device = device
        self._near = neighbours_of(collectives.rank, node_of)
        self._exchange = None if mail is None else CopyExchange(files, mail, self._near)
        self._planner = Planner()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._whole: int | None = None  # generation that all ranks have
        self._made: int | None = None  # the one that was begun last
        self._is_roomy = False
        self._state_bytes = 0
        self._skips_told = False
        # Few scripts end an engine. The interpreter joins threads before, and one that copies keeps this object.
        self._at_end = weakref.finalize(self, _close, mail)

    @property
    def held_bytes(self) -> int:
        """Host memory that this rank's copies, and those it keeps for a neighbour, have."""
        return self._files.held_bytes()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's last copy."""
        return self._state_bytes

    @property
    def has_neighbours(self) -> bool:
        """Whether there is a second copy on another host."""
        return self._exchange is not None

    def take(self, step: int, want: Callable[[], SaveRequest]) -> bool:
        """Copies this rank's state; afterwards it may change. Enters up to three all-reduces of a few numbers.

        Args:
            step: optimizer steps that were taken.
            want: function that returns the state to copy.

        Returns:
            whether it was: False where the copy before is still on its way on some rank.

        Raises:
            CheckpointError: on every rank, where one has no memory for it.
        """
        identity = self._begin(step)
        if identity is None:
            return False
        generation = 0 if self._whole is None else 1 - self._whole
        wanted, plan = self._prepared(want)
        image = self._filled(wanted, plan, generation)
        label = Label(
            rank=self._collectives.rank,
            step=step,
            identity=identity,
            node_of=self._node_of,
            nbytes=plan.nbytes,
            sums=(),
            values=wanted.values,
            aliases=wanted.aliases,
        )
        self._is_roomy, self._state_bytes = True, plan.nbytes
        self._made = generation
        self._thread = threading.Thread(
            target=self._finish, args=(label, generation, image), name=f"memory copy {step}"
        )
        self._thread.start()
        return True

    def restore(self, *, newer_than: int) -> RestoredCopy | None:
        """Finds the newest moment of which all ranks have a copy, and has each host have what its ranks need.

        Enters an all-reduce of 4 numbers a rank, and two of one. Copies of other moments count no more afterwards.

        Args:
            newer_than: step of what there is on the disk, as rank 0 sees it; -1 for nothing.

        Returns:
            it; None, and a line on rank 0 that says why, where there is none that is newer.
        """
        search = CopySearch(
            self._files,
            self._near,
            self._exchange,
            self._collectives,
            node_of=self._node_of,
            device=self._device,
        )
        restored = search.newest(newer_than=newer_than)
        if restored is not None:
            self._whole = self._made = restored.generation
        return restored

    def forget(self) -> None:
        """Has no copy count that was made so far: the run has gone back behind them; newer ones have fewer steps."""
        self.wait()
        for other in (self._collectives.rank, *self._near.kept):
            for generation in range(GENERATIONS):
                self._files.unlabel(other, generation)
        self._whole = self._made = None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return not self._at_end.alive

    def wait(self) -> None:
        """Returns when nothing of this rank's is on its way any more; enters no collective."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Waits for what is on its way; the copies stay, for whoever is started next."""
        self.wait()
        self._at_end()
        self._exchange = None

    # Taking -----------------------------------------------------------------------------------------------------------

    @property
    def _is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, step: int) -> int | None:
        """Has the last copy count where all ranks have it; returns the next one's identity, None where it must wait."""
        state = _Last.ON_ITS_WAY if self._is_under_way else _Last.HERE if self._error is None else _Last.LOST
        worst, identity = agree_on_next(state, self._collectives, device=self._device)
        if worst == _Last.ON_ITS_WAY:
            self._tell_skip(step)
            return None
        if self._error is not None:
            _log.warning("the copy in memory before step %d is not whole: %s", step, self._error)
        if worst == _Last.HERE and self._made is not None:
            self._whole = self._made
        self._thread = self._error = None
        return identity

    def _tell_skip(self, step: int) -> None:
        if not self._skips_told and self._collectives.rank == 0:
            _log.warning(
                "step %d has no copy in memory: the one before is still on its way; "
                "let `checkpoint.memory_copy.every` be larger than %d",
                step,
                self.every,
            )
        self._skips_told = True

    def _prepared(self, want: Callable[[], SaveRequest]) -> tuple[SaveRequest, FilePlan]:
        """Returns what is to be copied, and where in a copy it lies."""
        prepared: list[tuple[SaveRequest, FilePlan]] = []

        def prepare() -> None:
            wanted = want()
            wanted = replace(wanted, entries=self._shared_out_here(wanted.entries))
            plan = self._planner.plan(wanted.entries)
            prepared.append((wanted, plan))
            if not self._is_roomy:
                self._check_room(plan.nbytes)

        self._all("find room for a copy in memory", prepare)
        return prepared[0]

    def _shared_out_here(self, entries: Sequence[StateEntry]) -> list[StateEntry]:
        """Returns entries with their holders on this host, which share them out: each host has what its ranks need."""
        rank, here = self._collectives.rank, self._near.here
        of_host = {e.holders: e.holders for e in entries}
        for holders in of_host:
            of_host[holders] = holders_on_host(holders, self._spec, rank=rank, here=here)
        return [replace(entry, holders=of_host[entry.holders]) for entry in entries]

    def _filled(self, wanted: SaveRequest, plan: FilePlan, generation: int) -> Tensor:
        """Returns the memory of this rank's copy, with its state in it."""
        filled: list[Tensor] = []

        def fill() -> None:
            copies = coalesce(plan, wanted.entries)
            device = next((tensor.device for _, tensor in copies if tensor.is_cuda), None)
            image = self._files.image(self._collectives.rank, generation, plan.nbytes, device=device)
            copy_into(image, plan, copies)
            filled.append(image)

        self._all("copy its state in memory", fill)
        return filled[0]

    def _all(self, what: str, work: Callable[[], None]) -> None:
        failure = attempt(work, self._collectives, device=self._device, label=what)
        if failure is None:
            return
        error = failure.error
        message, hint = tell_error(error, failure.rank, self._collectives, device=self._device, label=what)
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None:
            raise CheckpointError(f"rank {self._collectives.rank} could not {what}: {error}") from error
        raise CheckpointError(f"rank {failure.rank} could not {what}: {message}", hint=hint or None)

    def _check_room(self, nbytes: int) -> None:
        """Compares what all ranks of this host will hold with what is free, before the first copy."""
        copies = GENERATIONS * (1 if self._exchange is None else 2)
        needed, free = nbytes * copies * len(self._near.here), self._files.free_bytes()
        if free < needed:
            raise CheckpointError(
                f"{self._files.folder}: {copies} copies in memory of {len(self._near.here)} ranks' state have "
                f"{format_bytes(needed)}, and {format_bytes(free)} are free there",
                hint="leave `checkpoint.memory_copy` out, or train on more hosts",
            )

    def _finish(self, label: Label, generation: int, image: Tensor) -> None:
        """Labels this rank's copy, and exchanges it with the neighbours'; in a thread."""
        try:
            whole = replace(label, sums=summed([image.numpy().data]).sums)
            self._files.label(whole.rank, generation, whole)
            if self._exchange is not None:
                self._exchange.keep(whole, image, generation)
        except Exception as error:  # whatever it is: the next `take` says so, and the last whole copy stays
            self._error = error


def _close(mail: Mail | None) -> None:
    if mail is not None:
        mail.close()
