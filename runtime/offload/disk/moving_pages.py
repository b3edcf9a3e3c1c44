"""Address space without memory, and pages of memory that move into it and out again, by the kernel's page tables.

[Note: frames]
Tensors that live on a disk have addresses for life, so that whoever holds a view of them holds it for good; but only a
few of them have memory at a time. That memory is a *frame*: pages that were touched once and then move to where they
are wanted, 0.1 ms for 192 MiB, with what they hold. Fresh pages each time would cost more than the disk does: 0.9 to
2.2 GB/s instead of 3.2 on the machine of docs/benchmarks.md. Where no frame is, an access ends the process: a wrong
number would be worse.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

from dsrun.errors import OffloadError

#: The kernel moves whole huge pages at once where both sides begin at a multiple of their size.
HUGE_BYTES = 2 << 20

_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [*[ctypes.c_void_p, ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mremap.restype = ctypes.c_void_p


class AddressSpace:
    """Addresses that begin at a multiple of `HUGE_BYTES` and have no memory.

    They are given back with the last memoryview of them.

    Args:
        nbytes: more than 0.

    Raises:
        OSError: the process may not have so many.
    """

    def __init__(self, nbytes: int) -> None:
        whole = nbytes + HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _libc.mmap(None, whole, _PROT_NONE, flags, -1, 0)
        if start == _FAILED:
            raise _last_error()
        self.address = -(-start // HUGE_BYTES) * HUGE_BYTES
        held = (ctypes.c_char * nbytes).from_address(self.address)
        weakref.finalize(held, _libc.munmap, start, whole)
        self._view = memoryview(held).cast("B")

    def view(self, start: int, nbytes: int) -> memoryview:
        """Returns addresses [start, start + nbytes), counted from the first; nothing is read or written."""
        return self._view[start : start + nbytes]

    def show_file(self, start: int, nbytes: int, fd: int, at: int) -> None:
        """Has bytes of a file be what lies from `start` on, both ways, by way of the page cache, until `empty`.

        Args:
            start: first byte in the space, a multiple of the page size.
            nbytes: number of bytes of the file.
            fd: the file.
            at: byte of the file, a multiple of the page.
        """
        flags = mmap.MAP_SHARED | _MAP_FIXED
        address = self.address + start
        _check(_libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, at) == address)
        _check(_libc.madvise(address, nbytes, mmap.MADV_DONTFORK) == 0)

    def empty(self) -> None:
        """Takes what files show out of the space; what was written there is the files' from here on."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _check(_libc.mmap(self.address, self._view.nbytes, _PROT_NONE, flags, -1, 0) == self.address)

    def was_touched(self, start: int, nbytes: int) -> bool:
        """Whether the page cache has any page of what a file shows there; else nobody has read or written it."""
        found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        _check(_libc.mincore(self.address + start, nbytes, found) == 0)
        return any(page & 1 for page in found)


class Frame:
    """Pages that move; where they were made while nobody has them.

    Args:
        memory: pages of a private mapping, which lives as long as the frame does; not page-locked.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._away: tuple[int, int] | None = None
        assert self._address % mmap.PAGESIZE == memory.nbytes % mmap.PAGESIZE == 0, "a frame is whole pages"
        # A child would share the pages, and what the disk writes into them could then end in the child's copy.
        _check(_libc.madvise(self._address, memory.nbytes, mmap.MADV_DONTFORK) == 0)

    def go_to(self, address: int, nbytes: int) -> None:
        """Moves the first pages to `address`, where there is no memory; they keep what they hold.

        Raises:
            OffloadError: the kernel cannot.
        """
        assert self._away is None, "the frame is elsewhere"
        _move(self._address, address, nbytes)
        self._away = (address, nbytes)

    def come_back(self) -> None:
        """Moves the pages back; where they were, there is no memory again."""
        assert self._away is not None, "the frame is here"
        address, nbytes = self._away
        _move(address, self._address, nbytes)
        self._away = None


def cut_frames(memory: memoryview, nbytes: int) -> list[Frame]:
    """Returns as many frames of `nbytes` as whole ones lie in `memory`; see `room_for_frames`."""
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_BYTES if memory.nbytes else 0
    size = _frame_size(nbytes)
    return [Frame(memory[at : at + size]) for at in range(start, memory.nbytes - size + 1, size)]


def room_for_frames(count: int, nbytes: int) -> int:
    """Returns the bytes to reserve for frames that may begin where huge pages do."""
    return count * _frame_size(nbytes) + HUGE_BYTES


def _frame_size(nbytes: int) -> int:
    unit = HUGE_BYTES if nbytes >= HUGE_BYTES else mmap.PAGESIZE
    return -(-nbytes // unit) * unit


def _move(source: int, target: int, nbytes: int) -> None:
    # DONTUNMAP: a hole could be filled by another thread's allocation before it is wanted again.
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _libc.mremap(source, nbytes, nbytes, flags, target) == _FAILED:
        error = _last_error()
        if error.errno == errno.EINVAL:
            raise OffloadError(
                "memory cannot be moved between addresses, which offload to a disk does with each unit",
                hint=f"Linux can from 5.7 on; this is {os.uname().release}",
            ) from error
        raise error
    _check(_libc.mprotect(source, nbytes, _PROT_NONE) == 0)


def _check(went_well: bool) -> None:
    if not went_well:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
