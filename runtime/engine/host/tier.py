"""Host memory apart from the device, and the bus that leads there. What goes there, others decide."""

from __future__ import annotations

from dataclasses import dataclass

from ...memory.bus import Bus
from ...memory.host_pool import HostPool


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory apart from the device, and the way there.

    Attributes:
        pool: pool of host memory that copies read or write, page-locked where the config asks for it.
        bus: bus that carries gradients to the host and parameters back.
    """

    pool: HostPool
    bus: Bus

    def pool_of(self, *, copied: bool) -> HostPool:
        """Returns what makes memory: of the processor alone, which needs no page-locking, or that copies touch too."""
        return self.pool if copied else HostPool(None, say=_say_nothing)


def _say_nothing(line: str) -> None:
    """For memory of which there is nothing to say."""
