"""This rank's frozen parameters in a file of their own, which the checkpoints of a run share where they can.

See [Note: one file, several names] in `checkpoint_files/reference.py`. What is frozen, whether this is asked for, and
what becomes of the save is decided elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.checkpoint_files.blocks.write_file import WrittenFile, write_pieces
from dsrun.checkpoint_files.index.value import StoredFile
from dsrun.checkpoint_files.reference import find_same, frozen_name, has_size, summed
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Place
from dsrun.errors import CheckpointError

from ...protocols import StateEntry
from ..format.plan import FilePlan, Planner
from ..staging.buffer import pieces_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenWork:
    """What a save has to do for this rank's frozen parameters.

    Attributes:
        plan: plan of the file.
        entries: entries that the plan was made for.
        stored: its size and checksums, from the values as they are now.
        source: a file of an earlier checkpoint with the same bytes; None: it has to be written.
    """

    plan: FilePlan
    entries: Sequence[StateEntry]
    stored: StoredFile
    source: Path | None

    @property
    def new_bytes(self) -> int:
        """What it needs of the disk."""
        return 0 if self.source is not None else self.plan.nbytes


class FrozenFile:
    """A rank's file of frozen parameters in the folder of a save, which belongs to nobody yet.

    Args:
        path: the file.
        stored: its size and checksums.
        calls: the file system.
        written: the file where it was written; None where it is another name of an earlier one.
    """

    def __init__(self, path: Place, stored: StoredFile, calls: FileCalls, written: WrittenFile | None) -> None:
        self.path = path
        self.stored = stored
        self._calls = calls
        self._written = written

    def release(self, *, remove: bool) -> None:
        """Lets go of the file; see `WrittenFile`.

        Args:
            remove: no index names it.
        """
        if self._written is not None:
            self._written.release(remove=remove)
        elif remove and isinstance(self.path, Path):
            self._calls.remove(self.path)


class FrozenParameters:
    """Writes them once, and refers to them from then on.

    Args:
        calls: the file system.
    """

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls
        self._planner = Planner()
        self._last: FrozenFile | None = None

    def look(self, folder: Place, entries: Sequence[StateEntry]) -> FrozenWork | None:
        """Returns what is to be done; None where this rank has nothing. Reads all values, to be sure what they are.

        Args:
            folder: folder of the run's checkpoints.
            entries: pieces of frozen parameters that this rank has.
        """
        plan = self._planner.plan(entries)
        if not plan.nbytes:
            return None
        stored = summed(pieces_of(plan, entries))
        if not isinstance(folder, Path):  # an object has one name
            return FrozenWork(plan, entries, stored, None)
        last = self._last
        # A look through the indexes only where the last save's file is gone, or is of other values.
        known = last is not None and last.stored == stored and last.path.parent.parent == folder
        if last is not None and known and isinstance(last.path, Path) and has_size(last.path, stored):
            return FrozenWork(plan, entries, stored, last.path)
        return FrozenWork(plan, entries, stored, find_same(folder, stored))

    def put(
        self, work: FrozenWork, target: Place, identity: str, *, rank: int, progress: Callable[[], None]
    ) -> FrozenFile:
        """Has the file in the folder of a save: another name of an earlier one, else written while the script waits.

        Args:
            work: work on the frozen parameters that `look` returned.
            target: the tag's folder.
            identity: identity of the save, a part of its file names.
            rank: number of this rank.
            progress: callback after each block that is written.

        Raises:
            CheckpointError: a frozen parameter has changed meanwhile; nothing is left of the file.
            OSError: it cannot be written; likewise.
        """
        path = target / frozen_name(rank, identity)
        if work.source is not None and isinstance(path, Path) and self._link(work.source, path):
            return FrozenFile(path, work.stored, self._calls, None)
        written = write_pieces(path, pieces_of(work.plan, work.entries), calls=self._calls, progress=progress)
        if written.stored != work.stored:
            written.release(remove=True)
            raise CheckpointError(
                f"{path}: a frozen parameter was changed while it was being saved",
                hint="change parameters between saves alone, or leave `checkpoint.frozen_parameters` at copy",
            )
        return FrozenFile(path, work.stored, self._calls, written)

    def keep(self, file: FrozenFile) -> None:
        """Takes note of a file that an index names now; the next save refers to it."""
        self._last = file

    def _link(self, source: Path, path: Path) -> bool:
        """Gives a file another name; False where that cannot be, and it has to be written again."""
        try:
            self._calls.link(source, path)
        except FileNotFoundError:  # its checkpoint was removed since
            return False
        except OSError as error:
            _log.warning(
                "%s: cannot refer to %s (%s): frozen parameters are written again",
                path,
                source,
                os.strerror(error.errno or 0),
            )
            return False
        self._calls.sync_folder(path.parent)
        return True
