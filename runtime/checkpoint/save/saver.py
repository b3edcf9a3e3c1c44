"""Saving: every rank writes its pieces to one file, rank 0 publishes the index. Knows no feature, only StateEntries.

[Note: one copy] An asynchronous save stops training for one copy of this rank's state into memory that every save uses
again; or not even for that, see `fence.py`. From there a process of its own writes, and a thread waits for it and for
the other ranks. What has gone wrong is raised where the script next saves, loads, steps or ends.

[Note: the last save] The interpreter waits for the thread of a save before it ends. A script that ends without
`engine.destroy()` hears of a failure then: nothing can be raised any more, so its exit code becomes 1. That holds of an
engine that is gone by then as well, say with the function that made it: the thread of a save keeps the saver until the
verdict is known, and lets go of it itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dsrun.checkpoint_files.folder.jobs import JobMarks
from dsrun.checkpoint_files.folder.own_saves import SavingMark, take_note
from dsrun.checkpoint_files.folder.publish import file_name, remove_empty
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.places import Place
from dsrun.checkpoint_files.storage.registry import check_writable_beside
from dsrun.checkpoint_files.storage.tags import tag_to_save
from dsrun.errors import CheckpointError

from ...mesh.collectives import Collectives
from ...mesh.host_memory.noticeboard import Noticeboard
from ..format.plan import FilePlan, Planner
from ..format.policy import SavePolicy
from ..staging.sources import in_memory
from ..staging.writer_process import WriterError
from .commit import Part, Verdict, conclude
from .fence import Fence
from .frozen import FrozenParameters, FrozenWork
from .prepare import Readiness
from .presence import Presence
from .request import SaveRequest, SaveUnderWay
from .writers import BackgroundWriter, Conclude, InlineWriter, Keep


class Saver:
    """Saves checkpoints of one engine, one after the other.

    Args:
        collectives: all ranks that hold pieces.
        board: their noticeboard.
        device: device of the collectives' tensors, and of state that is on a device.
        policy: policy of saves, from the config.
        calls: the file system of a save that is not asynchronous.
        fence: fence that updates wait at while state is copied, see `fence.py`; None where no update waits, so that
            nothing may be copied later.
    """

    def __init__(
        self,
        collectives: Collectives,
        board: Noticeboard,
        *,
        device: torch.device,
        policy: SavePolicy,
        calls: FileCalls | None = None,
        fence: Fence | None = None,
    ) -> None:
        assert fence is not None or not policy.later, "what is copied later has somebody who waits"
        self.policy = policy
        self.fence = Fence() if fence is None else fence
        self._collectives = collectives
        self._board = board
        self._calls = FileCalls() if calls is None else calls
        self._readiness = Readiness(collectives, device=device)
        self._planner = Planner()
        self._frozen = FrozenParameters(self._calls)
        self._marks = JobMarks()
        weakref.finalize(self, self._marks.release)
        keep = Keep(policy.keep_last, policy.keep_every)
        self._here = InlineWriter(self._calls, keep)
        self._beside = BackgroundWriter(keep, device=device, fence=self.fence, later=policy.later)
        self._last = _LastSave()
        self._at_exit = partial(_tell_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        self._when_gone = weakref.finalize(self, _keep_for_the_end, self._last)
        self._when_gone.atexit = False

    def save(self, folder: Place, tag: str, want: Callable[[], SaveRequest], *, progress: Callable[[], None]) -> None:
        """Writes one checkpoint; every rank must call. Enters up to ten collectives of one number.

        Args:
            folder: folder of the run's checkpoints, the same shared one on every rank; or an address in an object
                store.
            tag: name of this one inside it.
            want: function that returns what to save; an error on one rank is raised on all. Unless saves are
                asynchronous, the checkpoint is complete when `save` returns.
            progress: callback whenever data is on its way to the disk, so that a slow disk does not count as a hang.

        Raises:
            CheckpointError: on every rank, if one cannot write or an earlier save has failed; nothing was published.
        """
        self._end_the_one_before(progress)
        rank, size = self._collectives.rank, self._collectives.size
        prepared: list[tuple[SaveRequest, FilePlan, FrozenWork | None]] = []

        def prepare() -> None:
            tag_to_save(folder, tag)
            if self.policy.asynchronous:
                check_writable_beside(folder)
            wanted = want()
            if self.policy.later or wanted.on_drive is not in_memory:
                wanted = wanted.by_update()
            frozen = None
            if wanted.frozen is not None:
                frozen = self._frozen.look(folder, wanted.frozen)
            prepared.append((wanted, self._planner.plan(wanted.entries), frozen))

        self._readiness.all("save its part", folder, prepare)
        target = folder / tag
        wanted, plan, frozen = prepared[0]
        needed = plan.nbytes + (0 if frozen is None else frozen.new_bytes)
        identity = self._readiness.new_identity()
        claim = partial(self._claim, folder, tag, identity)
        self._readiness.make_folder(target, needed, calls=self._calls, then=claim)
        self._readiness.check_shared(folder)
        save = SaveUnderWay(wanted, identity, plan, target, target / file_name(rank, identity))
        if size > 1:
            Presence(self._board, identity).say(rank)
        if self.policy.asynchronous or wanted.frozen is not None:
            try:
                self._readiness.all("copy its part", target, lambda: self._stage(save, frozen, progress))
            except BaseException:
                self.fence.open_all()
                save.end_mark()
                if save.frozen is not None:
                    save.frozen.release(remove=True)
                remove_empty(target, calls=self._calls)
                raise
        if self.policy.asynchronous:
            self._last.save, self._last.is_told = save, False
            try:
                save.run_beside(self._write_beside)
            except BaseException:  # no thread, so nobody will copy
                self.fence.open_all()
                save.end_mark()
                raise
            take_note(save)
        else:
            self._last.save, self._last.is_told = save, False
            save.run(lambda save: self._here.write(save, self._concluding(save, waiting=progress), progress=progress))
            self.check()

    def finish(self, progress: Callable[[], None]) -> None:
        """Returns when no save is under way; enters no collective.

        Raises:
            CheckpointError: the last save has failed, and the script was not told so far.
        """
        if self._last.save is not None:
            self._last.save.wait(progress)
        self.check()

    def wait_until_freed(self) -> None:
        """Returns when what the last save has replaced takes no room any more; nothing must be under way."""
        self._beside.wait_until_freed()

    @property
    def staged_bytes(self) -> int:
        """Host memory that copies of state take, from the first asynchronous save on."""
        return self._beside.staged_bytes

    def check(self) -> None:
        """Raises what has gone wrong with a save that has come to its end, once; enters no collective.

        Raises:
            CheckpointError: the last save has failed.
        """
        self._last.check()

    def close(self, progress: Callable[[], None]) -> None:
        """Waits for a save that is under way, then lets go of memory and process; enters no collective.

        Raises:
            CheckpointError: see `finish`.
        """
        atexit.unregister(self._at_exit)
        self._when_gone.detach()
        try:
            self.finish(progress)
        finally:
            self._beside.close()
            self._marks.release()

    def _end_the_one_before(self, progress: Callable[[], None]) -> None:
        """Waits for the save before, or refuses, as all ranks agree; raises on all of them what one was not told."""
        save = self._last.save
        if save is not None and self.policy.when_busy == "wait":
            save.wait(progress)
        state = 0
        if save is not None:
            state = 2 if save.is_under_way else 1 if not self._last.is_told and save.has_failed else 0
        worst = self._readiness.largest(state, label="outcome of the save before")
        if worst == 2:
            assert save is not None, "all ranks have begun the same saves"
            raise CheckpointError(
                f"{save.target}: it is still being written, and `checkpoint.when_busy` is refuse",
                hint="save less often, or set it to wait",
            )
        self._last.save = None
        if worst == 1 and save is not None:
            save.raise_failure()
        self.wait_until_freed()  # before anybody looks for room

    def _claim(self, folder: Place, tag: str, identity: str) -> None:
        """Has other jobs know whose the tag is, and says which there are."""
        if self._collectives.rank == 0 and isinstance(folder, Path):
            for text in self._marks.claim(folder, tag, identity):
                print(f"dsrun: {text}", flush=True)

    def _stage(self, save: SaveUnderWay, frozen: FrozenWork | None, progress: Callable[[], None]) -> None:
        if frozen is not None:
            rank = self._collectives.rank
            save.frozen = self._frozen.put(frozen, save.target, save.identity, rank=rank, progress=progress)
        if not self.policy.asynchronous:
            return
        if self._collectives.rank == 0 and isinstance(save.target, Path):
            save.mark = SavingMark(save.target, save.identity, timeout_s=self.policy.timeout_s)
        try:
            self._beside.stage(save)
        except WriterError as error:
            raise CheckpointError(str(error)) from error

    def _write_beside(self, save: SaveUnderWay) -> Verdict:
        return self._beside.write(save, self._concluding(save, waiting=save.count))

    def _concluding(self, save: SaveUnderWay, *, waiting: Callable[[], None]) -> Conclude:
        def end(part: Part, publish: Callable[[Sequence[Part]], Verdict]) -> Verdict:
            verdict = conclude(
                part,
                rank=self._collectives.rank,
                size=self._collectives.size,
                board=self._board,
                subject=save.identity,
                timeout_s=self.policy.timeout_s,
                waiting=waiting,
                publish=publish,
            )
            if save.frozen is not None:
                save.frozen.release(remove=not verdict.published)
                if verdict.error is None:
                    self._frozen.keep(save.frozen)
            if verdict.error is None and self._collectives.rank == 0:
                save.wanted.when_saved(verdict.nbytes, time.perf_counter() - save.started)
            return verdict

        return end


@dataclass(slots=True)
class _LastSave:
    """A saver's last save, and whether what became of it is known to the script, or good."""

    save: SaveUnderWay | None = None
    is_told: bool = True

    def check(self) -> None:
        """See `Saver.check`."""
        if self.save is not None and not self.is_told and not self.save.is_under_way:
            self.is_told = True
            self.save.raise_failure()


def _tell_at_exit(saver: weakref.ref[Saver]) -> None:
    """See [Note: the last save]."""
    present = saver()
    try:
        if present is not None:
            present.check()
    except CheckpointError as error:
        _end_with(error)


def _keep_for_the_end(last: _LastSave) -> None:
    """Keeps of a saver that is gone what its script was not told, and not its tensors; see [Note: the last save]."""
    try:
        last.check()
    except CheckpointError as error:
        atexit.register(_end_with, error.with_traceback(None))


def _end_with(error: CheckpointError) -> None:
    sys.stdout.flush()
    print(error.render(), file=sys.stderr, flush=True)
    os._exit(error.exit_code)
