"""The process that writes one rank's file while the rank trains. Imports no torch, so it starts at once and is small.

A rank says what to do by messages, one at a time, and its memory is shared: see `Order` kinds in `serve`. When the
rank is gone, in whatever way, a file that is being written goes, and so does this process; one that was written stays,
for another rank may be publishing it.

[Note: signals of a writer] Ctrl-C and the launcher's request to end go to every process of a job. What a rank makes of
them is its own to decide; its writer goes when the rank does.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from dsrun.errors import DsrunError

from ..blocks.segments import FileSegment
from ..blocks.write_file import write_image, write_segments
from ..folder.publish import Publication, publish, remove_empty
from ..index.value import StoredFile
from ..storage.calls import FileCalls, FreeingBeside
from ..storage.places import StorageError, WrittenFile
from ..storage.registry import place_of
from .messages import is_gone, receive, send


class _RankIsGoneError(Exception):
    """Nobody waits for what is being written."""


def main() -> None:
    """Serves the socket whose descriptor is the first word of the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)


def serve(end: socket.socket) -> None:
    """Does what the other end asks for until it is gone.

    `image`: take memory over, of `nbytes`. `files`: take files over, from which parts come. `write`: the memory's first
    `nbytes` to the file `path`, or its `segments`, each (byte, bytes, number of the file or null); answers `blocks`
    again and again, then `done` or `error`. `publish`: see `Publication`; answers `done` or `error`. `release`: let go
    of the file that was written, and `remove` it or not, with its `folder` where nothing else is in it. `free`: answers
    `done` when the blocks of removed files are free.
    """
    image: mmap.mmap | None = None
    files: list[int] = []
    written: WrittenFile | None = None
    calls = FreeingBeside()
    while (came := receive(end)) is not None:
        order, descriptors = came
        try:
            match order["do"]:
                case "image":
                    image = mmap.mmap(descriptors[0], order["nbytes"])
                    os.close(descriptors[0])
                case "files":
                    _close(files)
                    files = descriptors
                case "write":
                    assert image is not None, "there is memory before anything is to be written"
                    written = _write(end, memoryview(image), files, order, calls)
                    send(end, {"done": {"nbytes": written.stored.nbytes, "sums": written.stored.sums}})
                case "publish":
                    send(end, {"done": {"nbytes": publish(_publication(order), calls=calls)}})
                case "release":
                    if written is not None:
                        with suppress(OSError, StorageError):  # nobody waits for an answer, and no index names it
                            written.release(remove=order["remove"])
                    written = None
                    _close(files)
                    if order["remove"]:
                        remove_empty(place_of(order["folder"]), calls=calls)
                case "free":
                    calls.wait_until_freed()
                    send(end, {"done": {}})
                case other:
                    raise AssertionError(f"no such order: {other}")
        except _RankIsGoneError:
            return
        except (DsrunError, OSError) as error:
            with suppress(OSError):
                send(end, {"error": str(error)})


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _write(
    end: socket.socket, image: memoryview, files: list[int], order: dict[str, Any], calls: FileCalls
) -> WrittenFile:
    blocks = 0

    def progress() -> None:
        nonlocal blocks
        blocks += 1
        if is_gone(end):
            raise _RankIsGoneError
        with suppress(OSError):  # told by the next message that is waited for
            send(end, {"blocks": blocks})

    place = place_of(order["path"])
    if order["segments"]:
        segments = [
            FileSegment(at, nbytes, None if number is None else files[number])
            for at, nbytes, number in order["segments"]
        ]
        return write_segments(place, image, segments, calls=calls, progress=progress)
    return write_image(place, image, order["nbytes"], calls=calls, progress=progress)


def _publication(order: dict[str, Any]) -> Publication:
    files, frozen = (
        [None if file is None else StoredFile(file["nbytes"], tuple(file["sums"])) for file in order[key]]
        for key in ("files", "frozen")
    )
    return Publication(
        folder=place_of(order["folder"]),
        tag=order["tag"],
        identity=order["identity"],
        files=files,
        values=order["values"],
        ranks=order["ranks"],
        aliases=order["aliases"],
        save_latest=order["save_latest"],
        keep_last=order["keep_last"],
        keep_every=order["keep_every"],
        frozen=frozen,
        job=order["job"],
    )
