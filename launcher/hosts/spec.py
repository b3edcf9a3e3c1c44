"""Which hosts there are, how each is reached and how many workers it takes. Values only: nothing is contacted here."""

from __future__ import annotations

from dataclasses import dataclass, field

#: More ranks than this on one host are a typing error, not a machine.
MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One host as the user described it. JSON values of its fields make an equal one.

    Attributes:
        name: name of the host as the user writes it and as logs show it; IPv6 addresses keep their brackets.
        slots: workers it takes.
        source: place where the host was described, `hostfile:3` or `this machine`, for messages.
        port: port of the host's ssh server; None means the one that ssh itself would use.
        user: user to log in as; None means the one that ssh itself would use.
        addr: address to reach it by, without brackets; None means by its name.
        python: interpreter to run there; None means the same path as here.
        gpus: device ids of its slots in rank order, as many as slots; None means that nobody chose: slots count from 0.
        env: variables for the workers of this host alone.
    """

    name: str
    slots: int
    source: str
    port: int | None = None
    user: str | None = None
    addr: str | None = None
    python: str | None = None
    gpus: tuple[int, ...] | None = None
    env: dict[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        if self.gpus is not None:
            object.__setattr__(self, "gpus", tuple(self.gpus))  # JSON has lists only

    @property
    def slot_ids(self) -> tuple[int, ...]:
        """What `--include host:0,2` may name: the ids of `gpus`, or 0, 1, ... where none were given."""
        return tuple(range(self.slots)) if self.gpus is None else self.gpus

    @property
    def address(self) -> str:
        """What a connection is made to: `addr` or the name, IPv6 without brackets."""
        return self.addr or self.name.removeprefix("[").removesuffix("]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts of one job in rank order, after selection; never empty, every host has a slot."""

    hosts: tuple[HostSpec, ...]

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return sum(host.slots for host in self.hosts)
