"""Where each unit's parameters, gradients and masters with states live, from sizes, room and the speeds of buses.

Pure: decides, predicts a step's time and says both as lines. Nothing is measured or moved here.

[Note: what fills the device] Room on the device goes first to what saves most seconds a step for a byte of it:
parameters save 2 G crossings of the bus back (G micro batches), masters with states save a pass of the host over them,
a gradient's way out and a parameter's way back. Within a kind the units that the forward uses first come first
(`dsrun.choices.resident_units`), so that the next forward begins while the host steps the later ones. What finds no
room goes to host memory, and then to a disk, as far as these are allowed.

[Note: the time of a step] The step's schedule is exact with clipping: the host's step begins when the norm is known and
runs beside the next forward. With F and B of forward and backward, a step takes
    max(B, out) + max(F, step on the host),
where out is the gradients' way to the host, and the host's step the longest of its pass over memory, the parameters'
way back, and what the disk reads and writes; the first unit's part of it comes before any forward. Parameters that are
streamed cross once in F and once in B of every micro batch. The step of what stays on the device is part of computing.
Source: runtime-performance.md, 2.2 (minimal bytes of each path) and 2.3 (schedule S2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from dsrun.choices.resident_units import units_that_stay
from dsrun.units import format_bytes, format_count, format_duration

Tier = Literal["device", "host", "disk"]
#: Bytes of an element of one kind in a tier.
_BytesIn = Callable[[Tier], float]
#: Forward is so much of a micro batch's computing; backward is the rest. Source: 2 and 4 operations a parameter.
_FORWARD = 1 / 3


@dataclass(frozen=True, slots=True)
class UnitSize:
    """One unit, and the elements of it that a rank updates; those of parameters are as many where they are sharded."""

    name: str
    numel: int
    has_module: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of an element.

    Attributes:
        parameter: bytes of a parameter in the format of forward.
        gradient: bytes of a gradient as it crosses the bus.
        master: off the device.
        master_here: bytes of a master on the device; 0 where parameters are the masters there.
        states: all of them.
        sum: bytes of a gradient sum, beside masters on the device; for all units where micro batches are added up
            there.
        adds_up: whether micro batches are added up on the device.
    """

    parameter: int
    gradient: int
    master: int
    master_here: int
    states: float
    sum: int
    adds_up: bool

    @property
    def owned(self) -> float:
        """What the device gives for an element whose masters stay, beyond what it gives for one that leaves."""
        return self.master_here + self.states + (0 if self.adds_up else self.sum)

    @property
    def host_pass(self) -> float:
        """What the host's step and the copies to and from it move in host memory."""
        return 2 * (self.master + self.states) + 2 * self.gradient + 2 * self.parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of a rank for what is placed; None: no limit.

    Attributes:
        device: bytes of room on the device, beyond what it needs with everything away; None for no limit.
        host: bytes of room in host memory; None for no limit.
        disk: bytes of room on the disk; None for no limit.
    """

    device: int | None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buses:
    """Measured speeds of a rank in bytes a second; None: not known, and what uses it is left out of a step's time.

    Attributes:
        out: bytes per second from the device to host memory; None where not known.
        back: bytes per second from host memory to the device; None where not known.
        host: bytes per second of the processor's step, reads and writes together; None where not known.
        disk_read: bytes per second read from the disk; None where not known.
        disk_write: bytes per second written to the disk; None where not known.
    """

    out: float | None = None
    back: float | None = None
    host: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None

    def line(self) -> str:
        """Returns them for people."""
        named = [
            ("to the host", self.out),
            ("back", self.back),
            ("step on the host", self.host),
            ("disk read", self.disk_read),
            ("disk write", self.disk_write),
        ]
        return ", ".join(f"{name} {speed / 1e9:.3g} GB/s" for name, speed in named if speed)


@dataclass(frozen=True, slots=True)
class AllowedTiers:
    """Tiers that each kind may be in, the first one wanted most; the last takes what has no room elsewhere."""

    parameters: tuple[Tier, ...] = ("device",)
    masters: tuple[Tier, ...] = ("device", "host")


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Where a unit lives between uses.

    Attributes:
        unit: unit that has this place.
        parameters: tier of the parameters.
        masters: tier of the masters and the optimizer states; gradients go to the device if these are there, otherwise
            to host memory.
    """

    unit: UnitSize
    parameters: Tier
    masters: Tier

    @property
    def gradients(self) -> Tier:
        """Where gradients are when they are stepped on."""
        return "device" if self.masters == "device" else "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, see [Note: the time of a step].

    Attributes:
        compute: forward and backward of all micro batches; None: not known.
        out: gradients, and new parameters of units that are stepped on the device, to host memory.
        back: parameters to the device, after the step.
        stream: parameters to the device, in forward and backward.
        host: the processor's pass over memory.
        disk: seconds of reads from and writes to the disk.
        first: the part of the host's step before the first unit is back.
    """

    compute: float | None
    out: float
    back: float
    stream: float
    host: float
    disk: float
    first: float

    @property
    def away(self) -> float:
        """The step on the host with all that it waits for."""
        return max(self.host, self.disk, self.back)

    @property
    def seconds(self) -> float:
        """A step; where computing is not known, as if it took no time."""
        compute = self.compute or 0.0
        forward = max(_FORWARD * compute, self.stream / 2)
        backward = max((1 - _FORWARD) * compute, self.stream / 2)
        return max(backward, self.out) + self.first + max(forward, self.away - self.first)

    @property
    def exposed(self) -> float:
        """What of a step is not computing."""
        return self.seconds - (self.compute or 0.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Every unit's place, and what a step takes with it."""

    places: tuple[UnitPlace, ...]
    bytes_of: ElementBytes
    buses: Buses
    step: StepTime

    @property
    def staying_numel(self) -> int:
        """Elements whose masters are on the device."""
        return sum(place.unit.numel for place in self.places if place.masters == "device")

    @property
    def ratio(self) -> float:
        """Share of the elements whose masters are not."""
        total = sum(place.unit.numel for place in self.places)
        return 1.0 - self.staying_numel / total if total else 0.0

    def bytes_in(self, tier: Tier) -> int:
        """Returns the bytes of parameters, masters, states and sums of a rank that the places put into a tier."""
        each = self.bytes_of
        total = 0.0
        for place in self.places:
            numel = place.unit.numel
            total += numel * each.parameter * (place.parameters == tier)
            master = each.master_here if tier == "device" else each.master
            total += numel * (master + each.states) * (place.masters == tier)
            sums_here = place.masters == "device" or each.adds_up
            total += numel * each.sum * (tier == "device" and sums_here)
            total += numel * each.gradient * (tier == "host" and place.masters != "device" and not each.adds_up)
        return round(total)

    def lines(self) -> list[str]:
        """Returns a table, one line for neighbours that live alike, and what a step takes."""
        rows: list[tuple[str, ...]] = [
            ("units", "elements", "parameters", "gradients", "masters, states", "bytes of these", "step on the host")
        ]
        each = self.bytes_of
        for _, group in groupby(self.places, key=lambda place: (place.parameters, place.masters)):
            members = list(group)
            one, count = members[0], len(members)
            numel = sum(place.unit.numel for place in members)
            names = one.unit.name if count == 1 else f"{one.unit.name} .. {members[-1].unit.name} ({count})"
            nbytes = numel * ((each.master_here if one.masters == "device" else each.master) + each.states)
            speed = self.buses.host if one.masters != "device" else None
            seconds = format_duration(numel * each.host_pass / speed) if speed else ""
            tiers = (one.parameters, one.gradients, one.masters)
            rows.append((names, format_count(numel), *tiers, format_bytes(nbytes), seconds))
        if not any(row[-1] for row in rows[1:]):
            rows = [row[:-1] for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return [*table, *self._step_lines()]

    def _step_lines(self) -> list[str]:
        step = self.step
        parts = [
            ("computing", step.compute),
            ("gradients out", step.out),
            ("step on the host", step.host),
            ("parameters back", step.back),
            ("parameters streamed", step.stream),
            ("disk", step.disk),
        ]
        told = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts if seconds)
        if not told:
            return []
        if step.compute is not None:
            return [f"a step: {format_duration(step.seconds)} predicted ({told})"]
        tail = f"; a forward of {format_duration(step.away)} or more hides the step on the host" if step.away else ""
        return [f"a step beside its computing: {told}{tail}"]


