"""Where the pieces of one engine's parameters are: read and set on this rank, put together, and spread to the others.

Opening parameters for scripts is `whole.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ...layout.unit_layout import TensorExtent
from ...mesh.collectives import Collectives, Pending
from ...protocols import ChangeFence
from ..params.store import ParamStore
from ..partition_parameters import ParameterOwner, ZeroParamStatus, memory_of, set_memory
from ..units.plan import ZeroPlan
from ..units.unit import ParamUnit

if TYPE_CHECKING:
    from .whole import ParamAccess


OTHER_MEMORY_HINT = (
    "convert or move the model (.half(), .to()) before dsrun.initialize, choose dtypes by the config's `bf16`, and set "
    "new values in place or inside dsrun.zero.GatheredParameters"
)


def other_memory(name: str, memory: Tensor) -> str:
    """Returns what is wrong with a parameter that has memory in which an engine cannot train it."""
    dtype = str(memory.dtype).removeprefix("torch.")
    return (
        f"model: `{name}` has other memory than the engine gave it (now {dtype} of shape {tuple(memory.shape)} on "
        f"{memory.device}), so updates would not reach it"
    )


class UnitHome(ParameterOwner):
    """ParameterOwner of one parameter of an engine.

    Attributes:
        access: the engine's.
        unit: unit of the parameter; None for a parameter in no unit, which is frozen and whole on every rank.
        extent: place in the unit; None where there is none.
        param: the parameter.
        opened: number of `open` calls on the parameter that are not closed yet.
        writers: number of `open` calls on the parameter, not closed yet, that take new values over.
        full: the whole values, if the parameter has memory of its own while it is open.
        flat: the unit's whole buffer that `full` is a view of, if it was gathered as one.
        resident: memory that the parameter gets back when it is no longer open; None while it has that memory.
        version: torch's count of changes in place when the parameter was opened.
        rebound: number of times that a script has given the parameter other memory while it was released.
        changed: number of times that this parameter alone was given new values.
    """

    def __init__(
        self,
        access: ParamAccess,
        param: nn.Parameter,
        *,
        number: int,
        name: str,
        unit: ParamUnit | None = None,
        extent: TensorExtent | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.access = access
        self.param = param
        self.unit = unit
        self.extent = extent
        self.opened = 0
        self.writers = 0
        self.full: Tensor | None = None
        self.flat: Tensor | None = None
        self.resident: Tensor | None = None
        self.version = 0
        self.rebound = 0
        self.changed = 0

    @property
    def keeper(self) -> ParamAccess:
        """See `ParameterOwner`."""
        return self.access

    def status(self) -> ZeroParamStatus:
        """See `ParameterOwner`."""
        if self.unit is None or self.opened:
            return ZeroParamStatus.AVAILABLE
        return self.access.pieces.store.status(self.unit)

    @property
    def stays_gathered(self) -> bool:
        """See `ParameterOwner`."""
        return self.unit is not None and self.access.pieces.store.stays(self.unit)

    def settle(self) -> None:
        """See `ParameterOwner`: and what a script has written to parameters is in their masters.

        Raises:
            ModelError: a script has given the parameter other memory, which the next step takes over.
        """
        if self.unit is not None:
            self.unit.settle()
            if self._has_moved:
                raise ModelError(
                    f"model: `{self.name}` was given other memory (`param.data = ...`) since the last step, and "
                    "masters have its values from the next step on",
                    hint="look at the parameter itself, or write the values in place: param.data.copy_(values)",
                )
            self.access.writes.take_over()

    def wait_update(self) -> None:
        """See `ParameterOwner`."""
        if self.unit is not None:
            self.unit.wait_update()

    def hand_out(self, memory: Tensor) -> Tensor:
        """See `ParameterOwner`: what is written to it is seen."""
        return memory if self.unit is None else self.unit.writes.hand_out(self.position, memory)

    def read(self) -> Tensor:
        """See `ParameterOwner`."""
        return self.access.read(self)

    def write(self, value: Tensor) -> None:
        """See `ParameterOwner`."""
        self.access.write(self, value)

    def replace(self, value: Tensor) -> None:
        """See `ParameterOwner`.

        Raises:
            ModelError: the value has another shape or dtype, or is elsewhere.
        """
        memory = memory_of(self.param)
        if (value.shape, value.dtype, value.device) != (memory.shape, memory.dtype, memory.device):
            raise ModelError(other_memory(self.name, value), hint=OTHER_MEMORY_HINT)
        self.access.write(self, value)
        self.rebound += 1

    def note_moved(self) -> None:
        """See `ParameterOwner`."""
        if self.unit is not None and self.access.pieces.plan.shard_parameters:
            self.unit.writes.mark(self.position)  # where parameters are whole, the step looks

    def bring_back(self) -> bool:
        """See `ParameterOwner`: values of the same shape, dtype and device are copied to where they belong."""
        if self.unit is None or self.full is not None:
            return False
        if self._has_moved:
            place, now = self.unit.views(self.unit.flat_param)[self.position], memory_of(self.param)
            if (now.shape, now.dtype, now.device) != (place.shape, place.dtype, place.device):
                return False
            self.unit.settle()
            place.copy_(now)
            set_memory(self.param, place)
            self.access.writes.note(self)
        return True

    def moment(self) -> tuple[int, int]:
        """See `ParameterOwner`."""
        return (self.rebound, self.changed + self.access.pieces.store.changes)

    @property
    def _has_moved(self) -> bool:
        unit, extent = self.unit, self.extent
        if unit is None or extent is None or self.full is not None or not extent.numel:
            return False
        flat = unit.flat_param
        return memory_of(self.param).data_ptr() != flat.data_ptr() + extent.offset * flat.itemsize

    @property
    def position(self) -> int:
        """Place among the parameters of the unit."""
        assert self.unit is not None, "a parameter in no unit has no position in one"
        return next(n for n, param in enumerate(self.unit.params) if param is self.param)

    @property
    def is_open(self) -> bool:
        """See `ParameterOwner`."""
        return self.opened > 0

    @property
    def is_writable(self) -> bool:
        """See `ParameterOwner`: every rank has a parameter in no unit to itself."""
        return self.unit is None or self.writers > 0

    def check_copy(self) -> None:
        """See `ParameterOwner`: a slot has the values of whichever unit was in it last.

        Raises:
            ModelError: the values are not there.
        """
        if self.status() is not ZeroParamStatus.AVAILABLE:
            raise ModelError(
                f"model: `{self.name}` is copied or pickled while its values are on all ranks in pieces",
                hint="do it inside dsrun.zero.GatheredParameters(model.parameters()), or take the values that "
                "engine.module_state_dict() returns",
            )

    def own_piece(self) -> Tensor:
        """See `ParameterOwner`."""
        if self.unit is None:
            return memory_of(self.param).view(-1)
        self.unit.settle()
        if self.unit.tier is not None:
            self.unit.tier.settle()
        found = self.access.pieces.own_piece(self, self.unit.shard, start=self.access.pieces.shard_start(self.unit))
        return memory_of(self.param).new_empty(0) if found is None else found[1]


class Pieces:
    """Reads and writes pieces of parameters whose homes are `UnitHome`s.

    Args:
        plan: plan of what is sharded.
        collectives: ranks that have the same units.
        store: parameter store, which knows where a unit is, and is told of new values.
        fence: fence that keeps masters and states unchanged while a checkpoint copies them; None where nothing does.
    """

    def __init__(
        self, plan: ZeroPlan, collectives: Collectives, store: ParamStore, fence: ChangeFence | None = None
    ) -> None:
        self.fence = fence
        self.plan = plan
        self.collectives = collectives
        self.store = store

    def before_change(self, unit: ParamUnit | None = None) -> None:
        """Returns when masters and states of a unit may change, or None: all state; see `ChangeFence`."""
        if self.fence is None:
            return
        if unit is None:
            self.fence.wait_all()
        else:
            self.fence.wait(unit.index)

    def set_piece(self, home: UnitHome, read: Callable[[int, int], Tensor]) -> None:
        """Sets what this rank owns of a parameter in a unit; `spread` afterwards, once for all parameters.

        Args:
            home: home of the parameter.
            read: function that gets start and stop, and returns the flat elements [start, stop) of the new value, in
                any dtype.
        """
        unit = home.unit
        assert unit is not None, "a parameter in no unit has no pieces"
        home.changed += 1
        whole_N = unit.whole_master()
        piece = self.own_piece(home, whole_N, start=unit.owned[0])
        if piece is None:
            return
        if unit.tier is not None:
            unit.tier.settle()
        self.before_change(unit)
        first, master = piece
        master.copy_(read(first, first + master.numel()))
        if unit.halves is not None:
            unit.halves.part(whole_N)
            return
        compute = unit.shard if self.plan.shard_optimizer else unit.flat_param
        read_by_forward = self.own_piece(home, compute, start=unit.owned[0])
        assert read_by_forward is not None, "whoever owns a piece of the master owns the parameter's"
        read_by_forward[1].copy_(master)

    def spread(self, units: Sequence[ParamUnit]) -> None:
        """Brings pieces that were set to all ranks: one all-gather a unit at stages 1 and 2; every rank must call."""
        if self.plan.shard_optimizer and not self.plan.shard_parameters:
            for unit in units:
                unit.replicas.all_gather(unit.flat_param, unit.shard, label=unit.label).wait()
        self.publish(units)

    def write(self, home: UnitHome, value: Tensor, *, exact: bool) -> None:
        """Takes a parameter's new value over; every rank must call with the same one. Enters no collective.

        `publish` afterwards, once for all parameters of a unit.

        Args:
            home: home of a parameter in a unit.
            value: whole, in any dtype.
            exact: the value is the master's; else it is what the forward reads, and where that has not changed, the
                master keeps the bits that rounding had taken away.
        """
        unit, extent = home.unit, home.extent
        assert unit is not None, "a parameter in no unit has no master"
        assert extent is not None, "a parameter in a unit has a place"
        home.changed += 1
        flat = value.detach().reshape(-1)
        whole = unit.flat_param.narrow(0, extent.offset, extent.numel)
        whole_N = unit.whole_master()
        piece = self.own_piece(home, whole_N, start=unit.owned[0])
        if unit.tier is not None:
            unit.tier.settle()
        self.before_change(unit)
        if piece is not None:
            first, master = piece
            new = flat.narrow(0, first, master.numel())
            shard = self.own_piece(home, unit.shard, start=self.shard_start(unit))
            old = whole.narrow(0, first, master.numel())
            if self.plan.shard_parameters:
                assert shard is not None, "whoever owns a piece of the master owns the shard's"
                old = shard[1]
            if exact:
                master.copy_(new)
            elif master.data_ptr() != old.data_ptr():
                here = new.to(master.device)
                master.copy_(torch.where(here.to(old.dtype) != old.to(master.device), here.to(master.dtype), master))
            old.copy_(new)
            if unit.halves is not None:
                unit.halves.part(whole_N)
        if not self.plan.shard_parameters:
            whole.copy_(flat)

    def whole(self, home: UnitHome) -> Tensor:
        """Returns a copy of a sharded parameter's whole values; a broadcast for each piece, every rank must call."""
        unit = home.unit
        assert unit is not None, "a parameter in no unit is whole on every rank"
        unit.wait_update()
        if unit.tier is not None:
            unit.tier.settle()
        piece = self.own_piece(home, unit.shard, start=self.shard_start(unit))
        values, pending = self.assemble(home, None if piece is None else piece[1], dtype=unit.dtype)
        for work in pending:
            work.wait()
        return values

    def write_slice(self, home: UnitHome, value: Tensor) -> None:
        """Gives this rank's slice of a sharded parameter new values, and not the master; every rank must call.

        A master in halves has its part at once, for the slice is one of them.

        Args:
            home: home of a parameter in a unit.
            value: whole, in any dtype.
        """
        unit = home.unit
        assert unit is not None, "a parameter in no unit has no slice"
        home.changed += 1
        if unit.halves is not None:
            self.write(home, value, exact=False)
        else:
            unit.settle()
            if unit.tier is not None:
                unit.tier.settle()
            self.before_change(unit)
            piece = self.own_piece(home, unit.shard, start=self.shard_start(unit))
            if piece is not None:
                first, slice_N = piece
                slice_N.copy_(value.detach().reshape(-1).narrow(0, first, slice_N.numel()))
        self.publish([unit])

    def adopt(self, home: UnitHome) -> None:
        """Gives a master what forward reads, but where rounding the master gives that; masters have settled."""
        unit = home.unit
        assert unit is not None, "a parameter in no unit has no master"
        piece = self.own_piece(home, unit.master, start=unit.owned[0])
        if piece is None or unit.halves is not None:
            return
        master = piece[1]
        compute = unit.shard if self.plan.shard_optimizer else unit.flat_param
        read_by_forward = self.own_piece(home, compute, start=unit.owned[0])
        assert read_by_forward is not None, "whoever owns a piece of the master owns the parameter's"
        new = read_by_forward[1]
        if new.data_ptr() == master.data_ptr():
            return
        if unit.tier is not None:
            unit.tier.settle()
        self.before_change(unit)
        here = new.to(master.device)
        master.copy_(torch.where(master.to(here.dtype) != here, here.to(master.dtype), master))

    def publish(self, units: Sequence[ParamUnit]) -> None:
        """Units have new values: copies that were gathered before are stale."""
        for unit in units:
            self.store.refresh(unit)

    def shard_start(self, unit: ParamUnit) -> int:
        """Returns where `unit.shard` begins in its flat buffer."""
        return unit.layout.shard_range(unit.replicas.rank)[0]

    def own_piece(self, home: UnitHome, flat: Tensor, *, start: int) -> tuple[int, Tensor] | None:
        """Returns the parameter's part of a range of its unit's buffer.

        Args:
            home: home of a parameter in a unit.
            flat: the range.
            start: first element of the range in the unit's buffer.

        Returns:
            (first element of the parameter, view of `flat`); None where no element lies in the range.
        """
        extent = home.extent
        assert extent is not None, "a parameter in no unit has no pieces"
        first = max(start, extent.offset)
        last = min(start + flat.numel(), extent.offset + extent.numel)
        return (first - extent.offset, flat.narrow(0, first - start, last - first)) if first < last else None

    def assemble(self, home: UnitHome, mine: Tensor | None, *, dtype: torch.dtype) -> tuple[Tensor, list[Pending]]:
        """Puts a parameter-shaped tensor together of the pieces that ranks own; one broadcast a piece.

        Args:
            home: home of a parameter in a unit.
            mine: this rank's piece, flat; None where it owns no piece.
            dtype: dtype of the pieces.

        Returns:
            the tensor, and what to wait for before it is read.
        """
        unit, extent = home.unit, home.extent
        assert unit is not None, "a parameter in no unit has no pieces"
        assert extent is not None, "a parameter in a unit has a place"
        whole = torch.empty(extent.numel, dtype=dtype, device=unit.device)
        pending: list[Pending] = []
        for rank in range(unit.replicas.size):
            start, stop = unit.layout.shard_range(rank)
            first, last = max(start, extent.offset), min(stop, extent.offset + extent.numel)
            if first >= last:
                continue
            target = whole.narrow(0, first - extent.offset, last - first)
            if rank == unit.replicas.rank:
                assert mine is not None, "a rank knows its own pieces"
                target.copy_(mine)
            pending.append(unit.replicas.broadcast(target, source=rank, label=f"`{extent.name}`"))
        return whole.view(extent.shape), pending

    def hand_over(self, home: UnitHome, replicas: Collectives) -> Tensor:
        """Returns the whole master of a sharded parameter whose engine is gone, for the next one.

        Args:
            home: home of the parameter.
            replicas: ranks that hold it in the next engine; the collectives of this engine are closed.

        Raises:
            ModelError: the next engine has another number of ranks.
        """
        assert home.unit is not None, "only parameters in units are sharded"
        size = home.unit.layout.world_size
        if replicas.size != size:
            raise ModelError(
                f"model: `{home.name}` lies on the {size} ranks of an earlier engine; there are {replicas.size} now",
                hint="save a checkpoint, and load it into a new model",
            )
        home.unit.replicas = replicas
        home.unit.settle()
        piece = self.own_piece(home, home.unit.whole_master(), start=home.unit.owned[0])
        whole, pending = self.assemble(home, None if piece is None else piece[1], dtype=home.unit.master.dtype)
        for work in pending:
            work.wait()
        return whole
