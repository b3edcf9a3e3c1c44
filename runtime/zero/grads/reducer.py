"""Gradients of one backward, unit by unit: made ready, summed over ranks, added to the owned range.

Knows nothing of parameters' memory or of the optimizer.

[Note: order of reductions]
All ranks must enter the same collectives in the same order, whatever their graphs look like. So units are reduced in
one canonical order, the reverse of rank 0's first forward: a unit whose gradients are complete waits for those before
it, and a unit that this rank's forward did not use contributes zeros. What is left is reduced when the backward has
ended.

[Note: reduce every micro step]
Gradients are reduced after every micro step and accumulated in fp32, at every stage. Accumulating before reducing would
save traffic at stages 0 and 1, but sums in another order, and the stages would no longer agree bit for bit.
See docs/decisions/0004-reduce-every-micro-step.md. A script may ask for it (`engine.no_sync`): where every unit has a
buffer of its own, gradients of such a micro step *stay* there, in the parameters' dtype, and the next reduction takes
their sum.

[Note: reduce once an update]
The other policy: gradients are summed up in fp32 on each rank (`local_sums.py`), and one reduction an update takes the
sums. Stages of ZeRO agree bit for bit under it too, but not with the first policy. Under a pipeline a chunk's backward
is a micro step of its units alone, and each micro batch takes one for every chunk.
See docs/decisions/0068-reduce-once-an-update.md.

[Note: scale of a micro step]
A backward of the script's own runs on its loss as it is, where the engine's runs on the loss divided by the
accumulation steps. Its gradients are divided when they are added to the sums, in fp32: this reaches all of them,
whatever way they came. Where the divisor is a power of two, the bits are those of the engine's backward.

[Note: strays]
A parameter has a `.grad` only while its unit's buffer is open: what the buffer holds before and after is no gradient of
it, and a script finds None. So a gradient that comes at another time shows. A *stray* that comes before its unit is
open is added when it is: a loss that a block keeps beside its output has such gradients. One that comes after its
unit's reduction is an error, and so is every stray where the parameters need not have been there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from dsrun.errors import ModelError

from ...memory.arena import room_for
from ...memory.arenas import Arenas
from ...mesh.collectives import Collectives, Pending, own_slice
from ..params.slots import allocate_slots, in_dtype
from ..units.unit import ParamUnit, zeros_for
from .local_sums import FurtherUses, LocalSums
from .sums import GradSums, ResidentSums
from .unused import UnusedParameters


class _Phase(Enum):
    IDLE = auto()  # nothing of this micro step yet
    OPEN = auto()  # zeroed when opened; autograd accumulates into it
    COMPLETE = auto()  # nothing more will come; waits for its turn
    REDUCING = auto()  # the collective is under way
    DONE = auto()  # added to the owned range


@dataclass(slots=True)
class _Progress:
    """Where one unit's gradient is.

    Attributes:
        slot: number of the buffer it was given.
        home: memory of the gradient buffer that the unit was given.
        own: part of `home` that this rank owns.
        flat: memory that holds the gradient now: `home`, or other memory while another unit needs the slot.
        sent: tensor that is being reduced: `flat`, or a copy of it in the wire's dtype.
    """

    slot: int
    home: Tensor
    own: Tensor
    flat: Tensor
    sent: Tensor
    phase: _Phase = _Phase.IDLE
    pending: Pending | None = None


@dataclass(slots=True)
class _Staging:
    """Memory in the wire's dtype, and the unit whose reduction used it last."""

    memory: Tensor
    holder: ParamUnit | None = None


#: One is filled while another travels.
_STAGING_COUNT = 2


