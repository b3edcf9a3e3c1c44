"""Two ways in which a rank's part comes to the disk: from this process while the script waits, or from one beside it.

Both end with the ranks' verdict, see `commit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from dsrun.checkpoint_files.blocks.write_file import Repeatable, WrittenFile, write_pieces
from dsrun.checkpoint_files.folder.jobs import own_name
from dsrun.checkpoint_files.folder.publish import Publication, is_published, publish, remove_empty
from dsrun.checkpoint_files.index.value import BLOCK_BYTES
from dsrun.checkpoint_files.storage.calls import FileCalls
from dsrun.checkpoint_files.storage.registry import storage_of
from dsrun.errors import DsrunError

from ...memory.bus import make_current
from ..format.host_copy import own_idle_threads
from ..staging.buffer import Staging, pieces_of
from ..staging.sources import Copy, Sources, sources_of
from ..staging.writer_process import WriterError, WriterProcess
from .commit import Part, Verdict
from .fence import Fence
from .request import SaveUnderWay
from .write_watch import StateChangedError, Watch

#: (this rank's part, what publishes all ranks' parts) -> verdict; see `conclude`.
Conclude = Callable[[Part, Callable[[Sequence[Part]], Verdict]], Verdict]


@dataclass(frozen=True, slots=True)
class Keep:
    """Which older checkpoints stay; see `Publication`."""

    last: int | None
    every: int | None


class InlineWriter:
    """Writes in this process, from where the values are.

    Args:
        calls: the file system.
        keep: rule for which older checkpoints stay.
    """

    def __init__(self, calls: FileCalls, keep: Keep) -> None:
        self._calls = calls
        self._keep = keep

    def write(self, save: SaveUnderWay, conclude: Conclude, *, progress: Callable[[], None]) -> Verdict:
        """Writes this rank's part, and returns what became of all of them."""
        part = save.own_part()
        written: WrittenFile | None = None
        try:
            if save.plan.nbytes:
                pieces = Repeatable(partial(pieces_of, save.plan, save.wanted.entries))
                written = write_pieces(save.path, pieces, calls=self._calls, progress=progress)
                part = replace(part, file=written.stored)
        except Exception as error:  # whatever it is: the other ranks wait for this part
            part = replace(part, error=_text_of(error))

        def publish_parts(parts: Sequence[Part]) -> Verdict:
            try:
                nbytes = publish(_publication(save, parts, self._keep), calls=self._calls)
            except (OSError, DsrunError) as error:
                return Verdict(str(error), published=is_published(save.target, save.identity))
            return Verdict(None, published=True, nbytes=nbytes)

        verdict = conclude(part, publish_parts)
        if written is not None:
            written.release(remove=not verdict.published)
        if not verdict.published:
            remove_empty(save.target, calls=self._calls)
        return verdict


