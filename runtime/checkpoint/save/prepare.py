"""Before the first byte: do all ranks see the same folder, and has it room? Raises on all of them where one finds not.

Every function here is entered by every rank.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from dsrun.checkpoint_files.folder.publish import remove_empty
from dsrun.checkpoint_files.storage.calls import FileCalls, free_bytes
from dsrun.checkpoint_files.storage.places import Place, StorageError, small_content
from dsrun.checkpoint_files.storage.registry import storage_of
from dsrun.errors import CheckpointError, DsrunError
from dsrun.units import format_bytes

from ...mesh.agree.all_or_none import tell_error
from ...mesh.agree.same import attempt
from ...mesh.collectives import Collectives

#: What an index has at least, besides tensors.
_INDEX_BYTES = 64 << 10


class Readiness:
    """Asks all ranks.

    Args:
        collectives: all ranks.
        device: device of the tensors that the collectives use.
    """

    def __init__(self, collectives: Collectives, *, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._shared: set[Place] = set()

    def all(self, what: str, target: Place, work: Callable[[], None]) -> None:
        """Does each rank's part; one all-reduce of one number, and where one failed a broadcast of its error.

        Args:
            what: phrase that completes "could not" in error messages, such as `write there`.
            target: the tag's folder.
            work: function that does this rank's part; it enters no collective.

        Raises:
            CheckpointError: on every rank, where one rank could not.
        """
        failure = attempt(work, self._collectives, device=self._device, label=what)
        if failure is None:
            return
        error = failure.error
        message, hint = tell_error(error, failure.rank, self._collectives, device=self._device, label=what)
        if error is None:
            raise CheckpointError(
                f"{target}: rank {failure.rank} could not {what}, nothing was published: {message}", hint=hint or None
            )
        if isinstance(error, DsrunError | OSError):
            hint = error.hint if isinstance(error, DsrunError) else None
            raise CheckpointError(f"{target}: could not be saved, nothing was published: {error}", hint=hint) from error
        raise error

    def largest(self, number: int, *, label: str) -> int:
        """Returns the largest number of any rank; one all-reduce."""
        return self._reduce(number, op="max", label=label)

    def new_identity(self) -> str:
        """Returns an id that every rank has, and no other save; one broadcast."""
        identity = torch.tensor([secrets.randbits(32)], dtype=torch.int64, device=self._device)
        self._collectives.broadcast(identity, source=0, label="checkpoint id").wait()
        with self._collectives.reading("checkpoint id"):
            return f"{int(identity.item()):08x}"

    def make_folder(
        self, target: Place, nbytes: int, *, calls: FileCalls, then: Callable[[], None] = lambda: None
    ) -> None:
        """Makes a tag's folder, which has room for what all ranks write; two all-reduces.

        An object store has no folders, and does not say how much room it has.

        Args:
            target: the tag's folder.
            nbytes: bytes that this rank writes.
            calls: the file system.
            then: done by each rank where it is made.

        Raises:
            CheckpointError: it cannot be made, has no room, or `then` has raised.
        """
        needed = self._reduce(nbytes, op="sum", label="checkpoint bytes") + _INDEX_BYTES

        def make() -> None:
            if not isinstance(target, Path):
                storage_of(target)  # raises where nothing knows it
                return
            free = free_bytes(next(place for place in (target, *target.parents) if place.is_dir()))
            if free < needed:
                raise CheckpointError(
                    f"it has {format_bytes(needed)}, and {format_bytes(free)} are free there",
                    hint="remove older checkpoints, or let `checkpoint.keep_last` do it",
                )
            calls.make_folder(target)
            then()

        try:
            self.all("make its folder", target, make)
        except CheckpointError:
            remove_empty(target, calls=calls)  # which another rank has made
            raise

    def check_shared(self, folder: Place) -> None:
        """Finds a rank that does not see what rank 0 writes, at the first save in a folder; two all-reduces.

        In a store it finds a bucket that is not there, or what may not be done in it, too, so one rank asks as well.

        Raises:
            CheckpointError: naming its host.
        """
        if folder in self._shared or (self._collectives.size == 1 and isinstance(folder, Path)):
            return
        mark = folder / f".shared-{self.new_identity()}"
        first = self._collectives.rank == 0

        def make() -> None:
            if not first:
                return
            if isinstance(mark, Path):
                mark.touch(exist_ok=False)
            else:
                storage_of(mark).write(mark, small_content(b"seen by all ranks?"), over=mark.name)

        def look() -> None:
            if not _is_there(mark):
                raise CheckpointError(
                    f"{folder} on {socket.gethostname()} is not the folder that rank 0 writes to",
                    hint="save to a folder that all hosts share"
                    if isinstance(folder, Path)
                    else "set the same endpoint and credentials on all hosts",
                )

        try:
            self.all("write there", folder, make)
            self.all("see what rank 0 writes", folder, look)
        finally:
            if first:
                _remove(mark)
        self._shared.add(folder)

    def _reduce(self, number: int, *, op: str, label: str) -> int:
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._collectives.all_reduce(value, op=op, label=label).wait()
        with self._collectives.reading(label):
            return int(value.item())


def _is_there(mark: Place) -> bool:
    if isinstance(mark, Path):
        return mark.exists()
    try:
        with storage_of(mark).read(mark):
            return True
    except FileNotFoundError:
        return False


def _remove(mark: Place) -> None:
    if isinstance(mark, Path):
        mark.unlink(missing_ok=True)
    else:
        with suppress(StorageError):  # the other ranks go on; nobody mistakes what is left for a checkpoint
            storage_of(mark).remove([mark])
