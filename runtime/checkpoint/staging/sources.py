"""Where the bytes of a rank's file come from: memory that is copied at once or later, or a file on a drive.

Pure arithmetic on a plan; nothing is copied or read here.

[Note: what is staged] The *image* is the memory that a writer reads. Where all state is in memory, it is the file, byte
for byte. What lies on a drive already is not brought into memory: the writer reads it there, so the image holds what is
left, without gaps, and *segments* say in which order the file is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from ...protocols import FileStretch, StateEntry
from ..format.plan import FilePlan, coalesce_by_unit

#: Returns where a flat tensor's bytes lie on a drive, in order; None where they are in memory.
OnDrive = Callable[[Tensor], Sequence[FileStretch] | None]
#: The number of what belongs to no unit and is copied later all the same: frozen parameters that are whole.
NO_UNIT = -1
#: What is smaller is copied at once, where nobody asks who changes it.
AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Values that are copied to the image.

    Attributes:
        at: byte of the image.
        values: flat.
        unit: number of the unit with the update that changes the values; None where they are copied at once.
    """

    at: int
    values: Tensor
    unit: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of the file, from the image or from another file.

    Attributes:
        at: byte of where they come from.
        nbytes: number of bytes in the segment.
        descriptor: descriptor of the file that the bytes come from; None where they come from the image.
    """

    at: int
    nbytes: int
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """See the module.

    Attributes:
        image_bytes: bytes that are staged in memory, the file's header included.
        copies: copies into the image.
        segments: segments of the file, in order; empty where the image is the file.
        last_byte: byte position in the file up to which a unit's data is read from drives, by the number of the unit.
    """

    image_bytes: int
    copies: tuple[Copy, ...]
    segments: tuple[Segment, ...]
    last_byte: dict[int, int]

    @property
    def units(self) -> set[int]:
        """Numbers of units that must not change yet when the save has begun."""
        return {copy.unit for copy in self.copies if copy.unit is not None} | set(self.last_byte)


def in_memory(values: Tensor) -> Sequence[FileStretch] | None:
    """An `OnDrive` of a rank that has no drive."""


def sources_of(
    plan: FilePlan, entries: Sequence[StateEntry], units: Sequence[int | None], *, later: bool, on_drive: OnDrive
) -> Sources:
    """Returns where the bytes of a planned file come from.

    Args:
        plan: plan of the file.
        entries: entries that the plan was made for.
        units: the number of the unit whose update changes each of them; None: nobody would wait. Empty: of none.
        later: copy what belongs to a unit when training goes on.
        on_drive: function that finds tensors that lie on a drive.
    """
    copies: list[Copy] = []
    segments = [Segment(0, len(plan.header))]
    last_byte: dict[int, int] = {}
    image = len(plan.header)
    for first, values, unit in coalesce_by_unit(plan, entries, units or [None] * len(entries)):
        found = on_drive(values)
        if found is None:
            copies.append(Copy(image, values, unit if later else None))
            segments.append(Segment(image, values.nbytes))
            image += values.nbytes
        else:
            segments += [Segment(stretch.at, stretch.nbytes, stretch.descriptor) for stretch in found]
            number = NO_UNIT if unit is None else unit
            last_byte[number] = max(last_byte.get(number, 0), first + values.nbytes)
    if image == plan.nbytes:
        segments.clear()
    return Sources(image, tuple(copies), tuple(_joined(segments)), last_byte)


def in_order_of_updates(units: Sequence[int | None], order: Sequence[int]) -> list[int]:
    """Returns the numbers of entries as they are best copied: what nobody waits for first, then by the next update.

    Args:
        units: the number of the unit of each entry.
        order: numbers of the units in the order of their updates; other units come last.
    """
    place = {unit: number for number, unit in enumerate(order)}
    last = len(place)
    keys = [-1 if unit is None else place.get(unit, last) for unit in units]
    return sorted(range(len(units)), key=keys.__getitem__)


def _joined(segments: Iterable[Segment]) -> Iterable[Segment]:
    """Yields segments, those that lie one behind the other as one."""
    at = end = 0
    for descriptor, group in groupby(segments, key=lambda segment: segment.descriptor):
        nbytes = 0
        for segment in group:
            if nbytes and segment.at != end:
                yield Segment(at, nbytes, descriptor)
                nbytes = 0
            at = at if nbytes else segment.at
            nbytes += segment.nbytes
            end = segment.at + segment.nbytes
        if nbytes:
            yield Segment(at, nbytes, descriptor)
