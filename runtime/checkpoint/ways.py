"""Two ways in which a rank's part comes to the disk: from this process while the script waits, or from one beside it.

Both end with the ranks' verdict, see `conclusion.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from dsrun.checkpoint_files.calls import FileCalls
from dsrun.checkpoint_files.publish import Publication, is_published, publish, remove_empty
from dsrun.checkpoint_files.storage_registry import storage_of
from dsrun.checkpoint_files.write_file import Repeatable, WrittenFile, write_pieces
from dsrun.errors import DsrunError

from .conclusion import Part, Verdict
from .staging import Staging, pieces_of
from .under_way import SaveUnderWay
from .writer_process import WriterError, WriterProcess

#: (this rank's part, what publishes all ranks' parts) -> verdict; see `conclude`.
Conclude = Callable[[Part, Callable[[Sequence[Part]], Verdict]], Verdict]


@dataclass(frozen=True, slots=True)
class Keep:
    """Which older checkpoints stay; see `Publication`."""

    last: int | None
    every: int | None


class WriteHere:
    """Writes in this process, from where the values are.

    Args:
        calls: the file system.
        keep: which older checkpoints stay.
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
        except (OSError, DsrunError) as error:
            part = replace(part, error=str(error))

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


class WriteBeside:
    """Copies values into memory that a process of its own writes from.

    Args:
        keep: which older checkpoints stay.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._staging = Staging()
        self._writer: WriterProcess | None = None
        self._taken = 0  # generation of the memory that the process has

    def stage(self, save: SaveUnderWay) -> None:
        """Copies this rank's part; afterwards the values may change.

        Raises:
            OSError: there is no memory for it, or no process.
            WriterError: the process is gone.
        """
        if self._writer is None:
            self._writer, self._taken = WriterProcess(), 0
        if not save.plan.nbytes:
            return
        self._staging.fill(save.plan, save.wanted.entries)
        if self._staging.generation != self._taken:
            self._writer.take_memory(self._staging.descriptor, self._staging.nbytes)
            self._taken = self._staging.generation

    def write(self, save: SaveUnderWay, conclude: Conclude) -> Verdict:
        """Has the part written that was staged, and returns what became of all of them; may run in a thread."""
        writer = self._writer
        assert writer is not None, "a part is staged before it is written"
        part = save.own_part()
        try:
            if save.plan.nbytes:
                writer.write(str(save.path), save.plan.nbytes)
                part = replace(part, file=writer.written(progress=save.count))
        except WriterError as error:
            part = replace(part, error=str(error))

        def publish_parts(parts: Sequence[Part]) -> Verdict:
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
                storage_of(save.path).remove([save.path])
        if self._writer is None and not verdict.published:
            remove_empty(save.target, calls=FileCalls())
        return verdict

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
    )


def _order(publication: Publication) -> dict[str, Any]:
    return {**asdict(publication), "folder": str(publication.folder)}
