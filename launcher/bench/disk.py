"""How fast a folder's disk writes and reads, past the page cache: large blocks in order, and 4 KiB here and there.

The file has a cap, and no name from the moment it is open, so nothing stays behind however the process ends. It is laid
down first, uncounted: what is measured is a file that is used again and again, as offload and its like do, not the
search for room. Where the filesystem refuses O_DIRECT, data goes through the page cache and is made to leave it; the
report says so.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dsrun.direct_io.opening import OpenFile, open_anonymous
from dsrun.errors import LaunchError
from dsrun.units import format_bytes

from .figure import LEAST_REPETITIONS, Figure, figure
from .memory import huge_buffer

#: Of the file.
CAP_BYTES = 1 << 30
_BLOCK_BYTES = 4 << 20
_SMALL_BYTES = 4096
#: Blocks on their way at once; a thread each.
_SEQUENTIAL_DEPTH, _RANDOM_DEPTH = 4, 16
_PASS_S = 0.4
#: Of the free room; a full disk would stop other people's jobs.
_SHARE = 4

_Step = Callable[[int, mmap.mmap], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFigures:
    """What was measured in one folder.

    Attributes:
        path: the folder.
        file_bytes: bytes of the file that was written and read for the measurement.
        direct: the page cache was left out.
        figures: rates of sequential writes, sequential reads and random reads.
    """

    path: str
    file_bytes: int
    direct: bool
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {
            "path": self.path,
            "file_bytes": self.file_bytes,
            "direct": self.direct,
            "figures": [one.to_json() for one in self.figures],
        }


def answer(arguments: dict[str, Any], keep: ExitStack) -> Any:
    """Answers the question `bench_disk`: `path` and `cap_bytes`. See [Note: questions] in survey/server."""
    return measure(arguments["path"], cap_bytes=arguments["cap_bytes"]).to_json()


def measure(
    path: str,
    *,
    cap_bytes: int = CAP_BYTES,
    pass_s: float = _PASS_S,
    repetitions: int = LEAST_REPETITIONS,
    open_file: OpenFile = os.open,
) -> DiskFigures:
    """Writes and reads a file in `path`.

    Args:
        path: an existing folder; its filesystem is what is measured.
        cap_bytes: longest file; a quarter of the free room if that is less.
        pass_s: length of each repetition.
        repetitions: number of times that each figure is measured.
        open_file: opens the file; tests give one that refuses what some filesystems refuse.

    Raises:
        LaunchError: no file can be made there, or there is no room.
    """
    try:
        with ExitStack() as stack:
            opened = open_anonymous(path, open_file)
            fd, direct = opened.fd, opened.direct
            stack.callback(os.close, fd)
            stat = os.fstatvfs(fd)
            size = min(cap_bytes, stat.f_bavail * stat.f_frsize // _SHARE) // _BLOCK_BYTES * _BLOCK_BYTES
            if size == 0:
                free = format_bytes(stat.f_bavail * stat.f_frsize)
                raise LaunchError(
                    f"{path}: {free} free is too little to measure with", hint="name another: `--path DIR`"
                )
            return DiskFigures(
                path=path, file_bytes=size, direct=direct, figures=_passes(fd, size, direct, pass_s, repetitions)
            )
    except OSError as error:
        raise LaunchError(
            f"{path}: cannot be measured: {error.strerror}", hint="name a folder you may write to: `--path DIR`"
        ) from error


def _passes(fd: int, size: int, direct: bool, pass_s: float, repetitions: int) -> tuple[Figure, ...]:
    def write(at: int, buffer: mmap.mmap) -> int:
        return os.pwrite(fd, buffer, at)

    def read(at: int, buffer: mmap.mmap) -> int:
        return os.preadv(fd, [buffer], at)

    def settle() -> None:
        # What the disk has said it holds, not what the kernel has taken; with O_DIRECT too, for the disk's own cache.
        os.fdatasync(fd)

    in_order = _Pass(depth=_SEQUENTIAL_DEPTH, block_bytes=_BLOCK_BYTES, longest_s=pass_s)
    laid = in_order.run(write, range(0, size, _BLOCK_BYTES), settle).count * _BLOCK_BYTES
    blocks = range(0, laid, _BLOCK_BYTES)
    written = [in_order.run(write, blocks, settle).rate * _BLOCK_BYTES for _ in range(repetitions)]
    was_read: list[float] = []
    for _ in range(repetitions):
        _forget(fd, direct)
        was_read.append(in_order.run(read, blocks).rate * _BLOCK_BYTES)
    figures = [figure("write in order", "B/s", written), figure("read in order", "B/s", was_read)]
    places = list(range(0, laid, _SMALL_BYTES))
    for depth in (1, _RANDOM_DEPTH):
        scattered = _Pass(depth=depth, block_bytes=_SMALL_BYTES, longest_s=pass_s / 2)
        rates: list[float] = []
        for repetition in range(repetitions):
            _forget(fd, direct)
            random.Random(repetition).shuffle(places)
            rates.append(scattered.run(read, places).rate)
        figures.append(figure(f"random 4 KiB reads, {depth} at once", "1/s", rates))
    return tuple(figures)


@dataclass(frozen=True, slots=True)
class _Moved:
    """How many blocks were moved, and how many a second."""

    count: int
    rate: float


class _Pass:
    """Moves blocks, some at once, for so long at most."""

    def __init__(self, *, depth: int, block_bytes: int, longest_s: float) -> None:
        self._block_bytes = block_bytes
        self._longest_s = longest_s
        # Made once: neither their pages nor what they hold is what is measured.
        self._buffers = [huge_buffer(block_bytes) for _ in range(depth)]
        for buffer in self._buffers:
            # Disks, and what stands before them, are fast with zeros.
            buffer[:] = os.urandom(block_bytes)

    def run(self, step: _Step, places: Sequence[int], settle: Callable[[], None] = lambda: None) -> _Moved:
        """Takes the places once, in their order; with a time limit, the first of them.

        Args:
            step: moves the block at a place; returns how many bytes were moved.
            places: byte offsets of the blocks in the file.
            settle: function that waits until the moved bytes are where they belong; its time counts.
        """
        # `next` is atomic, so what was moved is the beginning of `places`, without gaps.
        left = iter(places)
        begun_s = time.perf_counter()

        def work(buffer: mmap.mmap) -> int:
            count = 0
            for at in left:
                if step(at, buffer) != self._block_bytes:
                    raise LaunchError(f"the disk moved less than was asked for at byte {at}", hint="is it full?")
                count += 1
                if time.perf_counter() - begun_s >= self._longest_s:
                    break
            return count

        with ThreadPoolExecutor(len(self._buffers)) as pool:
            count = sum(pool.map(work, self._buffers))
        settle()
        return _Moved(count, count / (time.perf_counter() - begun_s))


def _forget(fd: int, direct: bool) -> None:
    """Has the page cache let go of the file, where it has it."""
    if not direct:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
