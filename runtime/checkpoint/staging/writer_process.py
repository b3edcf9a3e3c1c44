"""This rank's end of the process that writes for it: started once, without a copy of this process, and asked one thing
at a time.

The process runs `dsrun.checkpoint_files.writer.main`: a fresh interpreter without torch. It is started by vfork, so
neither this process's memory nor its CUDA context is duplicated, however large they are.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dsrun.checkpoint_files.index.value import StoredFile
from dsrun.checkpoint_files.writer.messages import MOST_DESCRIPTORS, receive, send

from .sources import Segment

#: Modules are found as here, but the standard library's first: a script's own `json.py` is not meant.
_PROGRAM = "import sys; sys.path += sys.argv[2:]; from dsrun.checkpoint_files.writer.main import main; main()"


class WriterError(Exception):
    """The writer could not do it, or is gone; the text says why."""


class WriterProcess:
    """One process; its methods are called by one thread at a time."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._end, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-c", _PROGRAM, str(theirs.fileno()), *filter(None, sys.path)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        # Few scripts end an engine: the writer goes when nobody refers to it, and when this process ends.
        self._at_end = weakref.finalize(self, _end, self._end, self.process)

    def take_memory(self, descriptor: int, nbytes: int) -> None:
        """Shares memory with it, from which files are written from now on."""
        self._send({"do": "image", "nbytes": nbytes}, descriptors=(descriptor,))

    def take_files(self, segments: Sequence[Segment]) -> None:
        """Shares the files that segments come from, until `release`; they may be closed here meanwhile."""
        self._files = sorted({s.descriptor for s in segments if s.descriptor is not None})
        assert len(self._files) <= MOST_DESCRIPTORS, f"{len(self._files)} files that state is offloaded to"
        if self._files:
            self._send({"do": "files"}, descriptors=tuple(self._files))

    def write(self, path: str, nbytes: int, segments: Sequence[Segment] = ()) -> None:
        """Has it begin to write a new file; see `written`.

        Args:
            path: path of the file.
            nbytes: bytes of the file; without segments it is the first bytes of the shared memory.
            segments: segments that the file is put together from; their files were passed to `take_files`.
        """
        numbers = {descriptor: number for number, descriptor in enumerate(self._files)}
        parts = [(s.at, s.nbytes, None if s.descriptor is None else numbers[s.descriptor]) for s in segments]
        self._send({"do": "write", "path": path, "nbytes": nbytes, "segments": parts})

    def written(self, *, progress: Callable[[], None]) -> StoredFile:
        """Waits for the file to be durable.

        Args:
            progress: callback after each block that is written.

        Raises:
            WriterError: it could not be written; nothing is left of it.
        """
        done = self._answer(progress)
        return StoredFile(done["nbytes"], tuple(done["sums"]))

    def publish(self, publication: dict[str, Any]) -> int:
        """Has it publish a checkpoint, see `Publication`; returns its bytes.

        Raises:
            WriterError: it could not be published.
        """
        self._send({"do": "publish", **publication})
        return int(self._answer(lambda: None)["nbytes"])

    def wait_until_freed(self) -> None:
        """Returns when the blocks of the files are free that the last publication has removed.

        Raises:
            WriterError: the process is gone.
        """
        self._send({"do": "free"})
        self._answer(lambda: None)

    def release(self, folder: str, *, remove: bool) -> None:
        """Has it let go of the file it wrote, see `WrittenFile`, and of the folder where nothing else is in it."""
        self._send({"do": "release", "remove": remove, "folder": folder})

    def close(self) -> None:
        """Ends it; what it is writing is given up."""
        self._at_end()

    def _send(self, order: dict[str, Any], *, descriptors: tuple[int, ...] = ()) -> None:
        try:
            send(self._end, order, descriptors=descriptors)
        except OSError as error:
            raise WriterError(self._how_it_ended()) from error

    def _answer(self, progress: Callable[[], None]) -> dict[str, Any]:
        while (came := receive(self._end)) is not None:
            answer, _ = came
            if "blocks" in answer:
                progress()
            elif "error" in answer:
                raise WriterError(answer["error"])
            else:
                return answer["done"]
        raise WriterError(self._how_it_ended())

    def _how_it_ended(self) -> str:
        self._end.close()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process that writes checkpoints {how}"


def _end(end: socket.socket, process: subprocess.Popen[bytes]) -> None:
    end.close()
    process.wait()
