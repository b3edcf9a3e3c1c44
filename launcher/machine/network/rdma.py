"""What of RDMA hosts of one job are compared by: the ports that work. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .interfaces import RdmaDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """A port that works.

    Attributes:
        card: name of its device.
        kind: kind of RDMA that the card does; None where no port says. See `RdmaDevice`.
        rate_gbit: rate of the link in Gbit/s; None where the kernel does not say.
        gid_index: index of the GID that NCCL takes in the port's table of addresses, None without one; see `RdmaPort`.
    """

    card: str
    kind: Literal["InfiniBand", "RoCE", "EFA"] | None
    rate_gbit: float | None
    gid_index: int | None


def rdma_facts(cards: Sequence[RdmaDevice]) -> tuple[RdmaFacts, ...]:
    """Returns the working ports of the cards that ranks may open, in order."""
    return tuple(
        RdmaFacts(card=card.name, kind=card.kind, rate_gbit=port.rate_gbit, gid_index=port.gid_index)
        for card in cards
        for port in card.ports
        if card.may_open and port.is_up
    )
