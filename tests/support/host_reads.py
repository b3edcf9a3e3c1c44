"""What the host reads of tensors, and whether it has said that it waits for other ranks in that."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from dsrun.runtime.mesh.loopback import LoopbackCollectives

#: Calls by which a host reads what a device has computed, and waits for it.
READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal"}


class NamedReads(LoopbackCollectives):
    """Keeps what the host says it reads, as long as it does."""

    def __init__(self, axis: LoopbackCollectives) -> None:
        super().__init__(axis._world, axis.rank)
        self.present: str | None = None

    @contextmanager
    def reading(self, label: str) -> Generator[None]:
        """See `Collectives`."""
        self.present = label
        yield
        self.present = None


class HostReads(TorchFunctionMode):
    """Notes every read of the host in this thread, and what it was said to be of; None where nothing was said."""

    def __init__(self, collectives: NamedReads) -> None:
        super().__init__()
        self.of: list[str | None] = []
        self._collectives = collectives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in READS:
            self.of.append(self._collectives.present)
        return func(*args, **(kwargs or {}))
