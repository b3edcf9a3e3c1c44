"""Which settings of the section `aio` read and write a disk fastest, by the code that training uses. Prints nothing.

The file has a cap and no name, so nothing stays behind however the process ends. It is written once, uncounted:
training writes the same room again and again. Sizes and depths are tried first, then threads and how calls are cut,
then the fastest again and again in turns with the floor: one direct call of 16 MiB at a time, as dd makes them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dsrun.direct_io.buffers import huge_buffer
from dsrun.direct_io.extent_file import Extent, ExtentFile
from dsrun.direct_io.pending import PendingIo
from dsrun.direct_io.settings import IoSettings
from dsrun.errors import LaunchError
from dsrun.units import format_bytes

from .figure import LEAST_REPETITIONS, Figure, figure

_MIB = 1 << 20
#: What training moves at once is longer; two are under way.
_EXTENT_BYTES = 64 * _MIB
_LEAST_BYTES = 4 * _MIB
#: Of the free room; a full disk would stop other people's jobs.
_SHARE = 4
_BLOCKS = (_MIB // 4, _MIB, 4 * _MIB)
_DEPTHS = (4, 8, 32)
_THREADS = (2, 4)
_FINALISTS = 3
#: One that has less under way wins against one that is faster by no more than this share.
_AS_GOOD = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one setting did.

    Attributes:
        settings: settings that were tried.
        write: bytes a second.
        read: bytes a second that were read.
    """

    settings: IoSettings
    write: float
    read: float

    @property
    def both(self) -> float:
        """Bytes a second where as many are read as written, one after the other: what an optimizer step does."""
        return 2 / (1 / self.write + 1 / self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFigures:
    """One setting, several times.

    Attributes:
        settings: settings that were tried.
        write: rate of writes in bytes a second, over all repetitions.
        read: rate of reads in bytes a second, over all repetitions.
    """

    settings: IoSettings
    write: Figure
    read: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was found.

    Attributes:
        paths: folders that were written to, striped.
        file_bytes: bytes of all files together.
        direct: the page cache was left out in all of them.
        trials: trials, one for each setting, in the order in which they were made.
        best: the settings to take.
        floor: one call at a time on every path.
    """

    paths: tuple[str, ...]
    file_bytes: int
    direct: bool
    trials: tuple[Trial, ...]
    best: SettingFigures
    floor: SettingFigures


def sweep(paths: Sequence[str], *, size_bytes: int, seconds: float) -> Sweep:
    """Tries settings on files in `paths`.

    Args:
        paths: existing folders, striped over if there are several.
        size_bytes: bytes of all files together; fewer where a quarter of the free space in one of the folders is less.
        seconds: seconds that the measurement takes, about; the first write of the files comes on top.

    Raises:
        OffloadError: no file can be made in a path, or the disk fails.
        LaunchError: there is too little room to measure with.
    """
    size = min(size_bytes, *(_free_bytes(path) // _SHARE for path in paths))
    extent_bytes = min(_EXTENT_BYTES, size // 4 // _MIB * _MIB)
    if extent_bytes < _MIB:
        raise LaunchError(
            f"{paths[0]}: {format_bytes(size)} are too little to measure with; expected {format_bytes(_LEAST_BYTES)}",
            hint="make room, or name a larger `--size`",
        )
    file = ExtentFile(paths, IoSettings(), what="the measurement")
    try:
        extents = [file.reserve(f"extent {number}", extent_bytes) for number in range(size // extent_bytes)]
        file.allocate()
        lap = _Lap(file, extents, slice_s=seconds / _laps())
        lap.lay()
        trials = _search(lap.run)
        best, floor = _finals(lap.run, trials, IoSettings(block_bytes=16 * _MIB, queue_depth=1, threads=len(paths)))
        return Sweep(
            paths=tuple(paths),
            file_bytes=file.reserved_bytes,
            direct=file.is_direct,
            trials=tuple(trials),
            best=best,
            floor=floor,
        )
    finally:
        file.close()


_Run = Callable[[IoSettings], Trial]


def _search(run: _Run) -> list[Trial]:
    """Tries sizes and depths, then other ways to give the best of them to the disk."""
    trials = [run(IoSettings(block_bytes=block, queue_depth=depth)) for block in _BLOCKS for depth in _DEPTHS]
    best = max(trials, key=lambda trial: trial.both).settings
    return trials + [run(settings) for settings in _variants(best)]


def _variants(best: IoSettings) -> list[IoSettings]:
    threads = [replace(best, threads=count) for count in _THREADS]
    return [*threads, replace(best, overlap_events=False), replace(best, single_submit=True)]


def _finals(run: _Run, trials: Sequence[Trial], floor: IoSettings) -> tuple[SettingFigures, SettingFigures]:
    """Measures the fastest again, in turns with the floor: what disks do changes from one second to the next."""
    fastest = sorted(trials, key=lambda trial: trial.both, reverse=True)[:_FINALISTS]
    runs: dict[IoSettings, list[Trial]] = {trial.settings: [] for trial in fastest}
    runs[floor] = []
    for _ in range(LEAST_REPETITIONS):
        for settings, found in runs.items():
            found.append(run(settings))
    of_floor = _together(floor, runs.pop(floor))
    return choose([_together(settings, found) for settings, found in runs.items()]), of_floor


def choose(finalists: Sequence[SettingFigures]) -> SettingFigures:
    """Returns the fastest; of those that are as good, the one with the least under way."""

    def both(one: SettingFigures) -> float:
        return Trial(settings=one.settings, write=one.write.median, read=one.read.median).both

    enough = max(both(one) for one in finalists) * (1 - _AS_GOOD)
    return min((one for one in finalists if both(one) >= enough), key=lambda one: bytes_under_way(one.settings))


def bytes_under_way(settings: IoSettings) -> int:
    """Returns the bytes that are on their way at once, in one direction."""
    return settings.calls_at_once * settings.call_bytes


def _together(settings: IoSettings, found: Sequence[Trial]) -> SettingFigures:
    return SettingFigures(
        settings=settings,
        write=figure("write", "B/s", [trial.write for trial in found]),
        read=figure("read", "B/s", [trial.read for trial in found]),
    )


def _laps() -> int:
    """Returns how often settings are tried in all."""
    return len(_BLOCKS) * len(_DEPTHS) + len(_variants(IoSettings())) + LEAST_REPETITIONS * (_FINALISTS + 1)


class _Lap:
    """Writes and then reads with some settings, for about so long, whatever the disk does in that time."""

    def __init__(self, file: ExtentFile, extents: Sequence[Extent], *, slice_s: float) -> None:
        self._file = file
        self._extents = extents
        self._slice_s = slice_s / 2
        # Made once, with what no disk can shorten; two, for what is under way at once reads into memory of its own.
        self._buffers = [memoryview(huge_buffer(extents[0].nbytes)) for _ in range(2)]
        for buffer in self._buffers:
            for at in range(0, buffer.nbytes, _MIB):
                buffer[at : at + _MIB] = os.urandom(_MIB)

    def lay(self) -> None:
        """Writes all extents once."""
        for extent in self._extents:
            self._file.write(extent, self._buffers[0]).wait()

    def run(self, settings: IoSettings) -> Trial:
        self._file.retune(settings)
        written, write = self._move(self._file.write, self._extents)
        _, read = self._move(self._file.read, self._extents[:written])
        return Trial(settings=settings, write=write, read=read)

    def _move(self, start: Callable[[Extent, memoryview], PendingIo], extents: Sequence[Extent]) -> tuple[int, float]:
        """Moves extents in turns; returns how many different ones, and bytes a second."""
        under_way: deque[PendingIo] = deque()
        count, begun_s = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - begun_s < self._slice_s:
            if len(under_way) == len(self._buffers):
                under_way.popleft().wait()
            under_way.append(start(extents[count % len(extents)], self._buffers[count % len(self._buffers)]))
            count += 1
        for pending in under_way:
            pending.wait()
        rate = count * extents[0].nbytes / (time.perf_counter() - begun_s)
        return min(count, len(extents)), rate


def _free_bytes(path: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise LaunchError(
            f"{path}: cannot be measured: {error.strerror}", hint="name a folder you may write to"
        ) from error
    return stat.f_bavail * stat.f_frsize
