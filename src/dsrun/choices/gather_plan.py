"""What stage 3 keeps gathered, and how the rest takes turns: for the runtime, which does so, and for plans of it.

Pure arithmetic on elements: no config, no tensors.

[Note: cells]
A unit has up to two *parts*: its trained parameters and the frozen ones of the same module. Parts that are gathered
together lie one behind the other in a *cell*; cells take turns in slots. A part with few elements may *stay*: a trained
one gets a cell and a slot of its own and is gathered once a step; a frozen one is not cut at all. A unit without a
module is needed for the whole forward and backward, so its cell never shares.

[Note: budgets]
The number of slots says how far gathering may run ahead: with k slots, k - 1 units lie ready or on their way while one
computes. It follows from how many elements may be gathered ahead, and is cut down until all slots together fit what may
be live at once. One slot is the least: a unit that is needed is gathered in any case.

[Note: turns of chunks]
Under a pipeline whose schedule takes all micro batches through one chunk after the other, chunks take turns: the cells
of a chunk are gathered together and lie in one set of slots. With three chunks or more on a rank there are two sets,
and the next chunk is gathered while one computes. With two chunks a second set would hold all that there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

NO_LIMIT = (1 << 63) - 1
#: Slots where nobody says how far to run ahead: one unit computes while the next one is on its way.
USUAL_SLOTS = 2
#: Where slices lie in host memory and the optimizer's masters on the device, new values leave it through so many
#: buffers, each of at most so many elements.
LEAVING_COUNT = 2
_LEAVING_NUMEL = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBudgets:
    """What a config allows, in elements; see [Note: budgets].

    Attributes:
        stay: a part with at most so many stays; 0 for none.
        stay_total: all trained and frozen parts that stay together have at most so many.
        ahead: gathered ahead of their use, though at least one unit; 0 for none, None for one unit of any size.
        live: largest number of elements in all slots at once; None for no limit.
    """

    stay: int = 0
    stay_total: int = NO_LIMIT
    ahead: int | None = None
    live: int | None = None


@dataclass(frozen=True, slots=True)
class UnitElements:
    """Elements of one unit's parts, gaps included, and with the padding that slices need.

    Attributes:
        numel: elements of the trained part, without the padding of its buffer.
        padded: elements of the padded buffer of the trained part.
        frozen: elements of the frozen part, without the padding of its buffer; 0 where there is no frozen part.
        frozen_padded: elements of the padded buffer of the frozen part; 0 where there is no frozen part.
        has_module: whether the unit may share slots.
    """

    numel: int
    padded: int
    frozen: int = 0
    frozen_padded: int = 0
    has_module: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """Parts that are gathered together, see [Note: cells].

    Attributes:
        unit: position of the unit.
        trained: the unit's trained part lies in it.
        frozen: its frozen part does.
        numel: elements.
        shares: whether the cell takes turns with others in shared slots; else it has a slot of its own.
    """

    unit: int
    trained: bool
    frozen: bool
    numel: int
    shares: bool


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots for the cells of a model.

    Attributes:
        slot_of: slot number of each cell, in order.
        numel: elements of each slot by its number: those of its largest cell.
    """

    slot_of: tuple[int, ...]
    numel: dict[int, int]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Turns of the units that are gathered.

    Attributes:
        slot_count: slots that cells share.
        ahead: units that are gathered ahead of their use, in the order of uses; where chunks take turns, none.
        sets: sets of slots where chunks take turns: 2 for a chunk that is gathered ahead, else 1; 0 where units do.
        cells: cells to gather, in the order of units; a unit's shared cell comes before the one that stays.
        slots: slot of each cell, and the elements of each slot.
    """

    slot_count: int
    ahead: int
    sets: int
    cells: tuple[Cell, ...]
    slots: SlotPlan

    @property
    def numel(self) -> int:
        """Elements of all slots together."""
        return sum(self.slots.numel.values())


@dataclass(frozen=True, slots=True)
class ResidentParts:
    """Which parts of a unit stay, see [Note: cells]."""

    trained: bool = False
    frozen: bool = False


def choose_staying(units: Sequence[UnitElements], budgets: GatherBudgets) -> list[ResidentParts]:
    """Returns which parts of each unit stay: small ones, in order, until their total is reached.

    Args:
        units: units in the order of registration.
        budgets: limits on gathering that the config sets, in elements.
    """
    left = budgets.stay_total
    answers: list[ResidentParts] = []
    for unit in units:
        trained = unit.has_module and 0 < unit.numel <= min(budgets.stay, left)
        left -= unit.numel if trained else 0
        frozen = 0 < unit.frozen <= min(budgets.stay, left)
        left -= unit.frozen if frozen else 0
        answers.append(ResidentParts(trained, frozen))
    return answers


def plan_gathering(units: Sequence[UnitElements], stays: Sequence[bool], budgets: GatherBudgets) -> GatherPlan:
    """Lets units take turns, see [Note: cells] and [Note: budgets].

    Args:
        units: units in the order of registration, which is also the order of their turns; without frozen parts that
            stay.
        stays: flags, one for each unit, that say whether its trained part stays gathered.
        budgets: limits on gathering that the config sets, in elements.
    """
    cells = tuple(_cells(units, stays))
    sharing = [cell.numel for cell in cells if cell.shares]
    count = USUAL_SLOTS
    if budgets.ahead is not None:
        units_ahead = max(1, budgets.ahead // max([1, *sharing])) if budgets.ahead else 0
        count = max(1, min(1 + units_ahead, len(sharing)))
    plan = _with_slots(cells, count)
    while plan.slot_count > 1 and budgets.live is not None and plan.numel > budgets.live:
        plan = _with_slots(cells, plan.slot_count - 1)
    return plan


def sets_of_chunks(chunks: int) -> int:
    """Returns how many chunks of a rank have memory at once, see [Note: turns of chunks].

    Args:
        chunks: chunks of a rank.
    """
    return 1 if chunks <= USUAL_SLOTS else USUAL_SLOTS


def plan_chunks(
    units: Sequence[UnitElements], stays: Sequence[bool], chunk_of: Sequence[int | None], budgets: GatherBudgets
) -> GatherPlan:
    """Lets the chunks of a rank take turns, see [Note: turns of chunks].

    Args:
        units: units in the order of registration, without frozen parts that stay.
        stays: flags, one for each unit, that say whether its trained part stays gathered.
        chunk_of: position of each unit's chunk among those of the rank; None for one that several of them use, or
            several stages: it stays.
        budgets: limits on gathering that the config sets, in elements.
    """
    cells = tuple(
        replace(cell, shares=cell.shares and chunk_of[cell.unit] is not None) for cell in _cells(units, stays)
    )
    chunks = [chunk_of[cell.unit] if cell.shares else None for cell in cells]
    sets = 1 if budgets.ahead == 0 else sets_of_chunks(len({*chunk_of} - {None}))
    plan = _with_sets(cells, chunks, sets)
    if sets > 1 and budgets.live is not None and plan.numel > budgets.live:
        plan = _with_sets(cells, chunks, 1)
    return plan


def slots_of_chunks(numels: Sequence[int], chunk_of: Sequence[int | None], sets: int) -> tuple[int, ...]:
    """Gives the largest buffers of each chunk of a set one slot, the second largest ones the next, and so on.

    Args:
        numels: elements of each buffer.
        chunk_of: position of the chunk of each; None for one that needs a slot of its own.
        sets: sets of slots that chunks take turns in.

    Returns:
        number of the slot of each.
    """
    of_chunk: dict[int, list[int]] = defaultdict(list)
    for position in sorted(range(len(numels)), key=lambda position: -numels[position]):
        if (chunk := chunk_of[position]) is not None:
            of_chunk[chunk].append(position)
    shared = sets * max(map(len, of_chunk.values()), default=0)
    slot_of = {
        position: sets * number + chunk % sets
        for chunk, positions in of_chunk.items()
        for number, position in enumerate(positions)
    }
    return tuple(slot_of.get(position, shared + position) for position in range(len(numels)))


def leaving_numel(numel: int) -> int:
    """Returns the elements of each buffer through which new values of slices leave the device.

    Args:
        numel: elements of the largest slice.
    """
    return min(numel, _LEAVING_NUMEL)


def plan_slots(numels: Sequence[int], shares: Sequence[bool], *, count: int) -> SlotPlan:
    """Puts the i-th of those that share into slot i mod `count`, and each other one into a slot of its own.

    Args:
        numels: elements of each.
        shares: False for one that needs a slot of its own.
        count: shared slots.
    """
    slot_of: list[int] = []
    numel: dict[int, int] = {}
    sharing = 0
    for position, (size, shared) in enumerate(zip(numels, shares, strict=True)):
        slot = sharing % count if shared else count + position
        sharing += shared
        slot_of.append(slot)
        numel[slot] = max(numel.get(slot, 0), size)
    return SlotPlan(tuple(slot_of), numel)


def _cells(units: Sequence[UnitElements], stays: Sequence[bool]) -> Iterator[Cell]:
    for position, (unit, stay) in enumerate(zip(units, stays, strict=True)):
        frozen = unit.frozen > 0
        trained = not stay and (unit.numel > 0 or not frozen)
        if trained or frozen:
            numel = trained * unit.padded + frozen * unit.frozen_padded
            yield Cell(position, trained, frozen, numel, unit.has_module)
        if stay:
            yield Cell(position, trained=True, frozen=False, numel=unit.padded, shares=False)


def _with_slots(cells: tuple[Cell, ...], count: int) -> GatherPlan:
    slots = plan_slots([cell.numel for cell in cells], [cell.shares for cell in cells], count=count)
    return GatherPlan(count, count - 1, 0, cells, slots)


def _with_sets(cells: tuple[Cell, ...], chunks: Sequence[int | None], sets: int) -> GatherPlan:
    slots = slots_of_chunks([cell.numel for cell in cells], chunks, sets)
    numel: dict[int, int] = {}
    for cell, slot in zip(cells, slots, strict=True):
        numel[slot] = max(numel.get(slot, 0), cell.numel)
    shared = {slot for slot, cell in zip(slots, cells, strict=True) if cell.shares}
    return GatherPlan(len(shared), 0, sets, cells, SlotPlan(slots, numel))
