"""Memory of one block's size for what is between two operations: allocated once, so that it stays in the cache."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Buffers by name, each as large as the largest block that has asked for it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a buffer, [numel], holding whatever was left there; the same memory for the same name.

        Args:
            name: name of the buffer, which says what it is for; the same name gives the same memory.
            numel: elements.
            dtype: always the same for a name.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            self._buffers[name] = buffer = torch.empty(numel, dtype=dtype)
        assert buffer.dtype == dtype, f"scratch {name} is {buffer.dtype}, not {dtype}"
        return buffer[:numel]