class BackgroundWriter:
    """Copies values into memory that a process of its own writes from, at once or behind training.

    Args:
        keep: rule for which older checkpoints stay.
        device: device of the values that are on a device.
        fence: fence that keeps state unchanged until it is copied.
        later: copy what belongs to units behind training.
    """

    def __init__(self, keep: Keep, *, device: torch.device, fence: Fence, later: bool = False) -> None:
        self._keep = keep
        self._device = device
        self._fence = fence
        self._later = later
        self._staging = Staging()
        self._writer: WriterProcess | None = None
        self._taken = 0  # generation of the memory that the process has
        self._frees = False  # the process has removed what a save has replaced: only one that publishes does
        self._watch = Watch((), ())

    @property
    def staged_bytes(self) -> int:
        """Host memory that copies of state have."""
        return self._staging.nbytes

    def stage(self, save: SaveUnderWay) -> None:
        """Takes this rank's part; afterwards only what the fence is closed for must stay as it is.

        Raises:
            OSError: there is no memory for it, or no process.
            WriterError: the process is gone.
        """
        if self._writer is None:
            self._writer, self._taken = WriterProcess(), 0
        if not save.plan.nbytes:
            return
        try:
            self._stage(save, self._writer)
        except WriterError:
            self._writer = None  # it is gone, and the next save starts another
            raise

    def wait_until_freed(self) -> None:
        """Returns when what the save before has removed takes no room any more; nothing must be under way."""
        frees, self._frees = self._frees, False
        if self._writer is not None and frees:
            with suppress(WriterError):  # it is gone: `stage` says so
                self._writer.wait_until_freed()

    def _stage(self, save: SaveUnderWay, writer: WriterProcess) -> None:
        wanted = save.wanted
        sources = save.sources = sources_of(
            save.plan, wanted.entries, wanted.units, later=self._later, on_drive=wanted.on_drive
        )
        self._staging.begin(save.plan.header, sources.image_bytes, sources.copies)
        if self._staging.generation != self._taken:
            writer.take_memory(self._staging.descriptor, self._staging.nbytes)
            self._taken = self._staging.generation
        writer.take_files(sources.segments)
        if not self._later:
            self._staging.touch()
        self._staging.copy([copy for copy in sources.copies if copy.unit is None], threads=own_idle_threads())
        self._watch = Watch(wanted.watched, [copy for copy in sources.copies if copy.unit is not None])
        self._fence.close(sources.units)

    def write(self, save: SaveUnderWay, conclude: Conclude) -> Verdict:
        """Has the part written that was staged, and returns what became of all of them; may run in a thread."""
        writer = self._writer
        assert writer is not None, "a part is staged before it is written"
        part = save.own_part()
        try:
            make_current(self._device)
            if save.sources is not None:
                self._copy_rest(save.sources)
                for unit in save.sources.last_byte:
                    self._fence.pace(unit)
                writer.write(str(save.path), save.plan.nbytes, save.sources.segments)
                part = replace(part, file=writer.written(progress=self._noting(save, save.sources)))
        except Exception as error:  # whatever it is: the other ranks wait for this part
            part = replace(part, error=_text_of(error))
        finally:
            self._fence.open_all()

        def publish_parts(parts: Sequence[Part]) -> Verdict:
            self._frees = True
            try:
                nbytes = writer.publish(_order(_publication(save, parts, self._keep)))
            except WriterError as error:
                return Verdict(str(error), published=is_published(save.target, save.identity))
            return Verdict(None, published=True, nbytes=nbytes)

        verdict = conclude(part, publish_parts)
        try:
            writer.release(str(save.target), remove=not verdict.published)
        except WriterError:
            # It is gone, and its locks with it. The verdict says so where it matters; the next save starts another.
            self._writer = None
            if not verdict.published:
                with suppress(FileNotFoundError):  # another rank was last in the folder, and has removed it
                    storage_of(save.path).remove([save.path])
        if self._writer is None and not verdict.published:
            remove_empty(save.target, calls=FileCalls())
        return verdict

    def _copy_rest(self, sources: Sources) -> None:
        """Copies what was left for later, unit by unit, and opens the fence behind each.

        Raises:
            StateChangedError: the script has changed a parameter meanwhile.
            OSError: there is not so much memory.
        """
        by_unit: dict[int, list[Copy]] = {}
        for copy in sources.copies:
            if copy.unit is not None:
                by_unit.setdefault(copy.unit, []).append(copy)
        if not by_unit:
            return
        self._staging.touch()
        last = list(by_unit)[-1]
        for unit, copies in by_unit.items():
            self._fence.pace(unit)
            # One thread: the others are forward's and backward's.
            self._staging.copy(copies, threads=1)
            if unit == last:
                self._watch.check()  # before anybody who has waited for all of it
            if unit not in sources.last_byte:
                self._fence.open(unit)

    def _noting(self, save: SaveUnderWay, sources: Sources) -> Callable[[], None]:
        """Returns what takes note of a block that was written, and opens the fence where drives were read so far."""
        left = dict(sources.last_byte)
        written = 0

        def note() -> None:
            nonlocal written
            save.count()
            written += BLOCK_BYTES
            for unit in [unit for unit, last in left.items() if last <= written]:
                del left[unit]
                self._fence.open(unit)

        return note

    def close(self) -> None:
        """Ends the process and gives the memory back; nothing must be under way."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._staging.release()


def _publication(save: SaveUnderWay, parts: Sequence[Part], keep: Keep) -> Publication:
    wanted = save.wanted
    return Publication(
        folder=save.target.parent,
        tag=save.target.name,
        identity=save.identity,
        files=[part.file for part in parts],
        frozen=[part.frozen for part in parts],
        values=wanted.values,
        ranks=[part.values for part in parts] if any(part.values for part in parts) else [],
        aliases=wanted.aliases,
        save_latest=wanted.save_latest,
        keep_last=keep.last,
        keep_every=keep.every,
        job=own_name(),
    )


def _text_of(error: Exception) -> str:
    """Returns what went wrong; of what nobody foresaw, its kind too."""
    foreseen = isinstance(error, WriterError | StateChangedError | OSError | DsrunError)
    return str(error) if foreseen else f"{type(error).__name__}: {error}"


def _order(publication: Publication) -> dict[str, Any]:
    return {**asdict(publication), "folder": str(publication.folder)}
