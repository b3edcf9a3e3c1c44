"""Access to an engine's parameters from outside of forward and backward: made whole, and written back to their masters.

The fragments that `safe_get_*` and `safe_set_*` move are in `fragments.py`; what a forward gathers, in `store.py`.

[Note: what a gather moves] If all parameters of a unit are asked for, its flat buffer is gathered at once: one
all-gather of `padded_numel` elements. Else each parameter alone: its pieces are broadcast by the ranks that own them,
`numel` elements in as many calls as ranks have a piece, mostly one or two. Where parameters are whole anyway nothing is
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from dsrun.errors import ModelError

from ..compat import in_backward
from ..layout.unit_layout import TensorExtent
from ..mesh.collectives import Collectives, Pending
from ..optim.sharded import ShardOptimizer
from .partition_parameters import Home, Keeper, ZeroParamStatus, settle
from .plan import ZeroPlan
from .reducer import GradReducer
from .store import ParamStore
from .unit import ParamUnit


class UnitHome(Home):
    """Home of one parameter of an engine.

    Attributes:
        access: the engine's.
        unit: of the parameter; None for a frozen one, which every rank has whole.
        extent: place in the unit; None for a frozen one.
        param: the parameter.
        opened: how often it is open now.
        writers: how many of those take new values over.
        full: the whole values, if the parameter has memory of its own while it is open.
        flat: the unit's whole buffer that `full` is a view of, if it was gathered as one.
        resident: what the parameter's data is while it is not open.
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

    @property
    def keeper(self) -> ParamAccess:
        """See `Home`."""
        return self.access

    def status(self) -> ZeroParamStatus:
        """See `Home`."""
        if self.unit is None or self.opened:
            return ZeroParamStatus.AVAILABLE
        return self.access.store.status(self.unit)

    @property
    def is_open(self) -> bool:
        """See `Home`."""
        return self.opened > 0

    @property
    def is_writable(self) -> bool:
        """See `Home`: every rank has a frozen parameter to itself."""
        return self.unit is None or self.writers > 0

    def own_piece(self) -> Tensor:
        """See `Home`."""
        if self.unit is None:
            return self.param.detach().view(-1)
        found = self.access.own_piece(self, self.unit.shard, start=self.access.shard_start(self.unit))
        return self.param.detach().new_empty(0) if found is None else found[1]


