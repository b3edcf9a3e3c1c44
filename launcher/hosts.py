"""Which hosts there are and how many workers each takes. Values only: nothing is contacted here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One host as the user described it.

    Attributes:
        name: how the user calls it, and how logs name it.
        slots: workers it takes.
        source: where it was described, `hostfile:3` or `this machine`, for messages.
    """

    name: str
    slots: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts of one job in rank order, after selection; never empty, every host has a slot."""

    hosts: tuple[HostSpec, ...]

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return sum(host.slots for host in self.hosts)