def place(
    units: Sequence[UnitSize],
    bytes_of: ElementBytes,
    budgets: Budgets,
    buses: Buses,
    *,
    allowed: AllowedTiers,
    micro_batches: int = 1,
    compute_s: float | None = None,
    staying: Sequence[bool] | None = None,
) -> Placement:
    """Decides where every unit lives, see [Note: what fills the device].

    Args:
        units: units in order of registration.
        bytes_of: an element's bytes.
        budgets: room of each tier; the last tier that is allowed takes the rest, whatever its room.
        buses: speeds; where one is not known, masters come before parameters.
        allowed: tiers of each kind.
        micro_batches: number of micro batches of one step.
        compute_s: seconds of forward and backward of a step; None: not known.
        staying: flag for each unit, whether its masters are on the device, where that is decided already; None where it
            is not.
    """
    left = _Room(budgets)
    parameters: list[Tier] = []
    masters: list[Tier] = []
    for kind in _order_of_kinds(bytes_of, buses, micro_batches):
        if kind == "parameters":
            parameters = _fill(units, allowed.parameters, left, lambda _: float(bytes_of.parameter))
        elif staying is not None:
            others: list[Tier] = [tier for tier in allowed.masters if tier != "device"]
            assert others or all(staying), "what does not stay has a tier to go to"
            masters = ["device" if stays else others[0] for stays in staying]
        else:
            masters = _fill(
                units,
                allowed.masters,
                left,
                lambda tier: bytes_of.owned if tier == "device" else bytes_of.master + bytes_of.states,
            )
    places = tuple(UnitPlace(*one) for one in zip(units, parameters, masters, strict=True))
    return Placement(places, bytes_of, buses, _step_time(places, bytes_of, buses, micro_batches, compute_s))


