"""All arenas of one engine by name, and what is in them: figures and a table. What they are for, their makers know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsrun.units import format_bytes

from .arena import Arena, ArenaUse, Tier, Zeros

_HEADS = ("arena", "dtype", "reserved", "in use", "high water", "holes")


@dataclass(frozen=True, slots=True)
class OutsideUse:
    """Long-lived memory that lies in no arena: why is in its name."""

    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """What one rank holds for long.

    Attributes:
        arenas: memory use of each arena, in the order in which the arenas were made.
        outside: long-lived memory that lies in no arena.
    """

    arenas: tuple[ArenaUse, ...]
    outside: tuple[OutsideUse, ...] = ()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory of all arenas together; what is on a disk takes none."""
        return self.bytes_in("device") + self.bytes_in("host")

    def bytes_in(self, tier: Tier) -> int:
        """Returns the bytes of all arenas of one tier."""
        return sum(use.reserved_bytes for use in self.arenas if use.tier == tier)

    def __str__(self) -> str:
        """Returns a table, one line an arena; those in host memory and on a disk last, with sums of their own."""
        away = [use for use in self.arenas if use.tier != "device"]
        rows = [_HEADS, *(_row(use) for use in self.arenas if use.tier == "device")]
        rows.append(_sum_row("all on the device" if away else "all arenas", self.bytes_in("device")))
        for tier, where in (("host", "in host memory"), ("disk", "on the disk")):
            uses = [use for use in away if use.tier == tier]
            rows += [_row(use) for use in uses]
            rows += [_sum_row(f"all {where}", sum(use.reserved_bytes for use in uses))] if uses else []
        rows += [(outside.name, "outside", "", format_bytes(outside.used_bytes), "", "") for outside in self.outside]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


class Arenas:
    """The arenas of one engine."""

    def __init__(self) -> None:
        self._arenas: dict[str, Arena] = {}

    def reserve(
        self,
        name: str,
        numel: int,
        zeros: Zeros,
        *,
        tier: Tier = "device",
        leaves: bool = False,
        apart: bool = False,
    ) -> Arena:
        """Makes an arena of `numel` elements, see `arena.room_for`; where `zeros` is a collective, on every rank.

        Args:
            name: name of the arena, which says what it is for.
            numel: elements.
            zeros: function that makes the arena's memory, and so decides its dtype and device; see `Arena`.
            tier: tier of the memory, for reports; see `Arena`.
            leaves: whether the memory may be put away and brought back; see `Arena`.
            apart: every view is an allocation of its own, made when it is taken, which `Arena.release` gives back.
        """
        if apart:
            return self._add(Arena(name, zeros, grows=True, tier=tier, leaves=leaves))
        return self._add(Arena(name, zeros, numel=numel, tier=tier, leaves=leaves))

    def growing(self, name: str, zeros: Zeros, *, tier: Tier = "device", leaves: bool = False) -> Arena:
        """Makes an arena for buffers that come and go; it has no memory until the first is wanted."""
        return self._add(Arena(name, zeros, grows=True, tier=tier, leaves=leaves))

    def drop(self, name: str) -> None:
        """Forgets an arena, whose memory goes with the last of its views; nothing where there is none of this name."""
        self._arenas.pop(name, None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the arenas."""
        return any(arena.holds(tensor) for arena in self._arenas.values())

    def takes_memory(self, tensor: Tensor) -> bool:
        """Whether there is memory behind a tensor: what lies on a disk has addresses alone."""
        return not any(arena.holds(tensor) for arena in self._arenas.values() if arena.tier == "disk")

    def named(self, beginning: str) -> list[Arena]:
        """Returns the arenas whose name begins so."""
        return [arena for name, arena in self._arenas.items() if name.startswith(beginning)]

    def compact(self) -> None:
        """See `Arena.compact`."""
        for arena in self._arenas.values():
            arena.compact()

    def report(self, outside: Sequence[OutsideUse] = ()) -> ArenaReport:
        """Returns what is in the arenas now, beside what the caller knows to lie outside of them."""
        return ArenaReport(tuple(arena.use() for arena in self._arenas.values()), tuple(outside))

    def _add(self, arena: Arena) -> Arena:
        assert arena.name not in self._arenas, f"there is an arena {arena.name} already"
        self._arenas[arena.name] = arena
        return arena


def _sum_row(name: str, nbytes: int) -> tuple[str, ...]:
    return (name, "", format_bytes(nbytes), "", "", "")


def _row(use: ArenaUse) -> tuple[str, ...]:
    sizes = (use.reserved_bytes, use.used_bytes, use.high_water_bytes, use.hole_bytes)
    return (use.name, use.dtype, *(format_bytes(size) for size in sizes))
