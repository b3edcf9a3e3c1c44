"""What staging memory is made of: pages that another process can map, huge ones where the kernel has any.

[Note: huge pages] A copy into pages of 4 KiB that were never touched costs several times what the copy costs, and page
tables cost a bit of every copy. So pages are asked for in this order, and all of them are touched once, by `touch`:
1. a file of huge pages (`MFD_HUGETLB`), where the administrator has reserved enough (`vm.nr_hugepages`);
2. else shared memory, with the wish for huge pages (`MADV_HUGEPAGE`), which the kernel grants where
   /sys/kernel/mm/transparent_hugepage/shmem_enabled is `advise`, `within_size` or `always`.
Memory that is not there is an error then, and no signal (SIGBUS) in the middle of a copy.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from dsrun.files.private import make_private_memory

#: Of a huge page; memory is reserved in multiples of it, whatever it is made of.
HUGE_BYTES = 2 << 20
_FREE_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_MFD_HUGE_2MB = 21 << 26
_MADV_POPULATE_WRITE = 23


class MemoryCalls(Protocol):
    """What is asked of the kernel; tests write it down."""

    def free_huge_pages(self) -> int:
        """Returns how many huge pages are reserved and free."""
        ...

    def create(self, flags: int) -> int:
        """Returns the descriptor of a new anonymous file."""
        ...

    def advise(self, memory: mmap.mmap, advice: int) -> None:
        """Tells the kernel how memory is used.

        Raises:
            OSError: it does not know this.
        """
        ...


class KernelCalls:
    """The kernel."""

    def free_huge_pages(self) -> int:
        """See `MemoryCalls`: none, where this kernel has no such pages."""
        try:
            return int(_FREE_HUGE_PAGES.read_text())
        except OSError:
            return 0

    def create(self, flags: int) -> int:
        """See `MemoryCalls`."""
        return make_private_memory("dsrun-staging", flags)

    def advise(self, memory: mmap.mmap, advice: int) -> None:
        """See `MemoryCalls`."""
        memory.madvise(advice)


class StagingMemory:
    """Memory that another process can map; see [Note: huge pages].

    Args:
        nbytes: least number of bytes to reserve; rounded up to a multiple of `HUGE_BYTES`.
        calls: calls of the kernel; None for the real ones.

    Attributes:
        descriptor: file descriptor by which another process maps the memory.
        nbytes: its size.
        image: the memory, uint8.

    Raises:
        OSError: there is not so much.
    """

    def __init__(self, nbytes: int, calls: MemoryCalls | None = None) -> None:
        self._kernel = KernelCalls() if calls is None else calls
        self.nbytes = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
        self._is_touched = False
        if self.nbytes <= self._kernel.free_huge_pages() * HUGE_BYTES:
            with suppress(OSError):  # somebody else has taken them meanwhile
                self._map(os.MFD_HUGETLB | _MFD_HUGE_2MB)
                return
        self._map(0)
        with suppress(OSError):  # a kernel without huge pages
            self._kernel.advise(self._memory, mmap.MADV_HUGEPAGE)

    def touch(self) -> None:
        """Has the kernel find all pages, the first time.

        Raises:
            OSError: there are not so many.
        """
        if self._is_touched:
            return
        try:
            self._kernel.advise(self._memory, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            for page in range(0, self.nbytes, mmap.PAGESIZE):  # before Linux 5.14
                self._memory[page] = self._memory[page]
        self._is_touched = True

    def close(self) -> None:
        """Lets go of the descriptor; the memory goes with its last mapping."""
        os.close(self.descriptor)

    def _map(self, flags: int) -> None:
        self.descriptor = self._kernel.create(flags)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            self._memory = mmap.mmap(self.descriptor, self.nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.image = torch.frombuffer(self._memory, dtype=torch.uint8)
