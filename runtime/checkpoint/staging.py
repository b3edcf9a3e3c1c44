"""Memory in which a rank's file takes shape, shared with the process that writes it, and used again by every save.

Fresh pages cost several times what the copy costs, so the first save pays for them, and the later ones do not.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..protocols import StateEntry
from .plan import FilePlan, coalesce

_PAGE_BYTES = 2 << 20
#: What goes from a device to the host at a time, where there is no staging memory.
_CHUNK_BYTES = 32 << 20


class Staging:
    """Shared memory of one rank, page-locked where tensors lie on CUDA; grows, and never shrinks.

    Attributes:
        descriptor: of the memory, to be handed to the writer.
        nbytes: its size.
        generation: another number whenever it is other memory.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.nbytes = 0
        self.generation = 0
        self._image: Tensor | None = None

    def fill(self, plan: FilePlan, entries: Sequence[StateEntry]) -> None:
        """Copies a rank's file into the memory; returns when the entries may change again.

        Args:
            plan: of the file.
            entries: what it was planned for.

        Raises:
            OSError: there is not so much memory.
        """
        copies = coalesce(plan, entries)
        image = self._reserve(plan.nbytes, locked=any(tensor.is_cuda for _, tensor in copies))
        copy_into(image, plan, copies)

    def _reserve(self, nbytes: int, *, locked: bool) -> Tensor:
        if self._image is not None and nbytes <= self.nbytes:
            return self._image
        self.release()
        self.nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        self.generation += 1
        self.descriptor = os.memfd_create("dsrun-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.nbytes)
        memory = mmap.mmap(self.descriptor, self.nbytes)
        self._image = torch.frombuffer(memory, dtype=torch.uint8)
        if locked:
            lock_pages(self._image)
        return self._image

    def release(self) -> None:
        """Gives the memory back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self.nbytes, self._image = -1, 0, None


def copy_into(image: Tensor, plan: FilePlan, copies: Sequence[tuple[int, Tensor]]) -> None:
    """Makes a rank's file in memory; returns when the values may change again.

    Args:
        image: flat uint8 in host memory, as long as the file or longer.
        plan: of the file.
        copies: what `coalesce` returns for it.
    """
    image[: len(plan.header)].copy_(torch.frombuffer(bytearray(plan.header), dtype=torch.uint8))
    for first, values in copies:
        data = values.detach().view(torch.uint8)
        image[first : first + data.numel()].copy_(data, non_blocking=True)
    for device in {tensor.device for _, tensor in copies if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def pieces_of(plan: FilePlan, entries: Sequence[StateEntry]) -> Iterator[memoryview]:
    """Yields the bytes of a rank's file in order, without a copy of what is on the CPU."""
    if plan.nbytes:
        yield memoryview(plan.header)
    for _, values in coalesce(plan, entries):
        data = values.detach().view(torch.uint8)
        if data.device.type == "cpu":
            yield data.numpy().data
        else:
            for start in range(0, data.numel(), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES].cpu().numpy().data


def lock_pages(image: Tensor) -> None:
    """Lets CUDA copy into memory at the speed of the bus; without it, it copies all the same."""
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(image.data_ptr(), image.numel(), 0)) == 0:
        weakref.finalize(image, runtime.cudaHostUnregister, image.data_ptr()).atexit = False
