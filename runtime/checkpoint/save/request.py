"""One save as a value, and how far it is: what is wanted, what this rank writes, and what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dsrun.checkpoint_files.folder.own_saves import SavingMark
from dsrun.checkpoint_files.storage.places import Place
from dsrun.errors import CheckpointError

from ...protocols import StateEntry
from ..format.plan import FilePlan
from ..staging.sources import OnDrive, Sources, in_memory, in_order_of_updates
from .commit import Part, Verdict
from .frozen import FrozenFile

#: How often who waits looks for blocks that were written meanwhile.
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is to be saved.

    Attributes:
        entries: pieces of state that this rank has.
        frozen: its pieces of frozen parameters that checkpoints share; None where they are among `entries`.
        values: values that are no tensors, as JSON values; those of rank 0 are stored.
        rank_values: values of this rank alone that are no tensors, as JSON values; stored for each rank.
        aliases: names of tied parameters, mapped to the names they are stored under.
        save_latest: whether `latest` names this tag afterwards.
        when_saved: callback after publication, on rank 0 and in any thread, that gets the checkpoint's bytes and the
            seconds it took.
        units: number of the unit that updates each entry; None for an entry that is copied at once, since its updates
            do not wait. Empty if all are None.
        order: numbers of the units in the order of their next updates.
        watched: (name, tensor) of what the script may write to while it is copied.
        on_drive: function that finds tensors that lie on a drive, and so are not copied.
    """

    entries: Sequence[StateEntry]
    values: Mapping[str, Any]
    rank_values: Mapping[str, Any]
    aliases: Mapping[str, str]
    save_latest: bool
    when_saved: Callable[[int, float], None]
    frozen: Sequence[StateEntry] | None = None
    units: Sequence[int | None] = ()
    order: Sequence[int] = ()
    watched: Sequence[tuple[str, Tensor]] = ()
    on_drive: OnDrive = in_memory

    def by_update(self) -> SaveRequest:
        """Returns the same with entries in the order of the next updates: what is waited for first is copied first."""
        if not self.units:
            return self
        numbers = in_order_of_updates(self.units, self.order)
        return replace(self, entries=[self.entries[n] for n in numbers], units=[self.units[n] for n in numbers])


class SaveUnderWay:
    """A save that has begun.

    Args:
        wanted: contents of the checkpoint that is being saved.
        identity: identity of the save, a part of its file names.
        plan: plan of this rank's file.
        target: the tag's folder.
        path: path of this rank's file in the tag's folder.
    """

    def __init__(self, wanted: SaveRequest, identity: str, plan: FilePlan, target: Place, path: Place) -> None:
        self.wanted = wanted
        self.identity = identity
        self.plan = plan
        self.target = target
        self.path = path
        self.started = time.perf_counter()
        self.blocks = 0
        self.frozen: FrozenFile | None = None
        self.sources: Sources | None = None  # once it is staged, if this rank has anything to write
        self.mark: SavingMark | None = None  # on rank 0, if it goes on beside the script
        self._verdict: Verdict | None = None
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_over = False  # the thread lives a little longer: what it was to do goes in it, and the saver with that

    @property
    def is_under_way(self) -> bool:
        """Whether its verdict is not known yet."""
        return self._thread is not None and not self._is_over

    @property
    def has_failed(self) -> bool:
        """Whether it has come to a bad end."""
        return not self.is_under_way and (self._verdict is None or self._verdict.error is not None)

    def own_part(self) -> Part:
        """Returns this rank's part as it is before anything is written."""
        return Part(None, dict(self.wanted.rank_values), frozen=None if self.frozen is None else self.frozen.stored)

    def count(self) -> None:
        """Takes note of a block that was written, or of a look for the other ranks."""
        self.blocks += 1

    def run(self, work: Callable[[SaveUnderWay], Verdict]) -> None:
        """Does `work`, and keeps its verdict."""
        try:
            self._verdict = work(self)
        except Exception as error:  # whatever it is: `raise_failure` raises it where the script is
            self._broken = error
        finally:
            self.end_mark()
            self._is_over = True

    def end_mark(self) -> None:
        """Nobody has to wait for it any more."""
        mark, self.mark = self.mark, None
        if mark is not None:
            mark.release()

    def run_beside(self, work: Callable[[SaveUnderWay], Verdict]) -> None:
        """Does `work` in a thread, which the interpreter waits for at its end."""
        self._thread = threading.Thread(target=self.run, args=(work,), name=f"save {self.target.name}")
        self._thread.start()

    def wait(self, progress: Callable[[], None]) -> None:
        """Returns when the verdict is known.

        Args:
            progress: callback in the calling thread whenever the save has made progress towards the disk.
        """
        if self._thread is None:
            return
        seen = self.blocks
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if self.blocks != seen:
                seen = self.blocks
                progress()

    def raise_failure(self) -> None:
        """Raises what has gone wrong, if anything has.

        Raises:
            CheckpointError: naming the checkpoint and the ranks.
        """
        if not self.has_failed:
            return
        if self._verdict is None:
            raise CheckpointError(f"{self.target}: could not be saved: {self._broken}") from self._broken
        if self._verdict.published:
            raise CheckpointError(
                f"{self.target}: it may not be durable: {self._verdict.error}",
                hint="save again, and look at it with `dsrun checkpoint verify`",
            )
        raise CheckpointError(
            f"{self.target}: could not be saved, nothing was published: {self._verdict.error}",
            hint="earlier checkpoints are as they were",
        )
