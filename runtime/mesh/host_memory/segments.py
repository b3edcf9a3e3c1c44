"""Memory that all ranks of one host see. No name is ever made for it, so a killed rank leaves nothing behind.

A segment is a memfd of the rank that owns it. The others open it through /proc before the descriptor is closed; from
then on it lives as long as somebody maps it, and its pages are counted where they are first written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from zlib import crc32

from dsrun.files.private import make_private_memory

#: What a rank tells the others, and what all of them told, in rank order; every rank must call.
Exchange = Callable[[Sequence[int]], list[list[int]]]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def find_hosts(exchange: Exchange) -> list[list[int]]:
    """Returns the ranks by host, that is: those that can map each other's memory, in ascending order.

    They have one kernel, one name space of processes and one user.

    Args:
        exchange: function that gives every rank the numbers of all ranks, see `Exchange`; called once.
    """
    try:
        with open(_BOOT_ID, "rb") as file:
            kernel = crc32(file.read())
        place = [kernel, os.stat("/proc/self/ns/pid").st_ino, os.geteuid(), 1]
    except OSError:
        # No /proc to find each other in.
        place = [0, 0, 0, 0]
    hosts: dict[tuple[int, ...], list[int]] = {}
    for rank, found in enumerate(exchange(place)):
        key = tuple(found) if found[-1] else (-1, rank)
        hosts.setdefault(key, []).append(rank)
    return list(hosts.values())


def share_memory(nbytes: int, exchange: Exchange) -> list[mmap.mmap]:
    """Makes one segment a rank.

    Args:
        nbytes: size of each, above 0; the same on every rank.
        exchange: function that gives every rank the numbers of all ranks, see `Exchange`; called twice.

    Returns:
        the segments of all ranks in rank order, zeroed, mapped for reading and writing.

    Raises:
        OSError: some rank could not make or map one; on every rank.
    """
    fd = -1
    failure: OSError | None = None
    try:
        fd = make_private_memory("dsrun")
        os.ftruncate(fd, nbytes)
    except OSError as error:
        failure = error
    offered = exchange([os.getpid(), fd if failure is None else -1])
    segments: list[mmap.mmap] = []
    try:
        if all(peer_fd >= 0 for _, peer_fd in offered):
            segments = [map_segment(pid, peer_fd, nbytes) for pid, peer_fd in offered]
    except OSError as error:
        failure = error
    everyone = exchange([len(segments)])
    if fd >= 0:
        os.close(fd)
    if any(mapped != [len(offered)] for mapped in everyone):
        raise failure or OSError("another rank of this host could not map shared memory")
    return segments


def map_segment(process: int, fd: int, nbytes: int) -> mmap.mmap:
    """Maps the segment that a process of this host has open.

    Args:
        process: id of the process.
        fd: the segment's descriptor in that process.
        nbytes: bytes of the segment.

    Raises:
        OSError: the process has ended, or has closed it.
    """
    opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)
