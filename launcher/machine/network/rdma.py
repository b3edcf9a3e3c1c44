"""What of RDMA hosts of one job are compared by: working ports, and memory that may be locked for them. Reads files."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..limits import locks_without_limit
from .interfaces import RdmaDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaFacts:
    """A port that works.

    Attributes:
        card: name of its device.
        kind: see `RdmaDevice`.
        rate_gbit: of the link.
        gid_index: see `RdmaPort`.
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
        if card.may_open and port.state == "ACTIVE"
    )


def lockable_bytes(root: Path) -> int | None:
    """Returns how much memory this process may lock; None without limit.

    Args:
        root: `/`, or a made-up tree with proc/self.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or locks_without_limit(root) else soft