class _Room:
    """Bytes that are left in each tier."""

    def __init__(self, budgets: Budgets) -> None:
        self._left: dict[Tier, float | None] = {
            "device": budgets.device,
            "host": budgets.host,
            "disk": budgets.disk,
        }

    def elements(self, tier: Tier, element_bytes: float) -> int | None:
        left = self._left[tier]
        return None if left is None or not element_bytes else max(0, int(left // element_bytes))

    def take(self, tier: Tier, nbytes: float) -> None:
        left = self._left[tier]
        self._left[tier] = None if left is None else left - nbytes


def _order_of_kinds(
    bytes_of: ElementBytes, buses: Buses, micro_batches: int
) -> tuple[Literal["parameters", "masters"], ...]:
    """Returns which kind is given room on the device first, by seconds saved for a byte of it."""
    by_parameters = 2 * micro_batches / (buses.back or float("inf"))
    passed = bytes_of.host_pass / (buses.host or float("inf"))
    crossed = bytes_of.gradient / (buses.out or float("inf")) + bytes_of.parameter / (buses.back or float("inf"))
    by_masters = (passed + crossed) / (bytes_of.owned or 1.0)
    return ("parameters", "masters") if by_parameters > by_masters else ("masters", "parameters")


def _fill(units: Sequence[UnitSize], tiers: tuple[Tier, ...], room: _Room, bytes_in: _BytesIn) -> list[Tier]:
    """Returns each unit's tier for one kind: the first one with room."""
    found: list[Tier | None] = [None] * len(units)
    for tier in tiers:
        waiting = [index for index, one in enumerate(found) if one is None]
        elements = room.elements(tier, bytes_in(tier)) if tier != tiers[-1] else None
        numels = [units[index].numel for index in waiting]
        modules = [units[index].has_module for index in waiting]
        stays = [True] * len(waiting) if elements is None else units_that_stay(numels, modules, elements)
        for index, one in zip(waiting, stays, strict=True):
            if one:
                found[index] = tier
                # What can be nowhere but on the device is no part of the room there.
                if tiers != ("device",):
                    room.take(tier, units[index].numel * bytes_in(tier))
    return [tier or tiers[-1] for tier in found]


def _step_time(
    places: Sequence[UnitPlace],
    bytes_of: ElementBytes,
    buses: Buses,
    micro_batches: int,
    compute_s: float | None,
) -> StepTime:
    def seconds(nbytes: float, speed: float | None) -> float:
        return nbytes / speed if speed else 0.0

    away = [place for place in places if place.masters != "device"]
    numel = sum(place.unit.numel for place in away)
    gradient = bytes_of.sum if bytes_of.adds_up else bytes_of.gradient
    # New parameters of units that live off the device are written where they lie, or leave the device for there.
    returning = sum(place.unit.numel for place in away if place.parameters == "device")
    leaving = sum(one.unit.numel for one in places if one.masters == "device" and one.parameters != "device")
    streamed = sum(place.unit.numel for place in places if place.parameters != "device")
    on_disk = sum(place.unit.numel for place in away if place.masters == "disk") * (bytes_of.master + bytes_of.states)
    from_disk = sum(p.unit.numel for p in places if p.parameters == "disk") * bytes_of.parameter * 2 * micro_batches
    host = seconds(numel * bytes_of.host_pass, buses.host)
    begins = min(places, key=lambda place: place.unit.has_module, default=None)
    first = 0.0 if begins is None or begins.masters == "device" else begins.unit.numel / numel
    back = seconds(returning * bytes_of.parameter, buses.back)
    disk = seconds(on_disk + from_disk, buses.disk_read) + seconds(on_disk, buses.disk_write)
    return StepTime(
        compute=compute_s,
        out=seconds(numel * gradient + leaving * bytes_of.parameter, buses.out),
        back=back,
        stream=seconds(streamed * bytes_of.parameter * 2 * micro_batches, buses.back),
        host=host,
        disk=disk,
        first=first * max(host, disk, back),
    )
