"""What is asked of the kernel for staging memory, and what becomes of a refusal."""

from __future__ import annotations

import errno
import mmap
import os

import pytest
import torch

from dsrun.runtime.checkpoint.format.host_copy import copy_bytes, idle_threads
from dsrun.runtime.checkpoint.staging.pages import HUGE_BYTES, StagingMemory

POPULATE_WRITE = 23


class Asked:
    """A kernel that notes what it is asked, has some huge pages, and may refuse."""

    def __init__(self, *, huge: int = 0, refuses: dict[int, int] | None = None, gives: bool = True) -> None:
        self.huge = huge
        self.refuses = refuses or {}
        self.gives = gives
        self.flags: list[int] = []
        self.advice: list[int] = []

    def free_huge_pages(self) -> int:
        return self.huge

    def create(self, flags: int) -> int:
        self.flags.append(flags)
        if flags and not self.gives:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return os.memfd_create("test", os.MFD_CLOEXEC)  # this machine need not have huge pages

    def advise(self, memory: mmap.mmap, advice: int) -> None:
        self.advice.append(advice)
        if advice in self.refuses:
            raise OSError(self.refuses[advice], "refused")
        memory.madvise(advice)


def test_memory_is_wished_for_in_huge_pages_and_touched_once() -> None:
    asked = Asked()
    memory = StagingMemory(HUGE_BYTES + 1, asked)
    assert memory.nbytes == 2 * HUGE_BYTES == memory.image.numel()
    assert (asked.flags, asked.advice) == ([0], [mmap.MADV_HUGEPAGE])
    memory.touch()
    memory.touch()
    assert asked.advice == [mmap.MADV_HUGEPAGE, POPULATE_WRITE]
    assert os.fstat(memory.descriptor).st_blocks * 512 >= memory.nbytes
    memory.close()


def test_huge_pages_are_taken_where_enough_are_reserved() -> None:
    asked = Asked(huge=2)
    StagingMemory(2 * HUGE_BYTES, asked).close()
    assert asked.flags == [os.MFD_HUGETLB | 21 << 26]
    assert mmap.MADV_HUGEPAGE not in asked.advice
    few = Asked(huge=1)
    StagingMemory(2 * HUGE_BYTES, few).close()
    assert few.flags == [0]
    taken = Asked(huge=2, gives=False)
    StagingMemory(2 * HUGE_BYTES, taken).close()
    assert taken.flags == [os.MFD_HUGETLB | 21 << 26, 0]


def test_an_older_kernel_is_no_obstacle_and_missing_memory_is_an_error() -> None:
    old = Asked(refuses={mmap.MADV_HUGEPAGE: errno.EINVAL, POPULATE_WRITE: errno.EINVAL})
    memory = StagingMemory(HUGE_BYTES, old)
    memory.touch()
    assert os.fstat(memory.descriptor).st_blocks * 512 == HUGE_BYTES
    memory.close()
    full = StagingMemory(HUGE_BYTES, Asked(refuses={POPULATE_WRITE: errno.ENOMEM}))
    with pytest.raises(OSError, match="refused"):
        full.touch()
    full.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_copy_every_byte_and_no_more(threads: int) -> None:
    values = torch.randint(0, 255, ((20 << 20) + 7,), dtype=torch.uint8)
    more = torch.arange(5.0)
    into = torch.zeros(values.numel() + 100, dtype=torch.uint8)
    copy_bytes([(into, values), (into[values.numel() + 9 :], more)], threads=threads)
    assert torch.equal(into[: values.numel()], values)
    assert torch.equal(into[values.numel() + 9 : values.numel() + 29], more.view(torch.uint8))
    assert not into[values.numel() : values.numel() + 9].any()
    assert not into[values.numel() + 29 :].any()


def test_ranks_that_share_all_cores_share_the_threads_that_copy() -> None:
    assert [idle_threads(cores, all_cores=8, ranks=4) for cores in (1, 2, 8)] == [1, 2, 2]
    assert idle_threads(64, all_cores=64, ranks=1) == 4
    assert idle_threads(2, all_cores=2, ranks=8) == 1
