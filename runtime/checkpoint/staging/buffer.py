"""Memory in which a rank's file takes shape, shared with the process that writes it, and used again by every save.

Fresh pages cost several times what the copy costs, so the first save pays for them, and the later ones do not. What
the memory is made of stands in `pages.py`; what is copied when, in `sources.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...memory.host_pool import Say, why_pageable
from ...memory.page_lock import CannotLock, CudaLock, Lock, lock_until_gone
from ...protocols import StateEntry
from ..format.host_copy import copy_bytes
from ..format.plan import FilePlan, coalesce
from .pages import StagingMemory
from .sources import Copy

#: What goes from a device to the host at a time, where there is no staging memory.
_CHUNK_BYTES = 32 << 20

_log = logging.getLogger(__name__)


class PageLocks:
    """Page-locks images of tensors on CUDA, and says once why they stay pageable after all.

    Args:
        lock_for: locks for a device.
        say: function that reports the reason memory stays pageable; each rank reports for itself, since limits may
            differ.
    """

    def __init__(self, lock_for: Callable[[torch.device], Lock] = CudaLock, *, say: Say = _log.warning) -> None:
        self._lock_for = lock_for
        self._say = say
        self._was_refused = False

    def lock(self, image: Tensor, device: torch.device) -> Callable[[], object]:
        """Lets a device copy into memory at the speed of the bus; without it, it copies all the same.

        Args:
            image: all of the memory; it is unlocked when this tensor goes.
            device: device that copies into the memory.

        Returns:
            unlocks before, once.
        """
        if not self._was_refused:
            try:
                return lock_until_gone(image, self._lock_for(device))
            except CannotLock as reason:
                self._was_refused = True
                effect = "copies for checkpoints go at less than the bus's speed. Raise `ulimit -l`."
                self._say(why_pageable(image.nbytes, str(reason), effect=effect))
        return _nothing_to_unlock


class Staging:
    """Shared memory of one rank, page-locked where tensors lie on CUDA; grows, and never shrinks.

    Args:
        locks: page locks for the staging memory; None for new ones.
        module_of: function that returns torch's module for the type of a device, such as `torch.cuda`.

    Attributes:
        generation: another number whenever it is other memory.
    """

    def __init__(
        self,
        locks: PageLocks | None = None,
        *,
        module_of: Callable[[torch.device], Any] = torch.get_device_module,
    ) -> None:
        self.generation = 0
        self._module_of = module_of
        self._locks = PageLocks() if locks is None else locks
        self._memory: StagingMemory | None = None
        self._unlock: Callable[[], object] | None = None  # of the present memory, once it has been locked
        self._device: torch.device | None = None  # CUDA's, that copies to it
        self._streams: dict[torch.device, Any] = {}
        self._begun: dict[torch.device, Any] = {}

    @property
    def descriptor(self) -> int:
        """Of the memory, to be handed to the writer."""
        assert self._memory is not None, "memory is reserved before it is handed over"
        return self._memory.descriptor

    @property
    def nbytes(self) -> int:
        """Its size; 0 before the first save."""
        return 0 if self._memory is None else self._memory.nbytes

    def begin(self, header: bytes, nbytes: int, copies: Sequence[Copy]) -> None:
        """Reserves memory, and puts the header there; values are copied as they are now, or stay so until they are.

        Args:
            header: header bytes of the file.
            nbytes: bytes of the image in memory.
            copies: copies that will be made into the image.

        Raises:
            OSError: there is not so much memory.
        """
        devices = {copy.values.device for copy in copies if copy.values.device.type != "cpu"}
        if self._memory is None or nbytes > self._memory.nbytes:
            self.release()
            self._memory = StagingMemory(nbytes)
            self.generation += 1
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._image[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        # Copies on a stream of their own begin behind what the script's has been given by now.
        self._begun = {device: self._module_of(device).current_stream(device).record_event() for device in devices}

    def touch(self) -> None:
        """Has the kernel find the memory's pages, see `StagingMemory`, and page-locks them; each takes s a 10 GB, once.

        In any thread: where values are copied later, training goes on meanwhile.
        """
        assert self._memory is not None, "memory is reserved before it is touched"
        self._memory.touch()
        if self._device is not None and self._unlock is None:
            self._unlock = self._locks.lock(self._memory.image, self._device)

    def copy(self, copies: Sequence[Copy], *, threads: int) -> None:
        """Copies values to the memory; returns when they may change. In any thread.

        Args:
            copies: copies to make.
            threads: number of host threads that copy the values in host memory.
        """
        image = self._image
        copy_bytes([(image[c.at :], c.values) for c in copies if c.values.device.type == "cpu"], threads=threads)
        for device in {copy.values.device for copy in copies if copy.values.device.type != "cpu"}:
            module = self._module_of(device)
            if device not in self._streams:
                self._streams[device] = module.Stream(device)
            stream = self._streams[device]
            stream.wait_event(self._begun[device])
            # The device first: a stream's context goes back to the one of the thread's current device, which it makes.
            with module.device(device), module.stream(stream):
                for copy in copies:
                    if copy.values.device == device:
                        data = copy.values.detach().view(torch.uint8)
                        image[copy.at : copy.at + data.numel()].copy_(data, non_blocking=True)
            stream.record_event().synchronize()

    def release(self) -> None:
        """Gives the memory back, unlocked."""
        if self._unlock is not None:
            self._unlock()
        self._unlock = None
        if self._memory is not None:
            self._memory.close()
        self._memory = None

    @property
    def _image(self) -> Tensor:
        assert self._memory is not None, "memory is reserved before anything is copied to it"
        return self._memory.image


def copy_into(image: Tensor, plan: FilePlan, copies: Sequence[tuple[int, Tensor]]) -> None:
    """Makes a rank's file in memory; returns when the values may change again.

    Args:
        image: flat uint8 in host memory, as long as the file or longer.
        plan: plan of the file.
        copies: pairs of first byte in the file and flat values, as `coalesce` returns them for the plan.
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


def _nothing_to_unlock() -> None:
    """Of memory that stays pageable."""
