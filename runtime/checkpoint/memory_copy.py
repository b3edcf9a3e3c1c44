"""Copies of the training state in memory, for a job that is started again on the same hosts without reading a disk.

Every rank copies its state into its host's shared memory, and a thread brings a second copy to a rank of the next host,
beside training. What every rank holds is shared out among the ranks of a host, so each host has what its ranks need.

[Note: two generations] The copy that is being made is written over the one before the last whole one. The copy of a
moment is whole where every rank's is there, once or twice, and each of them is labelled by itself when it is. So ranks
agree before they begin the next one that nobody is still at work, and after a restart on the newest moment of which all
have a copy. Copies of different moments are never mixed: each moment has an identity of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from dsrun.checkpoint_files.index import Index
from dsrun.checkpoint_files.publish import add_boxes
from dsrun.checkpoint_files.reference import summed
from dsrun.errors import CheckpointError
from dsrun.units import format_bytes

from ..mesh.agreement import Failure, attempt
from ..mesh.collectives import Collectives
from ..mesh.mail import Mail, Parcel
from .memory_copy_files import GENERATIONS, CopyFiles, Label
from .memory_copy_neighbours import neighbours_of
from .plan import FilePlan, Planner, coalesce
from .staging import copy_into
from .under_way import Wanted

_log = logging.getLogger(__name__)

_NONE = -1
_IDENTITY_BITS = 31


@dataclass(frozen=True, slots=True)
class Restored:
    """A moment of which every rank of this host has its state in this host's memory.

    Attributes:
        folder: of the copies.
        index: of what this host has, and no more.
        step: optimizer steps that it is of.
        fetched: ranks whose copy came from a neighbour.
    """

    folder: Path
    index: Index
    step: int
    fetched: tuple[int, ...]


class MemoryCopies:
    """Makes and finds them; every rank must call each method.

    Args:
        files: of this host.
        collectives: all ranks.
        mail: brings second copies to neighbours; None where there is one host.
        node_of: number of the host of each rank.
        device: where collectives' tensors live.
        every: optimizer steps between two copies.
    """

    def __init__(
        self,
        files: CopyFiles,
        collectives: Collectives,
        mail: Mail | None,
        *,
        node_of: Sequence[int],
        device: torch.device,
        every: int,
    ) -> None:
        self.every = every
        self._files = files
        self._collectives = collectives
        self._mail = mail
        self._node_of = list(node_of)
        self._device = device
        self._near = neighbours_of(collectives.rank, node_of)
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
        return self._mail is not None

    def take(self, step: int, want: Callable[[], Wanted]) -> bool:
        """Copies this rank's state; afterwards it may change. Enters up to three all-reduces of a few numbers.

        Args:
            step: optimizer steps that were taken.
            want: says what is to be copied.

        Returns:
            whether it was: False where the copy before is still on its way on some rank.

        Raises:
            CheckpointError: on every rank, where one has no memory for it.
        """
        state = 1 if self._is_under_way else 0 if self._error is None else 2
        worst, identity = self._agree(state)
        if worst == 1:
            if not self._skips_told and self._collectives.rank == 0:
                _log.warning(
                    "step %d has no copy in memory: the one before is still on its way; "
                    "let `checkpoint.memory_copy.every` be larger than %d",
                    step,
                    self.every,
                )
            self._skips_told = True
            return False
        if self._error is not None:
            _log.warning("the copy in memory before step %d is not whole: %s", step, self._error)
        if worst == 0 and self._made is not None:
            self._whole = self._made
        self._thread = self._error = None
        generation = 0 if self._whole is None else 1 - self._whole
        prepared: list[tuple[Wanted, FilePlan]] = []

        def prepare() -> None:
            wanted = want()
            plan = self._planner.plan(
                wanted.entries, rank=self._near.here.index(self._collectives.rank), size=len(self._near.here)
            )
            prepared.append((wanted, plan))
            if not self._is_roomy:
                self._check_room(plan.nbytes)

        self._all("find room for a copy in memory", prepare)
        wanted, plan = prepared[0]
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
        filled: list[Tensor] = []

        def fill() -> None:
            copies = coalesce(plan, wanted.entries)
            locked = any(tensor.is_cuda for _, tensor in copies)
            image = self._files.image(self._collectives.rank, generation, plan.nbytes, locked=locked)
            copy_into(image, plan, copies)
            filled.append(image)

        self._all("copy its state in memory", fill)
        self._is_roomy, self._state_bytes = True, plan.nbytes
        self._made = generation
        self._thread = threading.Thread(
            target=self._finish, args=(label, generation, filled[0]), name=f"memory copy {step}"
        )
        self._thread.start()
        return True

    def restore(self, *, newer_than: int) -> Restored | None:
        """Finds the newest moment of which all ranks have a copy, and has each host have what its ranks need.

        Enters an all-reduce of 4 numbers a rank, and two of one. Copies of other moments count no more afterwards.

        Args:
            newer_than: step of what there is on the disk, as rank 0 sees it; -1 for nothing.

        Returns:
            it; None, and a line on rank 0 that says why, where there is none that is newer.
        """
        rank, size = self._collectives.rank, self._collectives.size
        labels = {
            (other, generation): self._files.whole(other, generation, self._node_of)
            for other in (rank, *self._near.kept)
            for generation in range(GENERATIONS)
        }
        own, kept, newer_than = self._tell(labels, newer_than)
        chosen = newest_common(own, kept)
        step = _NONE if chosen is None else chosen[0] >> _IDENTITY_BITS
        if chosen is None or step <= newer_than:
            if rank == 0 and chosen is None:
                print(f"dsrun: {_why_none(own, kept, newer_than)}", flush=True)
            return None
        key, generation = chosen
        lacking = tuple(other for other in range(size) if own[other][generation] != key)
        found: list[Restored] = []

        def fetch() -> None:
            for (other, number), label in labels.items():
                if label is None or number != generation or _key(label) != key:
                    self._files.unlabel(other, number)
            if lacking:
                self._fetch(lacking, labels, generation)

        def look() -> None:
            found.append(Restored(self._files.folder, self._index(generation, key), step, lacking))

        for what, work in (("fetch copies", fetch), ("read the labels of copies", look)):
            failure = attempt(work, self._collectives, device=self._device, of=what)
            if failure is not None:
                if failure.error is not None:
                    print(f"dsrun: rank {rank} could not {what} in memory: {failure.error}", flush=True)
                return None
        self._whole = self._made = generation
        return found[0]

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
        self._mail = None

    # Taking -----------------------------------------------------------------------------------------------------------

    @property
    def _is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _agree(self, state: int) -> tuple[int, int]:
        """Returns the worst state of any rank, and an identity that rank 0 has drawn; one all-reduce."""
        drawn = secrets.randbits(_IDENTITY_BITS) if self._collectives.rank == 0 else 0
        told = torch.tensor([state, drawn], dtype=torch.int64, device=self._device)
        self._collectives.all_reduce(told, op="max", of="copies in memory").wait()
        worst, identity = told.tolist()
        return int(worst), int(identity)

    def _all(self, what: str, work: Callable[[], None]) -> None:
        failure = attempt(work, self._collectives, device=self._device, of=what)
        if failure is not None:
            _raise(failure, what)

    def _check_room(self, nbytes: int) -> None:
        """Compares what all ranks of this host will hold with what is free, before the first copy."""
        copies = GENERATIONS * (2 if self._mail is not None else 1)
        needed = nbytes * copies * len(self._near.here)
        disk = os.statvfs(self._files.folder)
        free = min(disk.f_bavail * disk.f_frsize, int(psutil.virtual_memory().available))
        free += self._files.bytes_there()  # of the job's attempt before, which are written over
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
            if self._mail is not None:
                keeper = self._near.keeper
                sends = [] if keeper is None else [(keeper, whole, image)]
                self._swap(self._mail, sends, self._near.kept, generation)
        except Exception as error:  # whatever it is: the next `take` says so, and the last whole copy stays
            self._error = error

    def _swap(
        self, mail: Mail, sends: Sequence[tuple[int, Label, Tensor]], receives: Sequence[int], generation: int
    ) -> None:
        """Sends copies to ranks, and takes those of others; the latter count once their sums are compared."""
        texts = {rank: label.to_bytes() for rank, label, _ in sends}
        lengths = {rank: torch.zeros(2, dtype=torch.int64) for rank in receives}
        mail.exchange(
            [
                Parcel(rank, torch.tensor([len(texts[rank]), label.nbytes]).view(torch.uint8))
                for rank, label, _ in sends
            ],
            [Parcel(rank, lengths[rank].view(torch.uint8)) for rank in receives],
        )
        came = {rank: torch.zeros(int(lengths[rank][0]), dtype=torch.uint8) for rank in receives}
        mail.exchange(
            [Parcel(rank, torch.frombuffer(bytearray(texts[rank]), dtype=torch.uint8)) for rank, _, _ in sends],
            [Parcel(rank, came[rank]) for rank in receives],
        )
        labels = {rank: Label.from_bytes(bytes(came[rank].tolist())) for rank in receives}
        # Of whom a copy comes says its label: a keeper sends what is another rank's.
        images = {
            sender: self._files.image(sender if label is None else label.rank, generation, int(lengths[sender][1]))
            for sender, label in labels.items()
        }
        mail.exchange(
            [Parcel(rank, image) for rank, _, image in sends],
            [Parcel(rank, image) for rank, image in images.items()],
        )
        for sender, label in labels.items():
            if label is None or summed([images[sender].numpy().data]) != label.stored:
                raise CheckpointError(f"the copy from rank {sender} came with other bytes than it was sent with")
            self._files.label(label.rank, generation, label)

    # Restoring --------------------------------------------------------------------------------------------------------

    def _tell(
        self, labels: dict[tuple[int, int], Label | None], newer_than: int
    ) -> tuple[list[list[int]], list[list[int]], int]:
        """Returns keys of every rank's own copies and of those kept for it, by generation, and rank 0's word."""
        rank, size = self._collectives.rank, self._collectives.size
        told = torch.full((2, size, GENERATIONS), _NONE, dtype=torch.int64)
        for (other, generation), label in labels.items():
            if label is not None:
                told[0 if other == rank else 1, other, generation] = _key(label)
        word = torch.tensor([newer_than if rank == 0 else _NONE], dtype=torch.int64)
        everyone = torch.cat([told.view(-1), word]).to(self._device)
        self._collectives.all_reduce(everyone, op="max", of="copies in memory").wait()
        numbers = everyone.cpu()
        own, kept = numbers[:-1].view(2, size, GENERATIONS).tolist()
        return own, kept, int(numbers[-1])

    def _fetch(self, lacking: Sequence[int], labels: dict[tuple[int, int], Label | None], generation: int) -> None:
        """Brings copies from those who keep them back to ranks that have lost their own."""
        if self._mail is None:
            raise CheckpointError("a rank of this host has lost its copy")
        sends: list[tuple[int, Label, Tensor]] = []
        for rank in self._near.kept:
            label = labels[rank, generation]
            if rank in lacking and label is not None:
                image = self._files.image(rank, generation, label.nbytes)
                sends.append((rank, label, image))
        keeper = self._near.keeper
        receives = [keeper] if keeper is not None and self._collectives.rank in lacking else []
        self._swap(self._mail, sends, receives, generation)
        for rank, label, _ in sends:
            self._files.label(rank, generation, label)

    def _index(self, generation: int, key: int) -> Index:
        """Returns the index of what the ranks of this host hold together."""
        index = Index(self._collectives.size, {}, {})
        for rank in self._near.here:
            label = self._files.read_label(rank, generation)
            if label is None or _key(label) != key:
                raise CheckpointError(f"{self._files.folder}: rank {rank} has no copy of the step")
            name = self._files.name(rank, generation)
            index.files[name] = label.stored
            index.aliases.update(label.aliases)
            if rank == self._collectives.rank:
                index.values.update(label.values)
            if label.nbytes:
                add_boxes(index, self._files.folder / name, label.stored)
        return index


def _close(mail: Mail | None) -> None:
    if mail is not None:
        mail.close()


def newest_common(own: Sequence[Sequence[int]], kept: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Returns (key, generation) of the newest moment of which every rank has a copy; None where there is none.

    Args:
        own: of each rank, the key of its own copy of each generation; -1 for none.
        kept: likewise, of the copy that its neighbour keeps.
    """
    common: list[tuple[int, int]] = []
    for generation in range(GENERATIONS):
        there = [{mine[generation], other[generation]} - {_NONE} for mine, other in zip(own, kept, strict=True)]
        common += [(key, generation) for key in set[int].intersection(*there)]
    return max(common, default=None)


def _key(label: Label) -> int:
    """Returns the number of a moment: later steps have larger ones, and no two moments the same."""
    return (label.step << _IDENTITY_BITS) | label.identity


def _why_none(own: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], newer_than: int) -> str:
    keys = [key for table in (own, kept) for row in table for key in row if key != _NONE]
    disk = "from the start" if newer_than == _NONE else f"from the checkpoint of step {newer_than}"
    if not keys:
        return f"no copy in memory is left: going on {disk}"
    newest = max(keys)
    gone = [
        str(rank) for rank, rows in enumerate(zip(own, kept, strict=True)) if not any(newest in row for row in rows)
    ]
    return (
        f"the copy in memory of step {newest >> _IDENTITY_BITS} is not whole (none of rank {', '.join(gone)}): "
        f"going on {disk}"
    )


def _raise(failure: Failure, what: str) -> None:
    error = failure.error
    if error is None:
        raise CheckpointError(f"rank {failure.rank} could not {what}: see its own error")
    if isinstance(error, OSError):
        raise CheckpointError(f"rank {failure.rank} could not {what}: {error}") from error
    raise error
