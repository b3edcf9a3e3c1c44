"""Memory in which a rank's file takes shape, shared with the process that writes it, and used again by every save.

Fresh pages cost several times what the copy costs, so the first save pays for them, and the later ones do not. What
the memory is made of stands in `staging_memory.py`; what is copied when, in `sources.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..protocols import StateEntry
from .host_copy import copy_bytes
from .plan import FilePlan, coalesce
from .sources import Copy
from .staging_memory import StagingMemory

#: What goes from a device to the host at a time, where there is no staging memory.
_CHUNK_BYTES = 32 << 20


class Staging:
    """Shared memory of one rank, page-locked where tensors lie on CUDA; grows, and never shrinks.

    Attributes:
        generation: another number whenever it is other memory.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._memory: StagingMemory | None = None
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
            header: of the file.
            nbytes: of the image.
            copies: what will be copied.

        Raises:
            OSError: there is not so much memory.
        """
        devices = {copy.values.device for copy in copies if copy.values.device.type != "cpu"}
        if self._memory is None or nbytes > self._memory.nbytes:
            self.release()
            self._memory = StagingMemory(nbytes)
            self.generation += 1
            if any(device.type == "cuda" for device in devices):
                lock_pages(self._memory.image)
        self._image[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        # Copies on a stream of their own begin behind what the script's has been given by now.
        self._begun = {device: _module(device).current_stream(device).record_event() for device in devices}

    def touch(self) -> None:
        """Has the kernel find the memory's pages; see `StagingMemory`."""
        assert self._memory is not None, "memory is reserved before it is touched"
        self._memory.touch()

    def copy(self, copies: Sequence[Copy], *, threads: int) -> None:
        """Copies values to the memory; returns when they may change. In any thread.

        Args:
            copies: what to copy.
            threads: of the host that copy what is in its memory.
        """
        image = self._image
        copy_bytes([(image[c.at :], c.values) for c in copies if c.values.device.type == "cpu"], threads=threads)
        for device in {copy.values.device for copy in copies if copy.values.device.type != "cpu"}:
            module = _module(device)
            stream = self._streams.setdefault(device, module.Stream(device))
            stream.wait_event(self._begun[device])
            with module.stream(stream):
                for copy in copies:
                    if copy.values.device == device:
                        data = copy.values.detach().view(torch.uint8)
                        image[copy.at : copy.at + data.numel()].copy_(data, non_blocking=True)
            stream.record_event().synchronize()

    def release(self) -> None:
        """Gives the memory back."""
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


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def lock_pages(image: Tensor) -> None:
    """Lets CUDA copy into memory at the speed of the bus; without it, it copies all the same."""
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(image.data_ptr(), image.numel(), 0)) == 0:
        weakref.finalize(image, runtime.cudaHostUnregister, image.data_ptr()).atexit = False
