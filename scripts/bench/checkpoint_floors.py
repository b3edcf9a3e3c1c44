"""What a disk and memory do at best for the bytes of a checkpoint: as many files, processes and bytes, as durable.

A floor of reading reads the checkpoint's own files, for a disk (or what is behind a virtual one) may be faster with
files it has just been given. Knows nothing of dsrun but that copy by several threads which is timed too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_STEP = 16 << 20
_PAGE = 4096
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def drop_cache(folder: Path) -> None:
    """Has the system forget the pages of a folder's files, so that reading reads."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def on_huge_pages(nbytes: int) -> Tensor:
    """Returns memory on huge pages where the kernel has any, that has been written before."""
    memory = mmap.mmap(-1, -(-nbytes // _STEP) * _STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def copying(flats: list[Tensor], into: Tensor) -> Callable[[], None]:
    """Returns what copies tensors one behind the other."""

    def copy() -> None:
        offset = 0
        for flat in flats:
            data = flat.view(torch.uint8)
            into[offset : offset + data.numel()].copy_(data)
            offset += data.numel()

    return copy


def copying_by_idle_cores(flats: list[Tensor], into: Tensor) -> Callable[[], None]:
    """Returns what does the same by as many threads as dsrun takes."""
    from dsrun.runtime.checkpoint.format.host_copy import copy_bytes, own_idle_threads

    def copy() -> None:
        copies, offset = [], 0
        for flat in flats:
            copies.append((into[offset:], flat))
            offset += flat.nbytes
        copy_bytes(copies, threads=own_idle_threads())

    return copy


def writing(path: Path, image: Tensor, nbytes: int, *, direct: bool) -> Callable[[], None]:
    """Returns what writes a new file and makes it durable: past the page cache, or by it with early write-back."""

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0))
        view = image.numpy().data[: nbytes // _PAGE * _PAGE]
        for first in range(0, len(view), _STEP):
            data = view[first : first + _STEP]
            assert os.pwrite(descriptor, data, first) == len(data), "the disk has room"
            if not direct:
                _libc.sync_file_range(
                    descriptor, ctypes.c_long(first), ctypes.c_long(len(data)), _SYNC_FILE_RANGE_WRITE
                )
        os.fsync(descriptor)
        os.close(descriptor)

    return write


def reading(path: Path, image: Tensor | None) -> Callable[[], None]:
    """Returns what reads a file past the page cache by one thread.

    Args:
        path: the file.
        image: tensor that receives the bytes; None for memory that was never touched, on pages as the kernel gives
            them.
    """

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        room = -(-os.fstat(descriptor).st_size // _STEP) * _STEP
        view = memoryview(mmap.mmap(-1, room)) if image is None else image.numpy().data
        first = 0
        while count := os.preadv(descriptor, [view[first : first + _STEP]], first):
            first += count
        os.close(descriptor)

    return read


def reading_through_cache(path: Path, image: Tensor) -> Callable[[], None]:
    """Returns what reads a file by the page cache, two blocks at a time."""

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        nbytes, view = os.fstat(descriptor).st_size, image.numpy().data

        def read_block(first: int) -> int:
            return os.preadv(descriptor, [view[first : first + _STEP]], first)

        with ThreadPoolExecutor(2) as pool:
            assert sum(pool.map(read_block, range(0, nbytes, _STEP))) == nbytes, "all of it is there"
        os.close(descriptor)

    return read
