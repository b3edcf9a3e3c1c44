"""What an engine has moved so far, as numbers that stand still: between ranks, over the bus, to and from drives."""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.direct_io.counts import IoCounts

from ..memory.bus import BusCounts
from ..mesh.collectives import Traffic


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What this rank has moved since its engine was made, see `Engine.counters`.

    Attributes:
        collectives: Calls and bytes by kind of collective (`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`,
            ...); the bytes are those of the whole flat buffer. A kind that was not used counts 0.
        bus: Copies between the device and its host's memory, by direction and by what they carry.
        drives: Reads and writes of the optimizer states and parameters that are kept on drives.
    """

    collectives: Traffic
    bus: BusCounts
    drives: IoCounts

    def since(self, earlier: EngineCounters) -> EngineCounters:
        """Returns what was moved after `earlier` was taken.

        Args:
            earlier: Counters of the same engine.
        """
        return EngineCounters(
            self.collectives.since(earlier.collectives),
            self.bus.since(earlier.bus),
            self.drives.since(earlier.drives),
        )