class GradReducer:
    """Reduces the gradients of all units once a micro step, see [Note: order of reductions].

    Args:
        units: all units; their gradients are bound here, to buffers of their own or to slots. Each is summed over its
            own `replicas`, and divided as it says.
        collectives: ranks that have the same units, and reduce them in the same order.
        shard_optimizer: False: every rank owns the whole sum; True: each its slice.
        shard_gradients: False: a buffer a unit; True: slots, see [Note: slots].
        slot_count: slots that the units with modules share.
        comm_dtype: dtype in which gradients travel and are added up over the ranks, of units that have none of their
            own; None for that of parameters. Another one costs two buffers of the size of the largest such unit, and a
            copy; there is one other at most.
        sums: sums that reduced gradients are added to; None: the units' `grad_sum`s.
        sums_early: whether gradients go to `sums` as soon as they are reduced and the next reduction has begun, for
            work on them meanwhile. Otherwise they go when their memory is wanted, at the latest at the end.
        memory: arenas that the buffers are reserved in; None: in arenas of their own.
        notes_unused: note which parameters get no gradient; else nobody knows.
        once_an_update: whether gradients are reduced once an update, see [Note: reduce once an update]; False: after
            every micro step.
        chunk_of: chunks of the units where these take turns, see `LocalSums`.
        uses: further uses of parameters, whose gradients are summed up apart; None: there are none. Of units whose
            gradients are reduced once an update, or that no other rank has.

    Attributes:
        sums: sums that reduced gradients are added to: those of the argument, or the units' `grad_sum`s.
        unused: the parameters without a gradient in this global batch; None: nobody notes them.
        has_sums: a backward has added gradients to the owned ranges since they were last forgotten.
        takes_strays: parameters are always there, so strays are right; see [Note: strays].
        used_factor: factor by which the sums are to be multiplied to be what the last step used; None: they have been
            written over since, or by the step, or there was none.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        collectives: Collectives,
        *,
        shard_optimizer: bool,
        shard_gradients: bool,
        slot_count: int = 2,
        comm_dtype: torch.dtype | None = None,
        sums: GradSums | None = None,
        sums_early: bool = False,
        memory: Arenas | None = None,
        notes_unused: bool = True,
        once_an_update: bool = False,
        chunk_of: Mapping[int, int] | None = None,
        uses: FurtherUses | None = None,
    ) -> None:
        self._uses = uses
        self.sums: GradSums = ResidentSums(units) if sums is None else sums
        sums_here = sums is None
        memory = Arenas() if memory is None else memory
        first = units[0].params[0] if units else torch.empty(0)  # no unit, no gradient
        zeros = zeros_for(units, collectives)
        count = slot_count if shard_gradients else len(units)
        placed = allocate_slots(
            units,
            count=count,
            reserve=lambda n, label: memory.reserve(
                ("gradient slots" if shard_gradients else "gradients")
                + ("" if label == first.dtype else in_dtype(label)),
                n,
                lambda numel: zeros(numel, dtype=label, device=first.device),
            ),
        )
        for unit, (_, home) in zip(units, placed, strict=True):
            unit.bind_grads(home)
        self._units = list(units)
        self.unused = UnusedParameters(self._units, collectives) if notes_unused else None
        self._canonical: list[ParamUnit] = []
        self._collectives = collectives
        self._shard_optimizer = shard_optimizer
        self._progress = [
            _Progress(slot=number, home=home, own=self._own(unit, home), flat=home, sent=home)
            for unit, (number, home) in zip(units, placed, strict=True)
        ]
        self._staging: list[_Staging] = []
        wires = {unit.index: unit.comm_dtype or comm_dtype or unit.dtype for unit in units}
        # Those of a unit that this rank alone has travel no further, and yet in the dtype of all others: whoever takes
        # them expects one dtype.
        staged = [unit for unit in units if wires[unit.index] != unit.dtype and collectives.size > 1]
        self._staged = {unit.index for unit in staged}
        if staged:
            (other,) = {wires[unit.index] for unit in staged}
            largest = max(unit.layout.padded_numel for unit in staged)
            staging = memory.reserve(
                "wire staging",
                room_for([largest] * _STAGING_COUNT),
                lambda numel: zeros(numel, dtype=other, device=first.device),
            )
            self._staging = [_Staging(staging.take(largest)) for _ in range(_STAGING_COUNT)]
        # Ranks move out what their own graphs make them, so this memory cannot be made together, and is not shared.
        # A unit of another dtype has no module, and so a slot to itself: it never moves out.
        self._moved_out = memory.growing(
            "moved-out gradients", lambda numel: torch.zeros(numel, dtype=first.dtype, device=first.device)
        )
        # Gradients of a unit that no other rank has go into the sum at once, without traffic: but where autograd sums
        # them up by itself, or where sums go elsewhere, which all come in one dtype.
        keeps = once_an_update and sums_here and not shard_gradients
        shared = [unit for unit in units if once_an_update and unit.replicas.size > 1]
        alone = [unit for unit in units if keeps and unit.dtype == torch.float32 and unit.replicas.size == 1]
        local = units if shared and not sums_here else [*shared, *alone]
        self._local = LocalSums(
            local, in_place=sums_here, keeps=keeps, device=first.device, memory=memory, chunk_of=chunk_of
        )
        self._comm_dtype = comm_dtype
        self._once: list[tuple[ParamUnit, Tensor, Pending]] = []  # reductions of sums that are under way
        self._may_stay = not shard_gradients and not once_an_update
        self._stays = False  # what this micro step finds is not reduced yet
        self._scale = 1.0  # of this micro step's gradients, see [Note: scale of a micro step]
        self._unreduced: set[int] = set()  # units whose buffer holds gradients of earlier micro steps
        self._used: set[int] = set()
        self._turn: list[ParamUnit] = []  # units of this micro step, in the order of reductions
        self._begun: set[int] = set()  # units with a sum in this global batch
        self._had_sums = False  # when this micro step began
        self._cursor = 0
        self._summed = 0  # how many units of the canonical order are known to be added, where that is done early
        self._sums_early = sums_early
        self._holder: dict[int, ParamUnit] = {}
        self._readers: dict[int, Pending] = {}  # of slots: what their last gradient is being read by
        self.has_sums = False
        self.is_torn = False  # sums have a part of a micro step that failed, or lack one that did not; see `abandon`
        self.takes_strays = True
        self.used_factor: float | None = None

    def canonical_order(self) -> list[ParamUnit]:
        """Returns the units in the order of reductions, the same on every rank; none before the first backward."""
        return list(self._canonical)

    @property
    def bytes_summed_here(self) -> int:
        """Bytes of the sums of whole units that wait for one reduction an update, beside all other sums."""
        return self._local.nbytes

    def summed_here(self) -> list[Tensor]:
        """Returns the buffers of these sums; not to be written to."""
        return self._local.buffers()

    @property
    def has_unreduced(self) -> bool:
        """Whether there are gradients of earlier micro steps that no reduction has taken."""
        return (
            bool(self._unreduced or self._once)
            or self._local.has_any
            or (self._uses is not None and self._uses.has_any)
        )

    @property
    def has_strays(self) -> bool:
        """Whether a backward has left gradients that no micro step has taken; between micro steps."""
        return any(unit.has_grads for unit in self._canonical or self._units)

    def begin(
        self,
        *,
        order: Callable[[], Sequence[ParamUnit]],
        used: Sequence[ParamUnit],
        units: Collection[int] | None = None,
        reduce: bool = True,
        scale: float = 1.0,
        strays: float | None = 1.0,
    ) -> None:
        """Begins a micro step's backward; the first time, all ranks take over rank 0's order (one broadcast).

        Args:
            order: function that returns the units in the order of their first forward on this rank; called only the
                first time. Frozen units are left out.
            used: units that can get gradients on this rank.
            units: numbers of the units that the micro step is one of; the same on all ranks that have them. None: all.
            reduce: False: the gradients may stay where they are until a later reduction; on all ranks alike.
            scale: factor that gradients are multiplied by when they are added, see [Note: scale of a micro step].
            strays: factor that gradients which exist already are multiplied by before `scale`, see [Note: strays];
                None: they are refused.

        Raises:
            ModelError: see `abandon`; or there are strays, which cannot be told from others.
        """
        if self.is_torn:
            raise ModelError(
                "engine.backward: the last one failed in the middle of a global batch, and left the gradients of "
                "earlier micro batches with a part of its own, or without theirs",
                hint="call engine.zero_grad() and take the global batch from its first micro batch again",
            )
        self._stays = not reduce and self._may_stay
        self.used_factor = None
        if not self._canonical:
            self._canonical = self._agree_on_order([unit for unit in order() if unit.trains])
        self._turn = [unit for unit in self._canonical if units is None or unit.index in units]
        self._had_sums = self.has_sums or self._local.has_any
        self._used = {unit.index for unit in used}
        if self.unused is not None:
            self.unused.begin()
        self._scale_strays(strays)
        self._scale = scale
        if scale != 1.0:
            for index in self._unreduced:  # they are multiplied with those of this micro step
                self._progress[index].flat.mul_(1.0 / scale)
            self._local.divide_kept(scale)
        self._advance()

    def lend(self, unit: ParamUnit) -> None:
        """Lets a backward that does not count put its gradients into the unit's buffer, until they are dropped."""
        if unit.trains and not self._holds_sum(unit):
            self._wait_readers(self._progress[unit.index].slot)
            unit.attach_grads()

    def open(self, unit: ParamUnit, *, is_there: bool = False) -> None:
        """Makes the unit's gradient buffer ready, zeroed; called before its first gradient of this micro step.

        Nothing to do for a unit that is frozen.

        Args:
            unit: the unit.
            is_there: strays are right though parameters are not always there: its own have been since its forward.

        Raises:
            ModelError: the unit has been reduced in this micro step, for no gradient of it was to come; or see
                [Note: strays].
        """
        if not unit.trains:
            return
        progress = self._progress[unit.index]
        if progress.phase in (_Phase.REDUCING, _Phase.DONE):
            raise ModelError(
                f"model: the backward goes through a forward of `{unit.name}` from before the last engine.step(), or "
                "one that a backward has gone through already",
                hint="call backward before engine.step(), with retain_graph=True but for the last one of a forward; "
                "detach() what is kept from step to step",
            )
        if progress.phase is _Phase.OPEN:
            return
        if progress.phase is _Phase.IDLE:
            holder = self._holder.get(progress.slot)
            if holder is not None:
                self._vacate(holder)
            self._wait_readers(progress.slot)
            if not self._holds_sum(unit):
                unit.flat_grad.zero_()
            self._holder[progress.slot] = unit
            unit.begin_to_look()
        progress.phase = _Phase.OPEN
        if not unit.has_grads:
            unit.attach_grads()
        elif self.takes_strays or is_there:
            unit.attach_and_add_grads()
        else:
            _refuse_stray(unit, "outside of the backward of its forward, where stage 3 has not gathered it")

    def complete(self, unit: ParamUnit) -> None:
        """Says that no more gradient of `unit` comes in this micro step; it is reduced when it is its turn."""
        if not unit.trains:
            return
        progress = self._progress[unit.index]
        if progress.phase is _Phase.OPEN:
            unit.detach_grads()
            progress.phase = _Phase.COMPLETE
            self._advance()

    def finish(self) -> None:
        """Ends the micro step: reduces what is left, with zeros for units without a gradient, and accumulates all.

        Raises:
            ModelError: a gradient came after its unit's reduction, see [Note: strays].
        """
        for unit in self._turn:
            if self._progress[unit.index].phase is _Phase.IDLE and unit.has_grads:
                self.open(unit)
            self.complete(unit)
        self._used.clear()
        self._advance()
        if self._stays:
            self._unreduced |= {number for number, p in enumerate(self._progress) if p.phase is not _Phase.IDLE}
            if self._scale != 1.0:
                for index in self._unreduced:
                    self._progress[index].flat.mul_(self._scale)
        else:
            for unit in self._turn:
                self._accumulate(unit)
            self._unreduced.clear()
            self.has_sums = self.has_sums or bool(self._begun)
        if self._uses is not None:
            self._uses.take(self._scale)
        for progress in self._progress:
            progress.phase = _Phase.IDLE
        self._cursor = self._summed = 0
        self._holder.clear()
        for unit in self._turn:
            if unit.has_grads:
                _refuse_stray(unit, "after the backward of its forward had ended")

    def reduce_unreduced(self, *, strays: float | None = 1.0) -> None:
        """Reduces the gradients of earlier micro steps, and strays, without those of another backward; see `begin`."""
        if self._unreduced or self.has_strays:
            self.begin(order=tuple, used=(), strays=strays)
            self.finish()
        if self._uses is not None:
            for index, start, grads_N in self._uses.give():
                self._add(self._units[index], start, grads_N)
        self.reduce_local(self._local.begun)
        self._end_once()

    def reduce_local(self, units: Collection[int]) -> None:
        """Begins to reduce what micro steps have summed up on each rank, see [Note: reduce once an update].

        Of these units no gradient may come before the update. All ranks that have them must call alike; does nothing
        for those whose gradients are reduced after every micro step.

        Args:
            units: numbers of the units.
        """
        chosen = [unit for unit in self._canonical if unit.index in units and unit.index in self._local]
        # Ranks of different stages meet in the reduction of what they share.
        for unit in sorted(chosen, key=lambda unit: unit.meeting_order):
            self._make_room(unit)
            sent = self._local.take(unit.index)
            if unit.ties is not None:
                # The uses of one sample first, and then the samples, for whom the first stage speaks.
                unit.ties.all_reduce(sent, label=unit.label).wait()
                if unit.ties.rank:
                    sent.zero_()
            wire = unit.comm_dtype or self._comm_dtype
            if wire is not None and wire != sent.dtype:
                sent = sent.to(wire)
            if unit.divide_before != 1.0:
                sent.div_(unit.divide_before)
            reduce = unit.replicas.reduce_scatter if self._shard_optimizer else unit.replicas.all_reduce
            self._once.append((unit, sent, reduce(sent, label=unit.label)))

    def _add(self, unit: ParamUnit, start: int, grads_N: Tensor) -> None:
        """Adds gradients of this rank to a unit's sum, as a micro step would have; before the update's reduction."""
        assert all(unit is not one for one, _, _ in self._once), f"the reduction of {unit.label} has begun"
        if unit.index in self._local:
            self._local.add_at(unit.index, start, grads_N)
            return
        assert unit.replicas.size == 1, "gradients that ranks share are reduced once an update"
        self.sums.edit(unit.index).narrow(0, start, grads_N.numel()).add_(grads_N, alpha=1.0 / unit.divide_by)

    def _holds_sum(self, unit: ParamUnit) -> bool:
        """Whether a unit's buffer holds gradients of earlier micro steps."""
        return unit.index in self._unreduced or self._local.keeps(unit.index)

    def _make_room(self, unit: ParamUnit) -> None:
        """Ends the reduction of a sum that lies where a unit's own is to be."""
        before = self._local.occupy(unit.index)
        if before is not None:
            self._end_once(before)

    def _end_once(self, index: int | None = None) -> None:
        """Waits for the reductions that take place once an update, of all units or of one."""
        left: list[tuple[ParamUnit, Tensor, Pending]] = []
        for unit, sent, pending in self._once:
            if index not in (None, unit.index):
                left.append((unit, sent, pending))
                continue
            pending.wait()
            factor = unit.divide_before / unit.divide_by
            reader = self.sums.take(unit.index, self._own(unit, sent), factor, first=unit.index not in self._begun)
            if reader is not None:
                reader.wait()
            self._begun.add(unit.index)
            self.has_sums = True
        self._once = left

    def abandon(self) -> None:
        """Ends a micro step whose backward raised: reductions under way are waited for, and nothing more is added.

        What the micro step has added to gradients of earlier ones cannot be told from them any more, and what was
        to be reduced with it is lost: then nothing but `zero` helps.
        """
        added = any(progress.phase is _Phase.DONE for progress in self._progress)
        added = added or self._local.has_kept
        self.is_torn = self.is_torn or (self._had_sums and added) or bool(self._unreduced)
        self._unreduced.clear()
        if not self._had_sums:
            self._begun.clear()
            self._local.forget()
        for unit, progress in zip(self._units, self._progress, strict=True):
            if progress.pending is not None:
                progress.pending.wait()
                progress.pending = None
            self._move_home(unit)
            unit.bind_grads(progress.home)
            unit.drop_grads()
            progress.phase = _Phase.IDLE
        if self._uses is not None:
            self._uses.drop_strays()
            if not self._had_sums:
                self._uses.forget()
        if self.unused is not None:
            self.unused.abandon()
        self._used.clear()
        self._cursor = self._summed = 0
        self._holder.clear()

    def reduced_copy_of_unreduced(self, unit: ParamUnit, start: int, numel: int) -> Tensor:
        """Returns what a reduction would add now of gradients that no reduction has taken, fp32; every rank must call.

        Args:
            unit: the unit.
            start: first element in the unit's buffer.
            numel: number of elements from `start` on.
        """
        progress = self._progress[unit.index]
        local = self._local.read(unit.index) if unit.index in self._local else None
        flat = progress.flat if local is None else local
        mine = flat.narrow(0, start, numel).to(torch.float32, copy=True)
        if local is None and unit.index not in self._unreduced:
            mine.zero_()
        if self._uses is not None:
            self._uses.add_to(unit.index, start, mine)
        unit.replicas.all_reduce(mine, label=unit.label).wait()
        return mine.div_(unit.divide_by)

    def drop_strays(self) -> None:
        """Forgets gradients that no micro step has taken."""
        if self._uses is not None:
            self._uses.drop_strays()
        for unit in self._units:
            unit.drop_grads()

    def zero(self, *, used_factor: float | None = None) -> None:
        """Forgets the accumulated gradients: the next micro step writes over the sums, see `settle`.

        Args:
            used_factor: factor of the sums that the last step used, see the attribute.
        """
        self.used_factor = used_factor
        self.is_torn = False
        self._unreduced.clear()
        self._end_once()
        self._local.forget()
        self._begun.clear()
        if self._uses is not None:
            self._uses.forget()
        self.has_sums = False
        if self.unused is not None:
            self.unused.forget()

    def settle(self) -> None:
        """Makes the sums readable as they are: zeros where no micro step has written any since they were forgotten."""
        if not self.has_sums:
            self.used_factor = None
            self.sums.clear()

    def _scale_strays(self, factor: float | None) -> None:
        for unit in self._units:
            if not unit.has_grads:
                continue
            if factor is None:
                _refuse_stray(
                    unit,
                    "from a backward of the script's own, whose loss has not been multiplied by the loss scale",
                    hint="call engine.backward(loss), or engine.scale(loss).backward()",
                )
            if factor != 1.0:
                unit.scale_grads(factor)
            self._used.add(unit.index)

    def _agree_on_order(self, forward_order: Sequence[ParamUnit]) -> list[ParamUnit]:
        """Returns the canonical order, see [Note: order of reductions]."""
        if not self._units:
            return []  # a pipeline stage that trains nothing, as all of its ranks know
        last = [unit for unit in self._units if unit not in forward_order]
        mine = [unit.index for unit in [*reversed(forward_order), *last]]
        order = torch.tensor(mine, dtype=torch.int64, device=self._units[0].device)
        self._collectives.broadcast(order, source=0, label="reduction order").wait()
        with self._collectives.reading("reduction order"):
            agreed = order.tolist()
        return [self._units[index] for index in agreed]

    def _advance(self) -> None:
        """Starts reductions in canonical order as far as units are complete or cannot get a gradient."""
        if self._stays:
            return
        while self._cursor < len(self._turn):
            unit = self._turn[self._cursor]
            progress = self._progress[unit.index]
            if progress.phase is _Phase.IDLE and unit.index not in self._used:
                if not self._holds_sum(unit):
                    self._make_zeros(unit)
                progress.phase = _Phase.COMPLETE
            if progress.phase is not _Phase.COMPLETE:
                return
            if unit.index in self._local:
                self._make_room(unit)
                self._local.add(unit.index, progress.flat, self._scale)
                self._move_home(unit)
                progress.phase = _Phase.DONE
                self._cursor += 1
                continue
            reduce = unit.replicas.reduce_scatter if self._shard_optimizer else unit.replicas.all_reduce
            progress.sent = self._to_send(unit, progress.flat)
            progress.pending = reduce(progress.sent, label=unit.label)
            progress.phase = _Phase.REDUCING
            self._cursor += 1
            if self._sums_early:
                self._sum_early()

    def _sum_early(self) -> None:
        """Adds what is reduced; with several ranks, one reduction stays under way beside the backward."""
        last = self._cursor if self._collectives.size == 1 else self._cursor - 1
        while self._summed < last:
            self._accumulate(self._turn[self._summed])
            self._summed += 1

    def _to_send(self, unit: ParamUnit, flat_N: Tensor) -> Tensor:
        """Returns the gradient as it travels, divided as far as it is to be before; may overwrite `flat_N`."""
        sent_N = flat_N
        if unit.index in self._staged:
            staging = self._staging.pop(0)
            self._staging.append(staging)
            if staging.holder is not None:
                self._accumulate(staging.holder)
            staging.holder = unit
            sent_N = staging.memory.narrow(0, 0, flat_N.numel()).copy_(flat_N)
        if unit.divide_before != 1.0:
            sent_N.div_(unit.divide_before)
        return sent_N

    def _own(self, unit: ParamUnit, flat_N: Tensor) -> Tensor:
        """Returns what this rank owns of a unit's buffer."""
        if not self._shard_optimizer:
            return flat_N
        return own_slice(flat_N, rank=unit.replicas.rank, size=unit.replicas.size)

    def _vacate(self, holder: ParamUnit) -> None:
        """Frees the slot of `holder`: its sum is waited for, or, where it is not its turn yet, it moves out."""
        progress = self._progress[holder.index]
        if progress.phase in (_Phase.OPEN, _Phase.COMPLETE):
            if progress.phase is _Phase.OPEN:
                holder.detach_grads()
            self._move_out(holder).copy_(progress.home)
            holder.bind_grads(progress.flat)
            if progress.phase is _Phase.OPEN:
                holder.attach_grads()
        self._accumulate(holder)

    def _make_zeros(self, unit: ParamUnit) -> None:
        """Gives a unit that gets no gradient a buffer of zeros: its slot, if that is not in use."""
        progress = self._progress[unit.index]
        holder = self._holder.get(progress.slot)
        if holder is not None:
            self._accumulate(holder)
        if holder is None or self._progress[holder.index].phase is _Phase.DONE:
            self._holder[progress.slot] = unit
            self._wait_readers(progress.slot)
            progress.home.zero_()
        else:
            self._move_out(unit).zero_()

    def _move_out(self, unit: ParamUnit) -> Tensor:
        """Gives a unit a buffer elsewhere, until it moves home; returns it, with anything in it."""
        progress = self._progress[unit.index]
        progress.flat = self._moved_out.take(progress.home.numel(), moved=partial(self._follow, unit))
        return progress.flat

    def _follow(self, unit: ParamUnit, flat_N: Tensor) -> None:
        """The arena has moved a unit's buffer elsewhere."""
        progress = self._progress[unit.index]
        progress.flat = flat_N
        unit.bind_grads(flat_N)
        if progress.phase is _Phase.OPEN:
            unit.attach_grads()

    def _move_home(self, unit: ParamUnit) -> None:
        progress = self._progress[unit.index]
        if progress.flat is not progress.home:
            self._moved_out.give_back(progress.flat)
            progress.flat = progress.home
            unit.bind_grads(progress.home)

    def _accumulate(self, unit: ParamUnit) -> None:
        """Waits for the unit's reduction and adds the mean over ranks to the owned range, in fp32."""
        progress = self._progress[unit.index]
        if progress.phase is not _Phase.REDUCING:
            return
        assert progress.pending is not None, "a reduction under way has a handle"
        progress.pending.wait()
        progress.pending = None
        summed = progress.own if progress.sent is progress.home else self._own(unit, progress.sent)
        factor = unit.divide_before / unit.divide_by * self._scale
        reader = self.sums.take(unit.index, summed, factor, first=unit.index not in self._begun)
        self._begun.add(unit.index)
        if reader is not None:
            self._readers[progress.slot] = reader
            if progress.sent is not progress.home:
                self._wait_readers(progress.slot)  # staging, or memory elsewhere: others take it without asking
        self._move_home(unit)
        progress.phase = _Phase.DONE

    def _wait_readers(self, slot: int) -> None:
        """Returns when nothing reads a slot any more; its next gradient may be written."""
        reader = self._readers.pop(slot, None)
        if reader is not None:
            reader.wait()


_KEEPS_INSIDE = "return from a module's forward all that the loss reads of it, or set `zero_optimization.stage` to 2"


def _refuse_stray(unit: ParamUnit, where: str, *, hint: str = _KEEPS_INSIDE) -> NoReturn:
    names = unit.names_with_grads()
    unit.drop_grads()
    raise ModelError(
        f"model: `{names[0]}` of `{unit.name}` gets a gradient {where}",
        hint=hint,
    )