class ParamAccess(Keeper):
    """Makes an engine's parameters whole and takes new values over.

    Args:
        units: all units.
        plan: what is sharded.
        collectives: the axis the shards lie on.
        store: asked where a unit is, and told of new values.
        reducer: asked whether there are gradients.
        optimizer: asked for its states.
        running: returns a unit that is inside its forward now.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plan: ZeroPlan,
        collectives: Collectives,
        *,
        store: ParamStore,
        reducer: GradReducer,
        optimizer: ShardOptimizer,
        running: Callable[[], ParamUnit | None],
    ) -> None:
        self.units = units
        self.plan = plan
        self.collectives = collectives
        self.store = store
        self.reducer = reducer
        self.optimizer = optimizer
        self._running = running

    @property
    def world_size(self) -> int:
        """See `Keeper`."""
        return self.collectives.size

    def settle(self, model: nn.Module) -> None:
        """Gives every parameter of the model its home here."""
        places = {
            id(param): (unit, extent)
            for unit in self.units
            for param, extent in zip(unit.params, unit.layout.extents, strict=True)
        }
        for number, (name, param) in enumerate(model.named_parameters()):
            unit, extent = places.get(id(param), (None, None))
            home = UnitHome(self, param, number=number, name=name, unit=unit, extent=extent)
            settle(param, home, sharded=unit is not None and self.plan.shard_parameters)

    # Whole for a while ------------------------------------------------------------------------------------------------

    def open(self, homes: Sequence[UnitHome], *, writes: bool) -> None:
        """See `Keeper`, and [Note: what a gather moves].

        Raises:
            ModelError: inside a forward or a backward, whose values are not to be moved under its feet.
        """
        self.check_quiet("GatheredParameters")
        wanted = [home for home in homes if home.full is None and (writes or self._is_elsewhere(home))]
        for home in homes:
            home.opened += 1
            home.writers += writes
        by_unit: dict[int, list[UnitHome]] = {}
        for home in wanted:
            by_unit.setdefault(-1 if home.unit is None else home.unit.index, []).append(home)
        pending: list[Pending] = []
        for group in by_unit.values():
            pending += self._fetch(group)
        for work in pending:
            work.wait()
        for home in wanted:
            assert home.full is not None, "fetched just now"
            home.resident, home.param.data = home.param.data, home.full

    def close(self, homes: Sequence[UnitHome], *, source: int | None, failed: bool) -> None:
        """See `Keeper`. With a source: an all-reduce of one number, and a broadcast of what was gathered as one.

        Raises:
            ModelError: a parameter was given another shape; on the rank where that is so.
        """
        try:
            if source is not None:
                self._take_over([home for home in homes if home.full is not None], source, failed=failed)
        finally:
            for home in homes:
                home.opened -= 1
                home.writers -= source is not None
                if not home.opened and home.full is not None:
                    assert home.resident is not None, "it was left when the parameter was opened"
                    home.param.data = home.resident
                    home.full = home.flat = home.resident = None

    def check_quiet(self, who: str) -> None:
        """Raises inside a forward or a backward.

        Raises:
            ModelError: naming `who` was called, and the unit that is in use.
        """
        unit = self._running()
        if unit is not None or in_backward():
            where = "a backward" if unit is None else f"the forward of `{unit.name}`"
            raise ModelError(
                f"{who}: called inside {where}, which reads the parameters",
                hint="call it before the forward or after engine.backward; a forward gathers what it needs itself",
            )

    def check_closed(self, home: UnitHome, who: str) -> None:
        """Raises where a new value would not last.

        Raises:
            ModelError: inside a forward or a backward, or the parameter is open with memory of its own.
        """
        self.check_quiet(who)
        if home.full is not None:
            raise ModelError(
                f"{who}: `{home.name}` is open in a GatheredParameters, whose values would replace the new one",
                hint="leave the context first, or write to the parameter inside it with modifier_rank",
            )

    def set_piece(self, home: UnitHome, read: Callable[[int, int], Tensor]) -> None:
        """Sets what this rank owns of a trainable parameter; `spread` afterwards, once for all parameters.

        Args:
            home: of the parameter.
            read: returns the flat elements [start, stop) of the new value, in any dtype.
        """
        unit = home.unit
        assert unit is not None, "a frozen parameter has no pieces"
        piece = self.own_piece(home, unit.master, start=unit.owned[0])
        if piece is None:
            return
        first, master = piece
        master.copy_(read(first, first + master.numel()))
        compute = unit.shard if self.plan.shard_optimizer else unit.flat_param
        read_by_forward = self.own_piece(home, compute, start=unit.owned[0])
        assert read_by_forward is not None, "whoever owns a piece of the master owns the parameter's"
        read_by_forward[1].copy_(master)

    def spread(self, units: Sequence[ParamUnit]) -> None:
        """Brings pieces that were set to all ranks: one all-gather a unit at stages 1 and 2; every rank must call."""
        if self.plan.shard_optimizer and not self.plan.shard_parameters:
            for unit in units:
                self.collectives.all_gather(unit.flat_param, unit.shard, of=unit.label).wait()
        self.publish(units)

    def write(self, home: UnitHome, value: Tensor, *, exact: bool) -> None:
        """Takes a parameter's new value over; every rank must call with the same one. Enters no collective.

        `publish` afterwards, once for all parameters of a unit.

        Args:
            home: of a trainable parameter.
            value: whole, in any dtype.
            exact: the value is the master's; else it is what the forward reads, and where that has not changed, the
                master keeps the bits that rounding had taken away.
        """
        unit, extent = home.unit, home.extent
        assert unit is not None, "a frozen parameter has no master"
        assert extent is not None, "a trainable parameter has a place"
        flat = value.detach().reshape(-1)
        whole = unit.flat_param.narrow(0, extent.offset, extent.numel)
        piece = self.own_piece(home, unit.master, start=unit.owned[0])
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
                master.copy_(torch.where(new.to(old.dtype) != old, new.to(master.dtype), master))
            old.copy_(new)
        if not self.plan.shard_parameters:
            whole.copy_(flat)

    def publish(self, units: Sequence[ParamUnit]) -> None:
        """Units have new values: copies that were gathered before are stale."""
        for unit in units:
            self.store.refresh(unit)

    # Pieces -----------------------------------------------------------------------------------------------------------

    def shard_start(self, unit: ParamUnit) -> int:
        """Returns where `unit.shard` begins in its flat buffer."""
        return unit.layout.shard_range(self.collectives.rank)[0]

    def own_piece(self, home: UnitHome, flat: Tensor, *, start: int) -> tuple[int, Tensor] | None:
        """Returns the parameter's part of a range of its unit's buffer.

        Args:
            home: of a trainable parameter.
            flat: the range.
            start: where it begins in the buffer.

        Returns:
            (first element of the parameter, view of `flat`); None where no element lies in the range.
        """
        extent = home.extent
        assert extent is not None, "a frozen parameter has no pieces"
        first = max(start, extent.offset)
        last = min(start + flat.numel(), extent.offset + extent.numel)
        return (first - extent.offset, flat.narrow(0, first - start, last - first)) if first < last else None

    def assemble(self, home: UnitHome, mine: Tensor | None, *, dtype: torch.dtype) -> tuple[Tensor, list[Pending]]:
        """Puts a parameter-shaped tensor together of the pieces that ranks own; one broadcast a piece.

        Args:
            home: of a trainable parameter.
            mine: this rank's piece, flat.
            dtype: of the pieces.

        Returns:
            the tensor, and what to wait for before it is read.
        """
        unit, extent = home.unit, home.extent
        assert unit is not None, "a frozen parameter has no pieces"
        assert extent is not None, "a trainable parameter has a place"
        whole = torch.empty(extent.numel, dtype=dtype, device=unit.shard.device)
        pending: list[Pending] = []
        for rank in range(self.collectives.size):
            start, stop = unit.layout.shard_range(rank)
            first, last = max(start, extent.offset), min(stop, extent.offset + extent.numel)
            if first >= last:
                continue
            target = whole.narrow(0, first - extent.offset, last - first)
            if rank == self.collectives.rank:
                assert mine is not None, "a rank knows its own pieces"
                target.copy_(mine)
            pending.append(self.collectives.broadcast(target, source=rank, of=f"`{home.name}`"))
        return whole.view(extent.shape), pending

    def hand_over(self, home: UnitHome, collectives: Collectives) -> Tensor:
        """Returns the whole master of a sharded parameter whose engine is gone, for the next one.

        Args:
            home: of the parameter.
            collectives: of the next engine; those of this one are closed.

        Raises:
            ModelError: the next engine has another number of ranks.
        """
        assert home.unit is not None, "only trainable parameters are sharded"
        size = home.unit.layout.world_size
        if collectives.size != size:
            raise ModelError(
                f"model: `{home.name}` lies on the {size} ranks of an earlier engine; there are {collectives.size} now",
                hint="save a checkpoint, and load it into a new model",
            )
        self.collectives = collectives
        piece = self.own_piece(home, home.unit.master, start=home.unit.owned[0])
        whole, pending = self.assemble(home, None if piece is None else piece[1], dtype=home.unit.master.dtype)
        for work in pending:
            work.wait()
        return whole

    def _is_elsewhere(self, home: UnitHome) -> bool:
        return home.unit is not None and self.plan.shard_parameters

    def _fetch(self, homes: list[UnitHome]) -> list[Pending]:
        """Gives parameters of one unit, or frozen ones, memory of their own with their whole values."""
        unit = homes[0].unit
        if unit is None or not self.plan.shard_parameters:
            for home in homes:
                home.full = home.param.detach().clone(memory_format=torch.contiguous_format)
            return []
        if len(homes) == len(unit.params):
            flat = torch.empty(unit.layout.padded_numel, dtype=unit.shard.dtype, device=unit.shard.device)
            views = dict(zip(map(id, unit.params), unit.views(flat), strict=True))
            for home in homes:
                home.flat, home.full = flat, views[id(home.param)]
            return [self.collectives.all_gather(flat, unit.shard, of=unit.label)]
        pending: list[Pending] = []
        for home in homes:
            piece = self.own_piece(home, unit.shard, start=self.shard_start(unit))
            home.full, works = self.assemble(home, None if piece is None else piece[1], dtype=unit.shard.dtype)
            pending += works
        return pending

    def _take_over(self, homes: list[UnitHome], source: int, *, failed: bool) -> None:
        reshaped = [home for home in homes if home.full is not None and home.param.shape != home.full.shape]
        device = self.units[0].shard.device
        gave_up = torch.tensor([int(failed or bool(reshaped))], device=device)
        self.collectives.all_reduce(gave_up, op="max", of="GatheredParameters outcome").wait()
        if reshaped and not failed:
            home = reshaped[0]
            assert home.full is not None, "chosen so"
            raise ModelError(
                f"GatheredParameters: `{home.name}` was given the shape {tuple(home.param.shape)}; "
                f"it is {tuple(home.full.shape)}",
                hint="change shapes before dsrun.initialize",
            )
        if int(gave_up.item()):
            return
        for home in homes:
            assert home.full is not None, "chosen so"
            if home.param.data_ptr() != home.full.data_ptr():  # the script has set `.data`
                home.full.copy_(home.param.detach())
        pending = [
            self.collectives.broadcast(buffer, source=source, of="modified parameters") for buffer in _buffers_of(homes)
        ]
        for work in pending:
            work.wait()
        for home in homes:
            assert home.full is not None, "chosen so"
            if home.unit is not None:
                self.write(home, home.full, exact=False)
            elif home.resident is not None:
                home.resident.copy_(home.full)
        self.publish(list({home.unit.index: home.unit for home in homes if home.unit is not None}.values()))


def _buffers_of(homes: Sequence[UnitHome]) -> list[Tensor]:
    """Returns flat memory that holds the open parameters: a unit's buffer where all of it is in it."""
    by_buffer: dict[int, list[UnitHome]] = {}
    alone: list[Tensor] = []
    for home in homes:
        assert home.full is not None, "the parameters are open"
        if home.flat is None:
            alone.append(home.full.view(-1))
        else:
            by_buffer.setdefault(id(home.flat), []).append(home)
    buffers: list[Tensor] = []
    for group in by_buffer.values():
        flat, unit = group[0].flat, group[0].unit
        assert flat is not None, "grouped by it"
        assert unit is not None, "frozen parameters share no buffer"
        pieces = [home.full.view(-1) for home in group if home.full is not None]
        buffers += [flat] if len(group) == len(unit.params) else pieces
    return [buffer for buffer in chain(buffers, alone) if buffer.numel()]
